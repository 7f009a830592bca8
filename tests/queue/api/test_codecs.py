"""Codecs over a real queue: by name, as instances, third-party ones; arrays arrive as they were sent."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from pairs import attached

from aioshm import CodecError, HandleError, MessageQueue
from aioshm.codec import MsgpackCodec, register_codec, registry
from aioshm.codec.frames import parts_of
from aioshm.codec.pickle5 import PickleCodec
from aioshm.errors import RoleError


class Reversed:
    """A codec of somebody else's: bytes, backwards."""

    name = "reversed"
    code = 77

    def encode(self, obj: Any) -> bytes:
        if not isinstance(obj, bytes):
            raise CodecError(f"not bytes but {type(obj).__name__}")
        return obj[::-1]

    def decode(self, main: Any, buffers: Any) -> bytes:
        return bytes(main)[::-1]


@pytest.fixture
def reversed_codec() -> Iterator[None]:
    register_codec("reversed", Reversed)
    yield
    del registry._factories["reversed"], registry._codes["reversed"]


async def test_wrong_codecs_at_the_reader() -> None:
    async with MessageQueue(1, 1, max_chunk_bytes=4096, codec="msgpack") as writer:
        for codec in ("pickle", "raw"):
            with pytest.raises(ValueError, match=f"codec must be 'msgpack', as the handle says, not '{codec}'"):
                MessageQueue.create_from_handle(writer.export_handle(), 0, codec=codec)
        with pytest.raises(TypeError, match="class MsgpackCodec, not an instance"):
            MessageQueue.create_from_handle(writer.export_handle(), 0, codec=MsgpackCodec)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="known are"):
            MessageQueue.create_from_handle(writer.export_handle(), 0, codec="zip")
    with pytest.raises(RoleError):
        await writer.dequeue()


async def test_a_codec_that_nobody_registered_here() -> None:
    async with MessageQueue(1, 1, max_chunk_bytes=4096, codec=Reversed()) as writer:
        with pytest.raises(HandleError, match="must be registered with register_codec in every process"):
            MessageQueue.create_from_handle(writer.export_handle(), 0)
        async with MessageQueue.create_from_handle(writer.export_handle(), 0, codec=Reversed()) as reader:
            _, got = await asyncio.gather(writer.enqueue(b"abc"), reader.dequeue(10))
            assert got == b"abc"


async def test_a_registered_codec(reversed_codec: None) -> None:
    async with attached(2, codec="reversed", chunks=8) as (writer, readers):
        sent = [b"", b"one", b"L" * 9000 + b"!", b"x" * 4000]
        await writer.enqueue_many(sent)
        with pytest.raises(CodecError, match="not bytes but int"):
            await writer.enqueue(5)
        first, second = readers
        received: list[Any] = []
        while len(received) < 4:
            received += await first.dequeue_many(9, 5)
        assert received == sent
        for obj in sent:
            async with second.lease(5) as got:
                assert got == obj


# Messages that are one array


FIELDS = np.dtype([("a", "i4"), ("b", "f8")])


class Matrix(np.ndarray[Any, Any]):
    """An array of somebody else's type."""


def read_only(array: Any) -> Any:
    array.flags.writeable = False
    return array


def plain(size: int) -> list[Any]:
    """Return arrays of as many elements as rows of 8, in all ways in which memory may lie."""
    numbers = np.arange(8 * size)
    rows = numbers.reshape(size, 8)
    return [
        *[
            numbers.astype(dtype)
            for dtype in ("f4", "f8", "i1", "u8", "?", "c16", "M8[s]", "m8[us]", ">f4", "U3", "S5", "q")
        ],
        rows.astype("f4"),
        rows.astype("f4").reshape(size, 2, 4),
        rows.astype("f4").T,
        rows.astype("f4")[:, ::2],
        rows.astype("f4")[::-1],
        read_only(rows.astype("f4")),
        rows.astype("f4").view(Matrix),
        np.zeros(size, FIELDS),
        numbers.astype(object),
        numbers.astype(np.dtype("f4", metadata={"unit": "m"})),
    ]


ARRAYS = [np.float32(2.5), np.array(7), np.zeros(0, "f4"), np.zeros((3, 0, 2)), *plain(1), *plain(100), *plain(2000)]


def same(received: Any, sent: Any) -> None:
    """Assert that one array arrived as the other was."""
    assert (type(received), received.shape, received.dtype) == (type(sent), sent.shape, sent.dtype)
    assert received.dtype.str == sent.dtype.str
    np.testing.assert_array_equal(received, sent)
    alone = PickleCodec()
    parts, buffers = parts_of(alone.encode(sent))
    encoded = alone.decode(b"".join(parts), buffers)
    if isinstance(sent, np.ndarray):
        for flag in ("writeable", "c_contiguous", "f_contiguous", "aligned"):
            assert getattr(received.flags, flag) == getattr(encoded.flags, flag), flag


def numbered(array: Any, n: int) -> Any:
    """Return an array like this one with other numbers, if it has any."""
    return array if array.dtype.kind not in "fiuc" or not array.flags.writeable else array + array.dtype.type(n)


async def send(writer: MessageQueue, arrays: Sequence[Any]) -> None:
    for each in arrays:
        await writer.enqueue(each, 5)


@pytest.mark.slow_on_uvloop
async def test_each_array_arrives_as_it_was() -> None:
    sent = [numbered(array, n) for array in ARRAYS for n in range(3)]
    async with attached(chunk=2**20) as (writer, (reader,)), asyncio.TaskGroup() as tasks:
        tasks.create_task(send(writer, sent))
        received: list[Any] = []
        while len(received) < len(sent):
            received.append(await reader.dequeue(5))
            if len(received) < len(sent):
                received += await reader.dequeue_many(3, 5)
            if len(received) < len(sent):
                async with reader.lease(5) as obj:
                    received.append(obj)
        for one, other in zip(received, sent, strict=True):
            same(one, other)


async def test_a_generator_may_refill_one_array() -> None:
    def refilled(array: Any) -> Any:
        for number in range(3):
            array[:] = number
            yield array

    async with attached() as (writer, (reader,)):
        await writer.enqueue_many(refilled(np.zeros(2000, np.uint8)), 20)
        assert [bytes(await reader.dequeue(20))[-1] for _ in range(3)] == [0, 1, 2]
