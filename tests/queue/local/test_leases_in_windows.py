"""Leases of messages of every kind, in chunks that were seen before: no number of a message is trusted."""

from __future__ import annotations

import random
import struct
from typing import Any

import numpy as np
import pytest
import torch
from pairs import attached
from slots import body_of, slot_of

from aioshm import CodecError, CorruptSlot
from aioshm.queue.local.leases import VIEW_BYTES

pytestmark = pytest.mark.slow_on_uvloop

LARGE = VIEW_BYTES + 8000
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
