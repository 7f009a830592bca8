"""Loans: arrays that are filled where readers see them, sent by reference, and the queue's own afterwards."""

from __future__ import annotations

import asyncio
import gc
import itertools
import signal
from contextlib import AsyncExitStack, suppress
from typing import Any

import numpy as np
import pytest
import torch
from children import child
from faces import pair
from overflowing import overflow_of
from pairs import attached
from remotes import ready_ends
from support import cancelled_after, until

from aioshm import MessageQueue, MessageTooLarge, PeerDied, QueueClosed, QueueFull, RoleError
from aioshm.queue.local.loans import IN_PLACE_BYTES

pytestmark = pytest.mark.slow_on_uvloop

CHUNK = 1 << 20
LIKE = pytest.mark.parametrize("like", ["numpy", "torch"])
SIZES = [0, 1, 900, 1024, 4096, 4609, IN_PLACE_BYTES - 1, IN_PLACE_BYTES, 72 * 1024, 600_000, CHUNK, CHUNK + 1, 3 << 20]
"""Around where it matters: in the slot, the sizes of chunks, in place, seen where it lies, in a segment."""


def _fill(array: Any, number: int) -> None:
    array[:] = number % 251


def _is(array: Any, number: int, size: int) -> bool:
    return len(array) == size and bool((array == number % 251).all())


def _scribble(array: Any) -> None:
    """Write to what was lent, if it lets itself be written to."""
    with suppress(ValueError):
        array[:] = 255


@pytest.mark.parametrize(
    ("like", "options"),
    [
        ("numpy", {"codec": "pickle"}),
        ("torch", {"codec": "pickle"}),
        ("numpy", {"codec": "msgpack"}),
        ("torch", {"codec": "msgpack"}),
        ("numpy", {"overflow": "zmq"}),
        ("numpy", {"slow_reader": "skip"}),
        ("numpy", {"slow_reader": "evict"}),
    ],
    ids=str,
)
async def test_arrays_of_every_size(like: Any, options: dict[str, Any]) -> None:
    async with attached(2, chunk=CHUNK, chunks=3, **options) as (writer, readers):
        for lap in range(2):
            for number, size in enumerate(SIZES, lap):
                async with writer.loan(size, "uint8", like) as array:
                    assert len(array) == size
                    _fill(array, number)
                _scribble(array)
                for reader in readers:
                    if lap == 0:
                        received = await reader.dequeue(5)
                        assert _is(received, number, size)
                        received[:] = 1  # its own
                    else:
                        async with reader.lease(5) as received:
                            assert _is(received, number, size)
                    assert type(received) is (np.ndarray if like == "numpy" else torch.Tensor)


async def test_shapes_and_types_of_arrays() -> None:
    kinds: list[Any] = ["float32", "<i2", np.complex128, np.dtype([("a", "u1"), ("b", "<f8")]), "M8[s]"]
    shapes: list[Any] = [(), 7, (3, 5), (40_000, 2), (2, 0)]
    async with attached(chunk=CHUNK) as (writer, (reader,)):
        for dtype, shape in itertools.product(kinds, shapes):
            async with writer.loan(shape, dtype) as array:
                assert array.dtype == np.dtype(dtype)
                array[...] = np.zeros((), dtype)
                sent = array.copy()
            received = await reader.dequeue(5)
            assert (received.dtype, received.shape) == (sent.dtype, sent.shape)
            assert received.tobytes() == sent.tobytes()


async def test_shapes_and_types_of_tensors() -> None:
    kinds: list[Any] = ["float32", "bfloat16", torch.float8_e5m2, torch.bool]
    async with attached(chunk=CHUNK) as (writer, (reader,)):
        for dtype, shape in itertools.product(kinds, [(), (3, 5), (300, 1000), (2, 0)]):
            async with writer.loan(shape, dtype, "torch") as tensor:
                tensor.fill_(1)
                assert tensor.shape == shape
                assert tensor.is_contiguous()
            async with reader.lease(5) as received:
                assert received.dtype == (getattr(torch, dtype) if isinstance(dtype, str) else dtype)
                assert received.shape == shape
                assert bool((received.to(torch.float32) == 1).all())


@pytest.mark.parametrize("size", [100, 100_000, 2_000_000], ids=["own", "chunk", "segment"])
@LIKE
async def test_what_is_kept_reaches_nobody(size: int, like: Any) -> None:
    kept: list[Any] = []
    async with attached(chunk=CHUNK, chunks=2) as (writer, (reader,)):
        for number in range(6):
            async with writer.loan(size, "uint8", like) as array:
                _fill(array, number)
                kept.append(array[10:20])
                if like == "numpy":
                    kept += [memoryview(array)[30:40], torch.from_numpy(array)[40:50], np.from_dlpack(array)[:9]]
                else:
                    kept += [array.numpy()[30:40], torch.from_dlpack(array)[40:50], array.view(-1, 2)[3:5]]
            array[:] = 255
            for view in kept:
                view[:1] = b"\xff" if isinstance(view, memoryview) else 255
            assert _is(await reader.dequeue(5), number, size)
        async with writer.loan(size, "uint8", like) as array:
            _fill(array, 7)
            for view in kept:
                view[:1] = b"\xee" if isinstance(view, memoryview) else 238
            assert _is(array, 7, size), "what was kept of earlier loans shows none of this one"
        assert _is(await reader.dequeue(5), 7, size)


async def test_reader_with_history_that_attaches_during_a_loan_gets_no_overwritten_message() -> None:
    async with AsyncExitStack() as stack:
        writer, (reader,) = await stack.enter_async_context(attached(chunk=CHUNK, chunks=4, max_readers=2))
        await writer.enqueue(bytes(2_000_000), 5)
        await reader.dequeue(5)
        await writer.enqueue("small", 5)
        await reader.dequeue(5)
        async with writer.loan(2_000_000, "uint8") as array:  # lies where the first message was
            _fill(array, 7)
            newcomer = MessageQueue.create_from_handle(writer.export_handle(), history=2)
            await stack.enter_async_context(newcomer)
            assert await newcomer.dequeue(5) == "small"
        assert _is(await reader.dequeue(5), 7, 2_000_000)
        assert _is(await newcomer.dequeue(5), 7, 2_000_000)


@pytest.mark.usefixtures("long_respite")
@pytest.mark.parametrize("size", [600_000, 2_000_000], ids=["chunk", "segment"])
@pytest.mark.parametrize("moves", [True, False], ids=["moved", "cannot be moved"])
async def test_arrays_whose_names_outlive_their_blocks_show_zeros_and_cost_no_copy(
    size: int, moves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not moves:
        monkeypatch.setattr("aioshm.ring.window._moves_pages", False)
    async with attached(chunk=CHUNK, chunks=3) as (writer, (reader,)):
        for number in range(6):
            async with writer.loan(size, "uint8") as array:
                _fill(array, number)
            assert _is(array, 0, size)
            array[0] = 9
            async with writer.loan(size, "uint8", "torch") as tensor:
                _fill(tensor, number)
            assert _is(tensor, 0, size)
            tensor[0] = 9
            for _ in range(2):
                async with reader.lease(5) as received:
                    assert _is(received, number, size)
        for end in (writer, reader):
            assert end.stats().copied_bytes < 12 * 400, "no more than the pickles"
            assert 12 * size < end.stats().bytes < 12 * (size + 512)
            assert end.stats().overflows == (12 if size > CHUNK else 0)


@pytest.mark.parametrize("size", [10, 100_000, 2_000_000])
@LIKE
async def test_nothing_is_sent_where_the_block_raises(size: int, like: Any) -> None:
    async with attached(chunk=CHUNK, chunks=2) as (writer, (reader,)):
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                async with writer.loan(size, "uint8", like) as array:
                    _fill(array, 1)
                    with pytest.raises(QueueFull, match="is free: a call waits for room, or a block has it"):
                        writer.enqueue_nowait(2)
                    raise ZeroDivisionError
            assert writer.stats().messages == 0
            _scribble(array)
        assert len(overflow_of(writer).segments) <= 1
        await writer.enqueue(np.full(size, 5, np.uint8))
        _scribble(array)
        assert _is(await reader.dequeue(5), 5, size)


async def test_cancelled_at_every_await() -> None:
    async with attached(chunk=CHUNK, chunks=2) as (writer, (reader,)):

        async def lend(number: int) -> None:
            async with writer.loan(100_000, "uint8") as array:
                await asyncio.sleep(0)
                _fill(array, number)
                await asyncio.sleep(0)
            sent.append(number)

        sent: list[int] = []
        for turns in range(8):
            for number in range(5):  # more than there is room for: some wait
                await cancelled_after(lend(number), turns)
            assert writer.stats().messages - reader.stats().messages == len(sent)
            while sent:
                assert _is(await reader.dequeue(5), sent.pop(0), 100_000)
        assert reader.stats().messages > 0, "some were not cancelled"


async def test_closed_inside_of_the_block() -> None:
    async with attached(chunk=CHUNK) as (writer, (reader,)):
        for size in (100_000, 2_000_000):
            async with writer.loan(size, "uint8") as array:
                _fill(array, 1)
            assert _is(await reader.dequeue(5), 1, size)
        with pytest.raises(QueueClosed):
            async with writer.loan(100_000, "uint8") as array:
                closing = asyncio.ensure_future(writer.aclose())
                await until(lambda: writer.end.state.closed)
                _fill(array, 2)
        await closing
        _scribble(array)
        assert len(array) == 100_000, "what is left of it can be touched"
        with pytest.raises(QueueClosed):
            await reader.dequeue(5)


async def test_loan_without_room_times_out_and_may_be_tried_again() -> None:
    async with attached(chunk=CHUNK, chunks=2) as (writer, (reader,)):
        for number in range(2):
            async with writer.loan(300_000, "uint8") as array:
                _fill(array, number)
        with pytest.raises(TimeoutError, match="became free"):
            async with writer.loan(300_000, "uint8", timeout=0.02):
                pass
        assert _is(await reader.dequeue(5), 0, 300_000)
        async with writer.loan(300_000, "uint8", timeout=5) as array:
            _fill(array, 2)
        for number in (1, 2):
            assert _is(await reader.dequeue(5), number, 300_000)


async def test_a_forgotten_block() -> None:
    async with attached(chunk=CHUNK) as (writer, (reader,)):
        writer.loan(100_000)  # nothing was entered
        forgotten = writer.loan(100_000, "uint8")
        array = await forgotten.__aenter__()
        with pytest.warns(ResourceWarning, match="never left"):
            del forgotten
            gc.collect()
        await until(lambda: not writer.end.state.lock.in_own_block, "the loop to take the memory back")
        await asyncio.wait_for(writer.enqueue("after"), 5)
        _scribble(array)
        assert await reader.dequeue(5) == "after"


async def test_remote_readers_get_it_too() -> None:
    async with ready_ends(1, 1, chunk=CHUNK) as (writer, readers):
        for number, size in enumerate((10, 100_000, 2_000_000)):
            async with writer.loan(size, "uint8") as array:
                _fill(array, number)
            _scribble(array)
            for reader in readers:
                assert _is(await reader.dequeue(10), number, size)
            async with writer.loan_bytes(size) as buffer:
                buffer[:] = b"x" * size
            for reader in readers:
                assert bytes(await reader.dequeue(10)) == b"x" * size


async def test_bad_arguments() -> None:
    async with attached(max_message_bytes=200_000) as (writer, (reader,)):
        for shape in ("3", 2.5, (1, None), True):
            with pytest.raises(TypeError, match="shape"):
                writer.loan(shape)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="shape"):
            writer.loan((2, -1))
        with pytest.raises(ValueError, match="like"):
            writer.loan(1, like="jax")  # type: ignore[arg-type]
        for like, dtypes in (("numpy", ["nothing", object]), ("torch", ["float31", "Tensor", 3])):
            for dtype in dtypes:
                with pytest.raises(TypeError, match="dtype"):
                    writer.loan(1, dtype, like)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="timeout"):
            writer.loan(1, timeout=-1)
        for call, nbytes in itertools.product((writer.loan_bytes, writer.build), (-1, 2.5)):
            with pytest.raises((TypeError, ValueError), match="nbytes"):
                call(nbytes)  # type: ignore[operator]
        with pytest.raises(MessageTooLarge):
            writer.loan(200_001, "uint8")
        with pytest.raises(RoleError, match="writer"):
            reader.loan(1)
        async with writer.build() as message:
            pass
        assert await reader.dequeue(5) == {}
        with pytest.raises(RoleError, match="has ended"):
            message.empty(1)


# Objects with arrays inside


@pytest.mark.parametrize(
    ("codec", "leases", "nbytes"),
    [("pickle", False, None), ("pickle", True, 500_000), ("msgpack", True, None), ("msgpack", False, 4_000_000)],
)
async def test_arrays_inside_of_an_object(codec: str, leases: bool, nbytes: int | None) -> None:
    async with attached(codec=codec, chunk=CHUNK, chunks=3) as (writer, (reader,)):
        for number in range(4):
            async with writer.build(nbytes) as message:
                message["array"] = message.empty((100, 1000), "int32")
                message["array"][:] = number
                message["tensor"] = tensor = message.empty(50_000, "bfloat16", "torch")
                tensor.fill_(number)
                message["small"] = message.empty(3, "uint8")
                message["small"][:] = number
                message["foreign"] = np.full(20_000, number, np.uint8)
                message["step"] = number
                message["unused"] = message.empty(10_000)
                del message["unused"]
                assert list(message) == ["array", "tensor", "small", "foreign", "step"]
            tensor.fill_(9)
            with_block = reader.lease(5) if leases else None
            received = await (with_block.__aenter__() if with_block else reader.dequeue(5))
            assert type(received) is dict
            assert received["step"] == number
            assert received["array"].shape == (100, 1000)
            assert bool((received["array"] == number).all())
            assert bool((received["tensor"] == number).all())
            assert received["small"].tolist() == [number] * 3
            assert bool((received["foreign"] == number).all())
            if with_block:
                del received
                await with_block.__aexit__(None, None, None)
        if nbytes:
            assert writer.stats().copied_bytes < 4 * 21_000, "the foreign array, and the pickles"


async def test_any_object_and_views_of_what_was_lent() -> None:
    async with attached(chunk=CHUNK) as (writer, (reader,)):
        async with writer.build() as message:
            whole = message.empty((1000, 100), "uint8")
            whole[:] = np.arange(1000)[:, None] % 256
            message.value = [whole, whole[100:900], ("tail", whole[900:])]
        first, middle, (_, tail) = await reader.dequeue(5)
        assert first[:, 0].tolist() == [n % 256 for n in range(1000)]
        assert np.array_equal(middle, first[100:900])
        assert np.array_equal(tail, first[900:])


async def test_more_than_there_is_room_for_is_copied() -> None:
    async with attached(chunk=CHUNK, chunks=2) as (writer, (reader,)):
        for lap in range(3):
            async with writer.build() as message:
                for number in range(5):
                    message[str(number)] = message.empty(400_000, "uint8")
                    _fill(message[str(number)], number + lap)
            received = await reader.dequeue(5)
            assert all(_is(received[str(number)], number + lap, 400_000) for number in range(5))


# Bytes


@pytest.mark.parametrize("codec", ["pickle", "msgpack", "raw"])
async def test_bytes(codec: str) -> None:
    async with attached(codec=codec, chunk=CHUNK, chunks=2) as (writer, (reader,)):
        for number, size in enumerate(SIZES):
            kept = []
            for leases in (False, True):
                async with writer.loan_bytes(size) as buffer:
                    buffer[:] = bytes([number]) * size
                    if number % 2:
                        kept.append(buffer[:1])
                for view in kept:
                    view[:] = b"\xff" * len(view)
                if leases:
                    async with reader.lease(5) as received:
                        assert bytes(received) == bytes([number]) * size
                else:
                    received = await reader.dequeue(5)
                    assert bytes(received) == bytes([number]) * size
                    if codec != "pickle":
                        assert type(received) is bytes


# The other face


def test_blocking_loans_and_leases() -> None:
    with pair(chunk=CHUNK, chunks=3) as (writer, reader):
        for number, size in enumerate(SIZES):
            with writer.loan(size, "uint8") as array:
                _fill(array, number)
            _scribble(array)
            with reader.lease() as received:
                assert _is(received, number, size)
        with pytest.raises(ZeroDivisionError), writer.loan(100_000, "uint8") as array:
            raise ZeroDivisionError
        with writer.build() as message:
            message["x"] = message.empty((50, 2000), like="torch")
        assert reader.dequeue()["x"].shape == (50, 2000)
        with writer.loan_bytes(100_000) as buffer:
            buffer[:] = b"y" * 100_000
        assert bytes(reader.dequeue()) == b"y" * 100_000


# Deaths


@pytest.mark.parametrize("size", [100_000, 2_000_000], ids=["chunk", "segment"])
async def test_a_writer_killed_inside_of_a_block(size: int) -> None:
    async with child("lend", str(size)) as writer:
        handle = await writer.says()
        async with MessageQueue.create_from_handle(handle, 0) as reader:
            await reader.wait_until_ready(20)
            await writer.says("lending")
            writer.signal(signal.SIGKILL)
            assert _is(await reader.dequeue(10), 1, size), "what was sent before is whole"
            with pytest.raises(PeerDied):
                await reader.dequeue(10)
