"""Large arrays that stay in their overflow segment: what is received never changes, and the memory is used again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loops import open_fds
from overflowing import overflow_of
from pairs import attached
from support import forked

from aioshm.queue.local import overflow

pytestmark = [
    pytest.mark.slow_on_uvloop,
    pytest.mark.skipif(not overflow.CAN_VIEW, reason="arrays are copied out of segments here"),
]

SIZE = 5 << 20


def content(number: int) -> np.ndarray[Any, Any]:
    return np.full(SIZE, number, np.uint8)


def is_in_segment(array: Any) -> bool:
    """Return whether an array lies in a mapping of an overflow segment."""
    address = np.asarray(array).__array_interface__["data"][0]
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(bound, 16) for bound in line.split()[0].split("-"))
        if begin <= address < end:
            return "aioshm-overflow" in line
    return False


@pytest.mark.parametrize("codec", ["pickle", "msgpack"])
@pytest.mark.parametrize("make", [content, lambda n: torch.from_numpy(content(n))], ids=["numpy", "torch"])
async def test_large_array_in_overflow_message_is_not_copied(codec: str, make: Callable[[int], Any]) -> None:
    async with attached(2, codec=codec, chunk=4096) as (writer, readers):
        for number in range(12):
            await writer.enqueue(make(number))
            await writer.enqueue([make(number), "and more"])
            for reader in readers:
                whole = await reader.dequeue(5)
                part, _ = await reader.dequeue(5)
                for array in (whole, part):
                    assert (np.asarray(array) == number).all()
                    assert is_in_segment(array)
                del whole, part, array
        assert len(overflow_of(writer).segments) <= 6


async def test_kept_arrays_never_change_and_are_copied_when_there_are_many() -> None:
    async with attached(2, chunk=4096) as (writer, (hoarder, reader)):
        kept = []
        for number in range(20):
            await writer.enqueue(content(number))
            kept.append(await hoarder.dequeue(5))
            assert (await reader.dequeue(5) == number).all()
        assert [int(array[0]) for array in kept] == [*range(20)]
        assert all((array == number).all() for number, array in enumerate(kept))
        assert sum(map(is_in_segment, kept)) == overflow.MAX_VIEWED
        assert len(overflow_of(writer).segments) <= overflow.MAX_VIEWED + 3


async def test_writing_to_an_array_reaches_no_other_reader_and_no_later_message() -> None:
    async with attached(2, chunk=4096) as (writer, (scribbler, reader)):
        for number in range(6):
            await writer.enqueue(content(number))
            mine = await scribbler.dequeue(5)
            assert (mine == number).all()
            mine += 100
            assert (await reader.dequeue(5) == number).all()
            assert (mine == number + 100).all()
        assert not is_in_segment(mine), "a program that writes is given copies"


async def test_part_of_an_array_keeps_its_segment() -> None:
    async with attached(1, chunk=4096) as (writer, (reader,)):
        parts = []
        for number in range(3):
            await writer.enqueue(content(number))
            parts.append((await reader.dequeue(5))[-10:].reshape(2, 5))
        for number in range(3, 9):
            await writer.enqueue(content(number))
            assert (await reader.dequeue(5) == number).all()
        assert [part.tolist() for part in parts] == [[[number] * 5] * 2 for number in range(3)]


async def test_small_arrays_of_a_large_message_are_copied() -> None:
    async with attached(1, chunk=4096) as (writer, (reader,)):
        await writer.enqueue([content(1), np.arange(9000)])
        large, small = await reader.dequeue(5)
        assert (is_in_segment(large), is_in_segment(small)) == (True, False)


@pytest.mark.parametrize("how", ["closed", "dismissed"])
async def test_array_of_a_reader_that_has_left_never_changes(how: str) -> None:
    async with attached(2, chunk=4096) as (writer, (leaver, reader)):
        await writer.enqueue(content(7))
        kept = await leaver.dequeue(5)
        assert is_in_segment(kept)
        assert (await reader.dequeue(5) == 7).all()
        if how == "closed":
            await leaver.aclose()
        else:
            writer.dismiss(0)
        for number in range(8):
            await writer.enqueue(content(number), 10)
            assert (await reader.dequeue(5) == number).all()
        await leaver.aclose()
        assert (kept == 7).all()
        assert not is_in_segment(kept)
        assert len(overflow_of(writer).segments) <= 3, "the array was copied out, so its segment is used again"
    assert (kept == 7).all()
    assert not any("aioshm-overflow" in target for target in open_fds().values())


async def test_forked_child_keeps_what_its_parent_drops() -> None:
    async with attached(1, chunk=4096) as (writer, (reader,)):
        await writer.enqueue(content(1))
        array = await reader.dequeue(5)
        assert is_in_segment(array)
        is_same = forked(lambda kept: bool((kept == 1).all()), array)
        del array
        for number in range(2, 9):
            await writer.enqueue(content(number))
            assert (await reader.dequeue(5) == number).all()
        assert is_same()


async def test_leased_array_of_an_overflow_message_is_kept_without_a_copy() -> None:
    async with attached(1, chunk=4096) as (writer, (reader,)):
        kept = []
        for number in range(3):
            await writer.enqueue(content(number))
            async with reader.lease(5) as array:
                kept.append(array)
        for number, array in enumerate(kept):
            assert is_in_segment(array)
            assert (array == number).all()
            assert not array.flags.writeable
        assert reader.stats().copied_bytes == 0
