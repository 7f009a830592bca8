"""What only the writer writes: readers have it mapped read-only, and cannot get it in any other way."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal

import pytest
from children import child
from loops import open_fds
from pairs import attached

from aioshm import MessageQueue, Options

pytestmark = pytest.mark.slow_on_uvloop

BACKINGS = pytest.mark.parametrize("backing", ["memfd", "named"])
BIG = bytes(range(256)) * 200


@BACKINGS
async def test_a_readers_process_cannot_get_them_writable(backing: str) -> None:
    writer = MessageQueue(1, 1, max_chunk_bytes=4096, options=Options(backing=backing))  # type: ignore[arg-type]
    async with child("remap", writer.export_handle().to_json(), "0") as reader, writer:
        await writer.enqueue(BIG)  # there is an overflow segment, too
        await reader.says("ready")
        assert await reader.says() == "2 descriptors, writable [], mprotect refused"
        assert await reader.end() == 0


@pytest.mark.parametrize(
    ("backing", "where"), [("memfd", "slot"), ("memfd", "chunk"), ("memfd", "segment"), ("named", "slot")]
)
async def test_a_reader_that_writes_there_ends_itself_and_no_other_sees_a_change(backing: str, where: str) -> None:
    options = Options(backing=backing, on_reader_death="evict")  # type: ignore[arg-type]
    writer = MessageQueue(2, 2, max_chunk_bytes=4096, options=options)
    message = {"slot": BIG[:500], "chunk": BIG[:1000], "segment": BIG}[where]
    async with writer, child("scribble", writer.export_handle().to_json(), "0", where) as scribbler:
        async with MessageQueue.create_from_handle(writer.export_handle(), 1) as reader:
            await asyncio.gather(writer.enqueue(message), reader.wait_until_ready(30))
            await scribbler.says("ready")
            await scribbler.says("scribbling")
            assert await scribbler.end() == -signal.SIGSEGV
            assert await reader.dequeue(10) == message
            await writer.enqueue("and it goes on")
            assert await reader.dequeue(10) == "and it goes on"


async def test_every_memfd_of_a_queue_is_sealed_against_shrinking() -> None:
    async with attached(1, chunk=4096) as (writer, (reader,)):
        await writer.enqueue(BIG)
        assert await reader.dequeue(5) == BIG
        sealed = 0
        for fd, target in open_fds().items():
            if "memfd:aioshm" not in target:
                continue
            seals = fcntl.fcntl(int(fd), fcntl.F_GET_SEALS)
            assert seals & fcntl.F_SEAL_SHRINK
            assert seals & fcntl.F_SEAL_SEAL
            with pytest.raises(OSError, match=r"not permitted|Invalid argument"):  # sealed, or a descriptor that reads
                os.ftruncate(int(fd), 0)
            sealed += 1
        assert sealed >= 4, "the ring and an overflow segment, at both ends"
