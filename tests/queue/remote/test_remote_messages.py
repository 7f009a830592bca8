"""Large messages for remote readers, which are sent in parts, and messages for which there is no memory."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from proxy import through_proxies
from remotes import ready_ends
from support import raising, until

from aioshm import CodecError, PeerDied, SharedMemoryError
from aioshm.codec.frames import RAW
from aioshm.queue.remote import messages, wire
from aioshm.queue.remote.messages import Assembly

TOGETHER = 16 << 20


def array(number: int, nbytes: int = TOGETHER) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.arange(nbytes // 8) + number


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "PART_BYTES", 20_000)


@pytest.mark.slow
async def test_memory_of_the_parts_of_a_large_message_goes_back_to_the_system() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    async with ready_ends(0, 1) as (writer, (reader,)):
        await writer.enqueue("small")
        await reader.dequeue(60)
        before = resident()
        sent = array(5, 200 << 20)
        sending = asyncio.ensure_future(writer.enqueue(sent))
        assert ((await reader.dequeue(100)) == sent).all()
        await sending
        del sent
        await until(lambda: resident() < before + (50 << 20), "the end of the memory's use")


# Connections that end


@pytest.mark.parametrize("how", ["reset", "truncate"])
async def test_message_whose_connection_ends_between_its_parts_comes_whole(how: str, small_parts: None) -> None:
    async with through_proxies(remote_timeout=5.0) as (writer, reader, data, _control):
        for number in range(2):
            data.delay_s = 0.01
            before = data.connections
            receiving = asyncio.ensure_future(reader.dequeue(60))
            await writer.enqueue({"number": number, "array": array(number, 4 << 20)})
            link: Any = reader.end.source
            await until(lambda link=link: link._assembly._filled > 0, "the first part")
            data.truncate() if how == "truncate" else data.cut(reset=True)
            data.delay_s = 0.0
            received = await receiving
            assert received["number"] == number
            assert (received["array"] == array(number, 4 << 20)).all()
            assert data.connections > before
        await writer.enqueue("after")
        assert await reader.dequeue(20) == "after"


async def test_writer_that_dies_amid_a_message_leaves_its_reader_without_the_message(small_parts: None) -> None:
    async with through_proxies(remote_timeout=0.5) as (writer, reader, data, control):
        await writer.enqueue("whole")
        data.delay_s = 0.01
        await writer.enqueue(array(3, 4 << 20))
        link: Any = reader.end.source
        await until(lambda: link._assembly._filled > 0, "the first part")
        for proxy in (data, control):
            proxy.refuse()
        assert await reader.dequeue(20) == "whole"
        with pytest.raises(PeerDied):
            await reader.dequeue(20)
        assert link._assembly._memory is None, "the parts that came are given back"


# What is received


class ShortOnly:
    """A codec of somebody else's, which fails for long messages."""

    name = "short"
    code = 77
    encode = staticmethod(bytes)

    def decode(self, main: Any, buffers: Any) -> bytes:
        if len(main) > 10:
            raise ValueError("too long")
        return bytes(main)


NONE_LEFT = raising(OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)))


async def test_message_for_which_there_is_no_memory_is_named_and_its_reader_leaves(
    small_parts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ready_ends(0, 1, codec="raw", remote_timeout=1.0) as (writer, (reader,)):
        await writer.enqueue(b"before")
        monkeypatch.setattr(messages, "MessageMemory", NONE_LEFT)
        await writer.enqueue(bytes(100_000))
        assert await reader.dequeue(20) == b"before"
        for _ in range(2):
            with pytest.raises(
                SharedMemoryError, match="message 1 of 100000 bytes does not fit into memory: raise the limits"
            ) as caught:
                await reader.dequeue(20)
            assert caught.value.errno == errno.ENOMEM
        await reader.aclose()
        await until(lambda: writer.readers[0].state == "left", "the goodbye", 0.9)


@pytest.mark.parametrize("n_local", [0, 1])
async def test_batch_of_which_a_message_cannot_be_copied_is_not_sent(
    n_local: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ready_ends(n_local, 1, chunk=1 << 20) as (writer, readers):
        with monkeypatch.context() as patch:
            patch.setattr(messages, "MessageMemory", NONE_LEFT)
            for size in (100_000, 20_000):
                with pytest.raises(SharedMemoryError, match=r"message 1 of .* does not fit into memory: raise"):
                    await writer.enqueue_many(["small", np.zeros(size)])
            with pytest.raises(SharedMemoryError, match=r"message 0 of .* does not fit into memory: raise"):
                await writer.enqueue(np.zeros(100_000))
        await writer.enqueue_many(["small", np.ones(100_000)])
        for reader in readers:
            assert await reader.dequeue(20) == "small"
            assert (await reader.dequeue(20) == 1).all()


async def test_batch_ends_before_a_message_that_its_codec_cannot_decode() -> None:
    async with ready_ends(1, 1, codec=ShortOnly(), chunk=1 << 20) as (writer, readers):
        await writer.enqueue_many([b"first", bytes(20_000), bytes(20_000), b"last"])
        for reader in readers:
            await until(lambda end=reader: end.stats().backlog == 4, "all messages")
            assert await reader.dequeue_many(9, 20) == [b"first"]
            with pytest.raises(CodecError, match="cannot decode a short message: ValueError: too long"):
                await reader.dequeue_many(9, 20)
            with pytest.raises(CodecError, match="cannot decode a short message: ValueError: too long"):
                async with reader.lease(20):
                    pass
            assert await reader.dequeue_many(9, 20) == [b"last"]


@pytest.mark.parametrize("codec", ["pickle", "msgpack"])
async def test_large_arrays_of_every_kind_arrive_as_they_were_sent(codec: str, small_parts: None) -> None:
    whole = np.random.default_rng(1).integers(0, 256, 100_000, np.uint8)
    readonly = np.frombuffer(whole.tobytes(), np.float16)
    sent: list[Any] = [whole, readonly, readonly[1:].reshape(-1, 1), whole.reshape(2, -1).T, torch.from_numpy(whole)]
    async with ready_ends(0, 1, codec=codec) as (writer, (reader,)):
        for array in sent:
            for message in ((1, array), (array, whole[:10_000], array)):
                await writer.enqueue(message)
                received = await reader.dequeue(60)
                assert len(received) == len(message)
                for found, wanted in zip(received, message, strict=True):
                    if isinstance(wanted, np.ndarray | torch.Tensor):
                        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
                        assert np.asarray(found).tobytes() == np.asarray(wanted).tobytes()


async def test_large_array_is_its_receivers_own_also_after_a_lease(small_parts: None) -> None:
    async with ready_ends(0, 1) as (writer, (reader,)):
        for number in (0, 0, 1):
            await writer.enqueue(array(number, 1 << 20))
        first = await reader.dequeue(60)
        first[:] = 7
        async with reader.lease(60) as leased:
            kept: Any = leased
        assert (await reader.dequeue(60) == array(1, 1 << 20)).all()
        assert (kept == array(0, 1 << 20)).all()


# The assembly


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9), st.integers(0, 9), st.integers(1, 9))))
def test_only_whole_messages_come_of_parts_that_are_cut_off_and_sent_again(
    sent: list[tuple[int, int, int, int]],
) -> None:
    """Each message: its number, its parts, the first and the number of parts of it that arrive."""
    assembly = Assembly()
    for seq, count, first, length in sent:
        content = [bytes([seq, number]) for number in range(count)]
        came = []
        for number in range(count)[first : first + length]:
            data = wire.Data(RAW, 0, 0, seq, 2 * count, memoryview(content[number]), b"", 2 * number, 2 * count)
            if (whole := assembly.add(data)) is not None:
                came.append(bytes(whole.body))
        if first == 0:
            assert came == ([b"".join(content)] if length >= count else [])
