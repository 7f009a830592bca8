"""Views that outlive a lease, or are written to, are private copies; and ends that die or close during a lease."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from pairs import attached
from receiving import acquire_read, dequeue, dequeue_many, dequeue_nowait, lease
from support import raising, until

from aioshm import MessageQueue, QueueEmpty, ReaderEvicted, RoleError
from aioshm.errors import SharedMemoryError
from aioshm.ring import window
from aioshm.ring.window import Windows

pytestmark = pytest.mark.slow_on_uvloop

LARGE = 600_000
"""More than `leases.VIEW_BYTES`."""


def _array(number: int, size: int) -> Any:
    return np.full(size, number % 251, np.uint8)


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("size", [5000, LARGE])
async def test_what_is_kept_never_changes_while_the_writer_laps(size: int, chunks: int) -> None:
    async with attached(1, chunks=chunks, chunk=1 << 20) as (writer, (reader,)):
        kept = []
        for number in range(40):
            await writer.enqueue(_array(number, size), 5)
            async with reader.lease(5) as array:
                if number % 3 == 0:
                    kept.append((number, array, array[5:50], memoryview(array)[7:]))
        for number in range(40, 80):  # over everything, in every other way
            await writer.enqueue(_array(number, size), 5)
            assert (await reader.dequeue(5) == number % 251).all()
        for number, array, part, view in kept:
            assert array.shape == (size,)
            assert (array == number % 251).all()
            assert (part == number % 251).all()
            assert set(bytes(view)) == {number % 251}


async def _prolong_respite(reader: Any) -> None:
    """Wait until the reader waits; then let its respite end, and be prolonged, a few times."""
    await until(lambda: reader.end.state.waits, "the reader waits")
    leases = reader.end.source._slots._leases
    for _ in range(3):
        leases._timer.cancel()
        leases._retained_at -= leases._respite_s
        leases._respite_ends()


async def _lease(reader: MessageQueue) -> Any:
    async with reader.lease(30) as array:
        return array[0]


@pytest.mark.usefixtures("long_respite")
@pytest.mark.parametrize("lent", [False, True])
async def test_a_loop_that_waits_keeps_its_message_without_a_copy(lent: bool) -> None:
    async with attached(1, chunks=3, chunk=1 << 20) as (writer, (reader,)):
        for number in range(3):
            if lent:
                async with writer.loan(LARGE, "uint8") as array:
                    array[:] = number
            else:
                await writer.enqueue(_array(number, LARGE))
            async with reader.lease(5) as leased:
                assert (leased == number).all()
            waiting = asyncio.ensure_future(_lease(reader))
            await _prolong_respite(reader)
            assert (leased == number).all()
            del leased
            await writer.enqueue(_array(100, LARGE))
            assert await waiting == 100
            assert reader.stats().copied_bytes == 0


@pytest.mark.usefixtures("long_respite")
async def test_a_loop_that_waits_gives_a_message_up_that_the_writer_waits_for() -> None:
    async with attached(1, chunks=3, chunk=1 << 20) as (writer, (reader,)):
        await writer.enqueue(_array(1, LARGE))
        async with reader.lease(5) as leased:
            pass
        waiting = asyncio.ensure_future(_lease(reader))
        await _prolong_respite(reader)
        await asyncio.wait_for(writer.enqueue_many([_array(2, LARGE)] * 3), 10)  # needs every chunk
        assert await waiting == 2
        assert (leased == 1).all()
        assert LARGE <= reader.stats().copied_bytes < 1.1 * LARGE


async def test_a_reader_that_does_nothing_gives_a_message_up_after_its_respite() -> None:
    async with attached(1, chunks=3, chunk=1 << 20) as (writer, (reader,)):
        await writer.enqueue(_array(1, LARGE))
        async with reader.lease(5) as leased:
            pass
        await asyncio.wait_for(writer.enqueue_many([_array(2, LARGE)] * 3), 10)  # needs every chunk
        assert (leased == 1).all()


@pytest.mark.usefixtures("long_respite")
async def test_a_reader_that_is_dismissed_keeps_what_it_had() -> None:
    async with attached(2, chunks=3, chunk=1 << 20) as (writer, (reader, other)):
        await writer.enqueue(_array(1, LARGE))
        await other.dequeue(5)
        async with reader.lease(5) as leased:
            pass
        waiting = asyncio.ensure_future(_lease(reader))
        await _prolong_respite(reader)
        writer.dismiss(0)
        with pytest.raises(ReaderEvicted):
            await waiting
        for number in range(10):
            await writer.enqueue(_array(100 + number, LARGE), 5)
            await other.dequeue(5)
        assert (leased == 1).all()


@pytest.mark.parametrize("receive", [dequeue, dequeue_many, dequeue_nowait, acquire_read])
async def test_a_lease_is_over_before_the_next_call_reads(receive: Callable[..., Awaitable[Any]]) -> None:
    async with attached(1, chunks=3, chunk=1 << 20) as (writer, (reader,)):
        for number in range(0, 8, 2):
            await writer.enqueue_many([_array(number, LARGE), _array(number + 1, LARGE)])
            async with reader.lease(5) as array:
                pass
            got = np.frombuffer(await receive(reader, timeout=5), np.uint8)
            assert (got[1000:2000] == (number + 1) % 251).all()
            assert writer.stats().backlog == 0
            await writer.enqueue_many([_array(99, LARGE)] * 3, 5)
            assert (array == number % 251).all()
            for _ in range(3):
                await reader.dequeue(5)


@pytest.mark.parametrize("during", [True, False])
@pytest.mark.parametrize("size", [5000, LARGE])
async def test_closing_leaves_a_copy(size: int, during: bool) -> None:
    async with attached(2, chunks=3, chunk=1 << 20) as (writer, (reader, other)):
        await writer.enqueue(_array(5, size))
        async with reader.lease(5) as array:
            if during:
                await reader.aclose()
                assert (array == 5).all()
        if not during:
            await reader.aclose()
        await other.dequeue(5)
        for number in range(10):
            await writer.enqueue(_array(100 + number, size), 5)
            await other.dequeue(5)
        assert (array == 5).all()


async def test_reader_that_closes_without_memory_for_a_held_view_leaves_its_writer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with attached(1, chunks=3, chunk=1 << 20) as (writer, (reader,)):
        await writer.enqueue(_array(1, LARGE), 5)
        async with reader.lease(5) as array:
            pass
        with monkeypatch.context() as patch:
            patch.setattr(window, "_exchange", raising(OSError(errno.ENOMEM, "no memory")))
            with pytest.raises(SharedMemoryError, match="no copy of"):
                await reader.aclose()
        await until(lambda: writer.readers[0].state == "left", "the goodbye")
        reader.end.source.close()  # type: ignore[union-attr]  # there is memory again
        assert (array == 1).all()


# A task that holds a slot cannot wait for the same end


async def test_a_task_does_not_wait_for_itself() -> None:
    async with attached(1, chunks=8) as (writer, (reader,)):
        await writer.enqueue_many(range(4))
        for block in (reader.lease, reader.acquire_read):
            async with block(5):
                for receive in (dequeue, dequeue_many, lease, acquire_read):
                    with pytest.raises(RoleError, match="inside of a block that has its slot"):
                        await receive(reader)
                with pytest.raises(QueueEmpty):
                    reader.dequeue_nowait()
                await writer.enqueue("another end may be used")
        assert await reader.dequeue_many(9, 5) == [2, 3, "another end may be used", "another end may be used"]
        async with writer.acquire_write() as chunk:
            for call in (lambda: writer.enqueue(1), lambda: writer.enqueue_many([1])):
                with pytest.raises(RoleError, match="inside of a block that has its slot"):
                    await call()
            with pytest.raises(RoleError, match="inside of a block that has its slot"):
                async with writer.acquire_write():
                    pytest.fail("it went in twice")
            chunk[:2] = b"ok"
        assert (await reader.dequeue(5))[:2] == b"ok"
        await writer.enqueue("goes on")
        assert await reader.dequeue(5) == "goes on"


async def test_without_mappings_a_lease_is_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Windows, "_open", raising(SharedMemoryError(12, "no window")))
    async with attached(1, chunk=1 << 20, chunks=3) as (writer, (reader,)):
        for number in range(7):  # more than two laps
            await writer.enqueue([_array(number, LARGE), "and more"])
            async with reader.lease() as (leased, text):
                assert (leased == number).all()
                assert text == "and more"
