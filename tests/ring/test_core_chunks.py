"""The pool: what takes a chunk and which, when it goes back, what damage does. One class for every kind of core."""

from __future__ import annotations

import struct
import threading

import pytest
from pairs_of_cores import NewPair, Pair
from support import eventually

from aioshm.ring import layout as at

LARGE = b"L" * 17  # does not fit a slot of 16 bytes

pytestmark = pytest.mark.parametrize("inline_bytes", [16], indirect=True)


def chunk_of(pair: Pair, number: int) -> int | None:
    """Return the chunk that a message is in."""
    return pair.slots[number % len(pair.slots)].chunk


def put_and_take(pair: Pair, message: bytes) -> int | None:
    """Pass a message to every reader; return its chunk."""
    number = pair.writer.seq
    assert pair.writer.put(message)
    for reader in pair.readers:
        assert reader.take() == message
    return chunk_of(pair, number)


class TestTaking:
    def test_the_one_that_became_free_last(self, new_pair: NewPair) -> None:
        pair = new_pair(2, 8)
        assert {put_and_take(pair, LARGE) for _ in range(30)} == {0}
        for _ in range(3):
            pair.writer.put(LARGE)
        assert [chunk_of(pair, number) for number in (30, 31, 32)] == [0, 1, 2]
        for _ in range(2):
            for reader in pair.readers:
                reader.take()
        pair.writer.put(LARGE)
        assert chunk_of(pair, 33) == 1, "of 0 and 1, which were read"

    def test_of_the_smallest_size_with_room(self, new_pair: NewPair) -> None:
        pair = new_pair(1, 2, 1 << 20, slots=8)
        assert [pool.first for pool in pair.ring.layout.pools] == [0, 2, 10]
        assert [put_and_take(pair, b"m" * size) for size in (16, 17, 4608, 4609, 65536)] == [None, 10, 10, 2, 2]
        for size, chunk in ((72 << 10, 2), ((72 << 10) + 1, 0), (1 << 20, 1)):
            assert pair.writer.put(b"m" * size)
            assert chunk_of(pair, pair.writer.seq - 1) == chunk

    def test_claim_takes_a_chunk_where_a_slot_is_too_small(self, new_pair: NewPair) -> None:
        pair = new_pair()
        for nbytes, room in ((0, 16), (16, 16), (17, 100), (100, 100)):
            assert len(pair.writer.claim(nbytes).body) == room
        assert pair.writer.claim(1 << 40).chunk is not None, "although the message lies elsewhere"

    def test_spin_ends_when_a_chunk_is_free(self, new_pair: NewPair) -> None:
        pair = new_pair(1, 1, slots=8)
        pair.writer.put(LARGE)
        pair.writer.spin_ns = 1000
        assert pair.writer.put(LARGE) is False
        pair.writer.spin_ns = 60_000_000_000
        sent: list[object] = []
        thread = threading.Thread(target=lambda: sent.append(pair.writer.put(LARGE)))
        thread.start()
        eventually(lambda: pair.writer.spins == 2, "the spin")
        assert pair.reader.take() == LARGE
        thread.join(60)
        assert (sent, pair.writer.hits) == ([True], 1)


class TestDamage:
    @pytest.mark.parametrize(
        ("message", "place", "word"),
        [
            *((LARGE, at.CHUNK, word) for word in (2, 4, 5, 1 << 32, (1 << 64) - 1)),
            *((LARGE, 24, size) for size in (101, 1 << 63)),
            (b"small", 24, 17),
        ],
    )
    def test_header_of_another_chunk_or_size_is_left_to_the_slow_path(
        self, new_pair: NewPair, message: bytes, place: int, word: int
    ) -> None:
        pair = new_pair()
        pair.writer.put(message)
        struct.pack_into("<Q", pair.slots[0].header, place, word)
        assert pair.reader.take() is pair.cores.module.SLOW_PATH
        assert pair.reader.take_many(1) == []

    def test_a_chunk_that_has_another_message_by_now(self, new_pair: NewPair) -> None:
        pair = new_pair(2, 1, slots=4)
        pair.writer.put(LARGE)
        pair.slots[0].flags[1] = 1  # as a reader that scribbles on the flags of another one
        assert pair.readers[1].take() == LARGE
        assert pair.writer.put(LARGE.lower())
        pair.slots[0].flags[1] = 0
        assert pair.readers[0].take() is pair.cores.module.SLOW_PATH, "not the wrong message"


class TestAllocating:
    """A named segment's chunks have no memory until `allocate` has been called for them."""

    def test_claim_fails_until_free_has_allocated(self, new_pair: NewPair) -> None:
        pair = new_pair()
        calls: list[tuple[int, int]] = []
        pair.writer.bind_allocate(lambda start, nbytes: calls.append((start, nbytes)))
        assert pair.writer.claim(50) is None
        assert pair.writer.free(1, [50])
        assert pair.writer.put(LARGE)
        assert pair.writer.claim(50) is None
        assert pair.writer.free(1, [50, 50])
        pool = pair.ring.layout.pools[0]
        assert calls == [(pool.start, pool.stride), (pool.start + pool.stride, 2 * pool.stride)]
        assert pair.writer.put(LARGE)

    def test_history_that_lies_in_free_chunks_is_not_overwritten(self, new_pair: NewPair) -> None:
        pair = new_pair(2, 3, slots=8)
        pair.writer.bind_allocate(lambda start, nbytes: None)
        pair.writer.evict(1)
        assert pair.writer.free(2, [17, 17])
        assert pair.writer.put_many([LARGE, LARGE.lower()], 0) == 2
        assert pair.reader.take_many(9) == [LARGE, LARGE.lower()]
        assert pair.writer.free(3, [17] * 3), "which takes back the chunks of both messages"
        assert pair.writer.admit(1, 8, None) == 0
        assert pair.writer.put(b"N" * 17)
        pair.readers[1].start_at(0)
        assert pair.readers[1].take_many(9) == [LARGE, LARGE.lower(), b"N" * 17]
