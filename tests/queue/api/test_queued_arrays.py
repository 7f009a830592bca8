"""Messages that are one array arrive as the array that was sent, by either codec and either core."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from pairs import attached
from support import HELPERS

from aioshm import MessageQueue
from aioshm.codec.frames import parts_of
from aioshm.codec.pickle5 import PickleCodec

CHILD = str(HELPERS / "arrays_child.py")
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
@pytest.mark.parametrize("how", ["dequeue", "lease", "many"])
async def test_each_array_arrives_as_it_was(how: str) -> None:
    sent = [numbered(array, n) for array in ARRAYS for n in range(3)]
    async with attached(chunk=2**20) as (writer, (reader,)), asyncio.TaskGroup() as tasks:
        tasks.create_task(send(writer, sent))
        received: list[Any] = []
        while len(received) < len(sent):
            if how == "dequeue":
                received.append(await reader.dequeue(5))
            elif how == "many":
                received += await reader.dequeue_many(3, 5)
            else:
                async with reader.lease(5) as obj:
                    received.append(obj)
        for one, other in zip(received, sent, strict=True):
            same(one, other)


async def test_objects_never_travel_as_pointers() -> None:
    inside = ["of the writer's process"]
    array = np.array([inside, None], object)
    async with attached(chunk=2**20) as (writer, (reader,)):
        for n in range(8):
            await writer.enqueue(array, 5)
            if n % 2:
                received = await reader.dequeue(5)
                assert (received[0] == inside, received[0] is inside) == (True, False)
            else:
                async with reader.lease() as leased:
                    assert (leased[0] == inside, leased[0] is inside) == (True, False)
        assert sys.getrefcount(inside) == 3  # here, in the array, and this call's


async def test_types_that_cannot_be_hashed_or_compared_are_encoded() -> None:
    strings = np.array(["one", "x" * 40], dtype=np.dtypes.StringDType(na_object=[1]))
    with pytest.raises(TypeError):
        hash(strings.dtype)
    async with attached(chunk=2**20) as (writer, (reader,)):
        for _ in range(5):
            await writer.enqueue(strings, 5)
            assert (await reader.dequeue(5)).tolist() == ["one", "x" * 40]


async def test_codecs_of_others_decode_every_array() -> None:
    class Negated(PickleCodec):
        """Sends the complement of each byte."""

        def decode(self, main: Any, buffers: Any) -> Any:
            return super().decode(main, [memoryview(bytes(255 - byte for byte in each)) for each in buffers])

    array = np.arange(5000, dtype="u1")
    async with attached(chunk=2**20, codec=Negated()) as (writer, (reader,)):
        for _ in range(5):
            await writer.enqueue(array, 5)
            assert np.array_equal(await reader.dequeue(5), ~array)


DTYPES = ["f4", "f8", "f2", "i1", "q", "l", "?", "c16", "g", ">f4", "M8[s]", "U3", "S4", "V8", FIELDS, "O"]
SHAPES = [(), (1,), (3,), (0,), (3, 0), (8, 8), (512, 3), (100, 100, 4)]


def any_array(chance: random.Random, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Any:
    """Return an array of random numbers and layout."""
    count = int(np.prod(shape))
    if dtype.hasobject:
        array = np.array([f"{chance.random()}" for _ in range(count)], object).reshape(shape)
    elif dtype.kind in "U?":
        array = np.array([chance.randrange(2) for _ in range(count)], dtype).reshape(shape)
    else:
        array = np.frombuffer(chance.randbytes(count * dtype.itemsize), dtype).reshape(shape).copy()
    layout = chance.random()
    return (
        array.T
        if layout < 0.1
        else array[::2]
        if layout < 0.2 and shape
        else read_only(array)
        if layout < 0.3
        else array
    )


@pytest.mark.slow_on_uvloop
async def test_in_another_process_they_are_what_was_sent() -> None:
    chance, count = random.Random(7), 400
    kind: tuple[np.dtype[Any], tuple[int, ...]] = np.dtype("O"), (3,)
    async with MessageQueue(1, 1) as writer:
        handle = writer.export_handle().to_json()
        child = subprocess.Popen([sys.executable, CHILD, handle], stdout=subprocess.PIPE, text=True)
        try:
            for n in range(count):
                if n % 6 == 5:
                    kind = np.dtype(chance.choice(DTYPES)), chance.choice(SHAPES)
                array = any_array(chance, *kind)
                await writer.enqueue((array,), 60)
                await writer.enqueue(array, 60)
            await writer.aclose()
            told = await asyncio.to_thread(child.communicate)
        finally:
            child.kill()
            child.wait()
    assert (child.returncode, told[0]) == (0, f"{count}\n")
