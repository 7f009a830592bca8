"""Writing into what is leased: it raises, or reaches a private copy; no other reader sees it, nor the next message."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from faces import Thread, make_writer
from pairs import attached
from support import eventually

from aioshm import blocking
from aioshm.errors import SharedMemoryError
from aioshm.ring.window import Windows

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="private mappings show no changes elsewhere")

CHUNK = 1 << 20
SIZES = {"copied": 9000, "slot": 600_000, "segment": 1_100_000}
CODECS = pytest.mark.parametrize("codec", ["pickle", "msgpack"])
SOMEWHERE = pytest.mark.parametrize("size", SIZES.values(), ids=SIZES.keys())
LAPS = 9
"""Messages: more than two laps of a ring of 3."""


def _new(number: int, size: int) -> torch.Tensor:
    return torch.full((size,), number, dtype=torch.uint8)


def _scribble(tensor: torch.Tensor) -> None:
    """Write to the first, a middle and the last page."""
    for at in (0, len(tensor) // 2, -1):
        tensor[at] = 200
    assert [int(tensor[at]) for at in (0, len(tensor) // 2, -1)] == [200, 200, 200]


def _write_if_allowed(array: Any, size: int) -> None:
    """Write to an array, which raises where it is a view: small ones are as `dequeue` returns them."""
    if size == SIZES["copied"]:
        array[0] = 200
        return
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 200


@CODECS
@SOMEWHERE
async def test_tensors(codec: str, size: int) -> None:
    kept: list[torch.Tensor] = []
    async with attached(3, codec=codec, chunk=CHUNK, chunks=3) as (writer, (scribbler, other, receiver)):
        for number in range(LAPS):
            sent = _new(number, size)
            await writer.enqueue([sent])
            async with scribbler.lease() as (leased,):
                assert torch.equal(leased, sent), "what was written into the slot before is not seen"
                _scribble(leased)
                async with other.lease() as (seen,):
                    assert torch.equal(seen, sent)
                del seen
                if number % 3 == 0:
                    kept.append(leased)
                del leased
            assert torch.equal((await receiver.dequeue())[0], sent)
        for number, leased in zip(range(0, LAPS, 3), kept, strict=True):
            again = _new(number, size)
            _scribble(again)
            assert torch.equal(leased, again), "a copy of its own, with what was written to it"


@CODECS
@SOMEWHERE
async def test_arrays(codec: str, size: int) -> None:
    async with attached(1, codec=codec, chunk=CHUNK, chunks=3) as (writer, (reader,)):
        for number in range(4):
            await writer.enqueue([np.full(size, number, np.uint8)])
            async with reader.lease() as (leased,):
                assert (leased == number).all()
                _write_if_allowed(leased, size)


@contextmanager
def _blocking_ends(n_reader: int, **arguments: Any) -> Iterator[tuple[Any, list[Any]]]:
    with make_writer(n_reader, **arguments) as writer:
        handle = writer.export_handle()
        readers = [blocking.MessageQueue.create_from_handle(handle, rank) for rank in range(n_reader)]
        threads = [Thread(end.wait_until_ready, 20) for end in (writer, *readers)]
        for thread in threads:
            thread.result()
        yield writer, readers
        for reader in readers:
            reader.close()


@CODECS
@SOMEWHERE
def test_tensors_and_arrays_where_calls_block(codec: str, size: int) -> None:
    with _blocking_ends(2, codec=codec, chunk=CHUNK, chunks=3) as (writer, (scribbler, receiver)):
        for number in range(LAPS):
            sent = _new(number, size)
            writer.enqueue([sent, sent.numpy()[: size // 2]], 20)
            with scribbler.lease() as (leased, array):
                assert torch.equal(leased, sent)
                assert np.array_equal(array, sent[: size // 2])
                _write_if_allowed(array, size)
                _scribble(leased)
            found = receiver.dequeue(20)
            assert torch.equal(found[0], sent)
            assert np.array_equal(found[1], sent[: size // 2])


async def test_without_pagemap_every_leased_window_is_taken_for_written(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = os.open

    def refuse(path: Any, *args: Any) -> int:
        if path == "/proc/self/pagemap":
            raise PermissionError
        return usual(path, *args)

    monkeypatch.setattr(os, "open", refuse)
    async with attached(1, chunk=CHUNK, chunks=3) as (writer, (reader,)):
        for number in range(LAPS):
            await writer.enqueue(_new(number, 600_000))
            async with reader.lease() as leased:
                assert torch.equal(leased, _new(number, 600_000))
                _scribble(leased)
                del leased


async def test_a_window_that_nobody_wrote_to_is_used_again() -> None:
    async with attached(1, chunk=CHUNK, chunks=3) as (writer, (reader,)):
        addresses = set()
        for number in range(LAPS):
            await writer.enqueue(_new(number, 600_000))
            async with reader.lease() as leased:
                addresses.add(leased.data_ptr())
                assert int(leased.sum()) == 600_000 * number
                np.ones(1 << 20).sum()  # faults that are not the window's
                del leased
        assert len(addresses) == 1, "the chunk that became free last is taken again"


async def test_without_mappings_a_lease_is_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise SharedMemoryError(12, "no window")

    monkeypatch.setattr(Windows, "_open", refuse)
    async with attached(1, chunk=CHUNK, chunks=3) as (writer, (reader,)):
        for number in range(LAPS):
            await writer.enqueue([_new(number, 600_000), "and more"])
            async with reader.lease() as (leased, text):
                assert torch.equal(leased, _new(number, 600_000))
                assert text == "and more"


async def test_a_process_that_writes_everywhere_leaks_nothing() -> None:
    def private_kib() -> int:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("RssAnon"))

    async with attached(1, chunk=8 << 20, chunks=2) as (writer, (reader,)):
        sent = _new(1, 8_000_000)
        await writer.enqueue(sent)
        async with reader.lease() as leased:
            before = private_kib()
            leased += 1
            assert private_kib() - before > 7000
            del leased
        eventually(lambda: private_kib() - before < 1000, "the written pages to go")
