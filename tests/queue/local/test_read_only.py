"""What only the writer writes: readers have it mapped read-only, and cannot get it in any other way."""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from children import child
from loops import open_fds
from pairs import attached

from aioshm import MessageQueue, Options
from aioshm.errors import RoleError
from aioshm.ring import ShmRingBuffer
from aioshm.ring.mapping import address_of

pytestmark = pytest.mark.one_loop

BACKINGS = pytest.mark.parametrize("backing", ["memfd", "named"])
BIG = bytes(range(256)) * 200


def ring_of(end: Any) -> ShmRingBuffer:
    ring: ShmRingBuffer = end.end.ring.buffer if hasattr(end.end, "ring") else end.end.source.buffer
    return ring


def permissions(ring: ShmRingBuffer, offset: int, length: int) -> set[str]:
    """Return the permissions of all mappings that have a part in a range of a ring."""
    assert ring._segment is not None
    start = address_of(ring._segment._map) + offset
    found = set()
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, flags, _ = line.split(maxsplit=2)
        begin, end = (int(text, 16) for text in addresses.split("-"))
        if begin < start + length and start < end:
            found.add(flags)
    return found


@BACKINGS
async def test_the_slots_are_read_only_in_readers_and_nothing_else_is(backing: str) -> None:
    async with attached(2, backing=backing) as (writer, readers):
        sizes = ring_of(writer).layout
        bodies = sizes.header_bytes, sizes.metadata_offset - sizes.header_bytes
        for reader in readers:
            ring = ring_of(reader)
            assert permissions(ring, *bodies) == {"r--s"}
            assert permissions(ring, 0, sizes.header_bytes) == {"rw-s"}
            assert permissions(ring, sizes.metadata_offset, sizes.slots * sizes.flag_bytes) == {"rw-s"}
            slots = reader.end.source.ring.slots  # type: ignore[attr-defined]
            for slot in map(slots.__getitem__, slots):
                assert (slot.header.readonly, slot.body.readonly, slot.flags.readonly) == (True, True, False)
            with pytest.raises(RoleError, match="mapped for reading"):
                ring.writer()
        assert permissions(ring_of(writer), 0, sizes.total_bytes) == {"rw-s"}


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


async def test_what_readers_are_passed_of_an_overflow_segment_only_reads() -> None:
    async with attached(1, chunk=4096) as (writer, (reader,)):
        await writer.enqueue(BIG)
        assert await reader.dequeue(5) == BIG
        (segment,) = writer.end.ring.overflow.segments  # type: ignore[attr-defined]
        for fd in (segment.passed_fd, reader.end.source.overflow.segments[0].fd):  # type: ignore[attr-defined]
            assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
            with pytest.raises(PermissionError):
                mmap.mmap(fd, 4096)
        await writer.enqueue(BIG * 10)  # it grows
        assert await reader.dequeue(5) == BIG * 10
        assert len(writer.end.ring.overflow.segments) == 1  # type: ignore[attr-defined]


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
