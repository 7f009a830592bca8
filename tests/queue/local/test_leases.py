"""Leases: a message where it lies, held while the block lasts, a copy afterwards; of every kind, and damaged."""

from __future__ import annotations

import asyncio
import random
import struct
from typing import Any

import numpy as np
import pytest
import torch
from loops import turns
from pairs import attached
from slots import body_of, slot_of

from aioshm import CodecError, CorruptSlot, MessageQueue, QueueEmpty, QueueFull, RoleError
from aioshm.queue.local.leases import VIEW_BYTES

LARGE = VIEW_BYTES + 8000


def _shows(writer: MessageQueue, number: int, array: Any) -> bool:
    """Say whether an array shows the ring itself: what is written there is seen at once."""
    memory = np.frombuffer(array, np.uint8)
    at = bytes(body_of(writer, number)).find(memory.tobytes())
    if at < 0:
        return False
    before = int(memory[0])
    body_of(writer, number)[at] = before ^ 0xFF
    seen = int(memory[0]) == before ^ 0xFF
    body_of(writer, number)[at] = before
    return seen


@pytest.mark.parametrize("codec", ["pickle", "msgpack"])
async def test_arrays_and_tensors_are_seen_where_they_lie(codec: str) -> None:
    async with attached(1, codec=codec, chunk=1 << 20) as (writer, (reader,)):
        rng = np.random.default_rng(1)
        for number in range(10):
            sent = {"array": rng.integers(0, 255, LARGE + number, np.uint8), "step": number}
            await writer.enqueue(sent)
            async with reader.lease(5) as obj:
                assert obj["step"] == number
                assert np.array_equal(obj["array"], sent["array"])
                assert not obj["array"].flags.writeable
                with pytest.raises(ValueError, match="read-only"):
                    obj["array"][0] = 1
                assert _shows(writer, number, obj["array"])
        tensor = torch.from_numpy(rng.integers(0, 255, LARGE, np.uint8))
        await writer.enqueue(tensor)
        async with reader.lease(5) as obj:
            assert torch.equal(obj, tensor)
            assert _shows(writer, 10, obj.numpy())
        assert torch.equal(obj, tensor), "a copy by now"


async def test_bytes_are_seen_where_they_lie() -> None:
    payload = random.Random(1).randbytes(LARGE)
    async with attached(1, codec="raw", chunk=1 << 20) as (writer, (reader,)):
        await writer.enqueue(payload)
        async with reader.lease(5) as obj:
            assert isinstance(obj, memoryview)
            assert obj.readonly
            assert obj == payload
            assert _shows(writer, 0, obj)
        await writer.enqueue(bytes(LARGE))
        assert obj == payload
    async with attached(1, chunk=1 << 20) as (writer, (reader,)):
        async with writer.acquire_write() as buffer:
            buffer[:LARGE] = payload
        async with reader.lease(5) as obj:
            assert obj.readonly
            assert obj[:LARGE] == payload
            assert _shows(writer, 0, obj[:LARGE])


@pytest.mark.parametrize("codec", ["pickle", "msgpack", "raw"])
async def test_small_messages_are_as_dequeue_returns_them(codec: str) -> None:
    """A view takes more time than their copy."""
    array = np.arange(3000, dtype=np.uint8)
    objects = [b"x" * 10, b"y" * 5000, b"z" * 100_000]
    if codec != "raw":
        objects += [{"n": 1, "array": array}, [array, torch.from_numpy(array), b"w" * 5000]]
    async with attached(2, codec=codec, chunk=1 << 20) as (writer, (leasing, dequeuing)):
        for obj in objects:
            await writer.enqueue(obj)
            received = await dequeuing.dequeue(5)
            for timeout in (None, 5.0):  # in the core, and not
                async with leasing.lease(timeout) as leased:
                    assert repr(leased) == repr(received)
                    assert type(leased) is type(received)
                if timeout is None:
                    await writer.enqueue(obj)
                    assert repr(await dequeuing.dequeue(5)) == repr(obj if codec != "raw" else received)
            if isinstance(leased, dict):
                leased["array"][0] = 7  # its own
                assert leased["array"][0] == 7


async def test_the_slot_is_held_as_long_as_the_block_lasts() -> None:
    async with attached(1, chunks=2, chunk=1 << 20) as (writer, (reader,)):
        for number in range(3):
            await writer.enqueue((number, np.full(LARGE, number, np.uint8)))
            async with reader.lease(5) as (found, _):
                assert found == number
                await writer.enqueue("second")
                with pytest.raises(QueueFull, match="rank 0"):
                    writer.enqueue_nowait("third")
                waiting = asyncio.ensure_future(writer.enqueue("third"))
                await turns(20)
                assert not waiting.done()
            await asyncio.wait_for(waiting, 5)
            assert await reader.dequeue_many(5, 5) == ["second", "third"]


async def test_damaged_messages() -> None:
    async with attached(1, chunks=8, chunk=1 << 20) as (writer, (reader,)):
        await writer.enqueue_many([0, np.zeros(LARGE, np.uint8), np.zeros(LARGE, np.uint8), "fine"])
        slot_of(writer, 0)[8] ^= 0xFF
        body_of(writer, 1)[:8] = b"\xff" * 8
        slot_of(writer, 2)[1] = 99  # the codec
        for error in (CorruptSlot, CodecError, CodecError):
            with pytest.raises(error):
                async with reader.lease(5):
                    pytest.fail("damaged bytes were handed out")
        async with reader.lease(5) as obj:
            assert obj == "fine"
        assert reader.stats().backlog == 0


async def test_other_tasks_wait_until_it_ends() -> None:
    async with attached(1, chunks=4) as (writer, (reader,)):
        await writer.enqueue_many(["leased", "second", "third"])
        async with reader.lease() as obj:
            assert obj == "leased"
            waiting = [asyncio.ensure_future(reader.dequeue(5)) for _ in range(2)]
            await turns(20)
            assert not any(task.done() for task in waiting)
            with pytest.raises(QueueEmpty):
                reader.dequeue_nowait()
        assert await asyncio.gather(*waiting) == ["second", "third"]
        await writer.enqueue("fourth")
        async with reader.lease() as obj:
            assert obj == "fourth"


async def test_a_small_message_is_received_when_the_block_begins() -> None:
    async with attached(1, chunks=2) as (writer, (reader,)):
        for how in (reader.lease, lambda: reader.lease(5)):
            await writer.enqueue_many([1, 2])
            async with how() as obj:
                assert obj == 1
                assert reader.stats().backlog == 1
                writer.enqueue_nowait(3)
                with pytest.raises(RoleError, match="wait for itself"):
                    await reader.dequeue()
            assert await reader.dequeue_many(2) == [2, 3]


# Messages of every kind, in chunks that were seen before


CHUNK = 1 << 21


def content(n: int) -> dict[str, Any]:
    """Return messages whose parts are in one place, two and many; each of them is worth a view."""
    block = np.full(LARGE, n, np.uint8)
    return {
        "text": [n, "x" * LARGE],
        "array": {"step": n, "array": block},
        "tensor": [n, torch.from_numpy(block)],
        "halves": [np.split(block, 2), n],
        "many": {"all": np.split(block[: 64 * 8200], 64), "n": n},
        "too many": {"all": np.split(block[: 65 * 8150], 65), "n": n},
        "nothing": (np.zeros(0), n, b"", block),
        "bytes": {"text": "short", "bytes": bytes(block)},
    }


def same(received: Any, sent: Any) -> bool:
    """Say whether a message is another one's equal; bytes may arrive as views."""
    if isinstance(sent, dict):
        return received.keys() == sent.keys() and all(same(received[key], sent[key]) for key in sent)
    if isinstance(sent, list | tuple):
        return len(received) == len(sent) and all(map(same, received, sent))
    if isinstance(sent, np.ndarray | torch.Tensor):
        return type(received) is type(sent) and bool((received == sent).all())
    return bool(received == sent)


@pytest.mark.slow_on_uvloop
@pytest.mark.parametrize("kind", list(content(0)))
@pytest.mark.parametrize("codec", ["pickle", "msgpack"])
async def test_each_kind_is_what_was_sent(kind: str, codec: str) -> None:
    async with attached(codec=codec, chunk=CHUNK, chunks=4) as (writer, (reader,)):
        for n in range(8):
            sent = content(n)[kind]
            await writer.enqueue(sent, 5)
            async with reader.lease() as leased:
                assert same(leased, sent)
            del leased
        seen = kind not in ("text", "bytes")
        expected = 8_000 if seen else 8 * LARGE  # text is copied by whoever decodes it, which nobody counts
        assert reader.stats().copied_bytes <= expected


@pytest.mark.slow_on_uvloop
@pytest.mark.parametrize("codec", ["pickle", "msgpack"])
async def test_its_parts_together_are_what_counts(codec: str) -> None:
    async with attached(codec=codec, chunk=CHUNK, chunks=4) as (writer, (reader,)):
        for n in range(8):
            for size, shown in ((VIEW_BYTES // 2, True), (VIEW_BYTES // 3, False)):
                sent = [np.full(size, n, np.uint8), np.full(size, n + 1, np.uint8)]
                before = reader.stats().copied_bytes
                await writer.enqueue(sent, 5)
                async with reader.lease() as leased:
                    assert same(leased, sent)
                    assert [each.flags.writeable for each in leased] == [not shown] * 2
                    copied = reader.stats().copied_bytes - before
                del leased
                assert (copied < 1000) if shown else (2 * size < copied < 2 * size + 1000)


@pytest.mark.slow_on_uvloop
@pytest.mark.parametrize("kind", ["array", "many", "loan"])
async def test_damage_is_an_error_and_nothing_more(kind: str) -> None:
    """Numbers of the header and the table are anything, also just beside what they were."""
    chance = random.Random(3)
    wrong = 0
    async with attached(chunk=CHUNK, chunks=3) as (writer, (reader,)):
        for n in range(300):
            if kind == "loan":
                async with writer.loan(LARGE, "uint8") as array:
                    array[:] = n % 256
            else:
                await writer.enqueue(content(n % 256)[kind], 5)
            if n >= 12 and chance.random() < 0.7:
                body, header = body_of(writer, n), slot_of(writer, n)
                if kind == "loan" and chance.random() < 0.7:
                    (table,) = struct.unpack_from("<Q", body)
                    place = body[table + 8 * chance.randrange(4) :]
                else:
                    place = body[8 * chance.randrange(3) :] if chance.random() < 0.7 else header[24:]
                (before,) = struct.unpack_from("<Q", place)
                damaged = chance.choice(
                    [before + chance.randrange(-70, 70), chance.getrandbits(64), chance.randrange(2 * CHUNK)]
                )
                struct.pack_into("<Q", place, 0, damaged % 2**64)
            elif chance.random() < 0.1:
                slot_of(writer, n)[4] = chance.randrange(256)  # how many buffers
            try:
                async with reader.lease() as leased:
                    repr(leased)
                leased = None
            except (CodecError, CorruptSlot):
                wrong += 1
        await writer.enqueue("fine", 5)
        async with reader.lease() as leased:
            assert leased == "fine"
    assert wrong > 50


@pytest.mark.slow_on_uvloop
@pytest.mark.parametrize("chunks", [3, 70])
async def test_what_was_written_to_hides_no_later_message(chunks: int) -> None:
    """Windows are looked at before they are used again."""
    chance = random.Random(chunks)
    async with attached(2, chunk=LARGE + 4096, chunks=chunks) as (writer, (reader, other)):
        sent = received = 0
        kept: list[tuple[torch.Tensor, int]] = []
        while received < 120:
            while sent - received < chunks - 2:
                await writer.enqueue(torch.full((LARGE,), sent % 100, dtype=torch.uint8), 5)
                sent += 1
            for _ in range(chance.randrange(1, sent - received + 1)):
                async with reader.lease(chance.choice([None, None, None, 5])) as leased:
                    assert (int(leased[0]), int(leased[LARGE // 2]), int(leased[-1])) == (received % 100,) * 3
                    if chance.random() < 0.2:
                        leased[chance.choice([0, LARGE // 2, LARGE - 1])] = 255
                    if chance.random() < 0.1:
                        kept.append((leased[7:9], received % 100))
                assert (await other.dequeue(5) == received % 100).all()
                received += 1
        del leased
        for each, number in kept:
            assert each.tolist() == [number] * 2
