"""Messages that are one array arrive as the array that was sent, by either codec and either core."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from pairs import attached

from aioshm import MessageQueue
from aioshm.codec.frames import parts_of
from aioshm.codec.pickle5 import PickleCodec

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
