"""What the header tells who looks at a ring from outside, and what the cores keep there for it."""

from __future__ import annotations

import struct
import threading
from time import monotonic_ns

import pytest
from pairs_of_cores import NewPair, Pair
from support import eventually

from aioshm.errors import HandleError
from aioshm.ring import layout as at
from aioshm.ring.header import STATES, Latency, RingHeader, read_header


def header_of(pair: Pair) -> RingHeader:
    return read_header(pair.ring.view[: pair.ring.layout.header_bytes])


def backdate(pair: Pair, seq: int, ns: int) -> None:
    """Let a message look as if it had been published so long ago."""
    struct.pack_into("<Q", pair.slots[seq % len(pair.slots)].header, 16, (monotonic_ns() - ns) % (1 << 64))


class TestLatency:
    """One class for every kind of core."""

    @pytest.mark.parametrize(("age_ns", "bucket"), [(1 << 20, 13), (3 << 30, 24), (1 << 39, 31), (1 << 50, 31)])
    def test_of_a_message(self, new_pair: NewPair, age_ns: int, bucket: int) -> None:
        pair = new_pair(n_reader=2)
        pair.writer.put(b"x")
        backdate(pair, 0, age_ns)
        assert pair.reader.take() == b"x"
        first, second = header_of(pair).readers
        found_ns = first.latency.sum_ns
        assert age_ns <= found_ns < age_ns + 60e9
        if found_ns.bit_length() > age_ns.bit_length():  # this process waited that long for a CPU
            bucket = min(bucket + found_ns.bit_length() - age_ns.bit_length(), at.LATENCY_BUCKETS - 1)
        assert first.latency.counts[bucket] == first.latency.samples == 1
        assert second.latency.samples == 0
        backdate(pair, 0, -(1 << 50))
        pair.readers[1].take()
        latency = header_of(pair).readers[1].latency
        assert (latency.counts[0], latency.sum_ns) == (1, 0), "published in the future"

    @pytest.mark.parametrize(("amount", "samples"), [(1, 1), (8, 1), (20, 3)])
    def test_one_in_eight_of_a_batch(self, new_pair: NewPair, amount: int, samples: int) -> None:
        pair = new_pair(chunks=20)
        assert pair.writer.put_many([b"x"] * amount, 0) == amount
        assert len(pair.reader.take_many(100)) == amount
        assert header_of(pair).readers[0].latency.samples == samples
        assert pair.reader.take_many(100) == []
        assert header_of(pair).readers[0].latency.samples == samples, "nothing was taken"

    def test_told_by_who_took_it_otherwise(self, new_pair: NewPair) -> None:
        pair = new_pair()
        pair.reader.taken(now := monotonic_ns() - (1 << 30))
        assert pair.reader.published_ns == now
        assert header_of(pair).readers[0].latency.counts[23] == 1
        pair.reader.close()
        with pytest.raises(ValueError, match="closed"):
            pair.reader.taken(now)

    def test_not_of_what_cannot_be_decoded(self, new_pair: NewPair) -> None:
        pair = new_pair(raw=False)
        pair.writer.put(b"\xff")
        with pytest.raises(UnicodeDecodeError):
            pair.reader.take()
        assert header_of(pair).readers[0].latency.samples == 0


class TestTotals:
    """One class for every kind of core."""

    def test_bytes(self, new_pair: NewPair) -> None:
        pair = new_pair(chunks=5)
        pair.writer.put(b"abc")
        pair.writer.put_many([b"de", b""], 0)
        pair.writer.send(b"x" * 100)
        assert header_of(pair).writer.bytes == 105
        assert header_of(pair).writer.messages == 4
        pair.reader.take()
        assert header_of(pair).readers[0].bytes == 3
        pair.reader.take_many(2)
        pair.reader.peek()
        assert header_of(pair).readers[0].bytes == 5
        pair.reader.skip()
        pair.reader.give_back(3)
        assert header_of(pair).readers[0].bytes == 105

    def test_bytes_are_those_of_the_committed_claim(self, new_pair: NewPair) -> None:
        pair = new_pair()
        pair.writer.claim(90)
        pair.writer.claim(100)
        assert pair.writer.claimed_bytes == 100
        pair.writer.claimed_bytes = 5
        pair.writer.commit()
        assert header_of(pair).writer.bytes == 5


def test_spin_is_shown_while_it_lasts(new_pair: NewPair) -> None:
    pair = new_pair()
    thread = threading.Thread(target=pair.reader.spin, args=(20_000_000_000,))
    thread.start()
    try:
        eventually(lambda: header_of(pair).readers[0].spinning, "the spin", within_s=15)
    finally:
        pair.writer.put(b"x")
        thread.join()
    assert not header_of(pair).readers[0].spinning


class TestHeader:
    def test_description(self, new_pair: NewPair) -> None:
        pair = new_pair()
        pair.writer.describe("steps", 2, (4,), 5)
        header = header_of(pair)
        assert (header.label, header.codec, header.writer.remote_readers) == ("steps", 2, 5)
        assert [row.rank for row in header.readers] == [4]

    def test_states(self, new_pair: NewPair) -> None:
        pair = new_pair()
        for state, word in (*enumerate(STATES), (200, "unknown")):
            pair.writer.set_reader_state(0, state, 5)
            assert header_of(pair).readers[0].state == word

    def test_a_new_reader_begins_a_new_histogram(self, new_pair: NewPair) -> None:
        pair = new_pair(2)
        for reader in pair.readers:
            reader.taken(1)
        pair.writer.set_reader_state(0, at.LEFT, 5)
        assert [row.latency.samples for row in header_of(pair).readers] == [1, 1], "of who has left, it stays"
        pair.writer.set_reader_state(0, at.ATTACHED, 6)
        first, second = header_of(pair).readers
        assert (first.latency, second.latency.samples) == (Latency(), 1)


@pytest.mark.parametrize(
    ("counts", "q", "found"),
    [
        ({}, 0.5, None),
        ({3: 100}, 0, 1024e-9),
        ({3: 100}, 0.5, 1536e-9),
        ({3: 100}, 1, 2048e-9),
        ({0: 4}, 0.5, 128e-9),
        ({31: 4}, 0.5, 1.5 * (1 << 38) / 1e9),
        ({0: 50, 30: 50}, 0.99, (1 << 37) * 1.98e-9),
    ],
)
def test_quantiles(counts: dict[int, int], q: float, found: float | None) -> None:
    latency = Latency(tuple(counts.get(bucket, 0) for bucket in range(at.LATENCY_BUCKETS)))
    assert latency.quantile(q) == (found and pytest.approx(found))
    with pytest.raises(ValueError, match="q must be 0 to 1"):
        latency.quantile(1.1)


def test_latencies_since_an_earlier_look() -> None:
    before, now = Latency((1, *(0,) * 31), 10), Latency((3, *(0,) * 31), 50)
    assert now.since(before) == Latency((2, *(0,) * 31), 40)
    assert before.since(now) == before, "another reader has come"
    assert (now.samples, now.sum_s) == (3, 50e-9)


def preamble(version: int, *sizes: int) -> bytes:
    return at.PREAMBLE.pack(at.MAGIC, version, *sizes, 0, bytes(16)).ljust(4096, b"\0")


@pytest.mark.parametrize(
    ("memory", "text"),
    [
        (b"", "not a ring"),
        (preamble(at.VERSION, 2, 100, 3, 3, 36)[:63], "not a ring"),
        (preamble(at.VERSION, 2, 100, 3, 3, 36)[:4095], "only 4095 were read"),
        (preamble(at.VERSION + 1, 2, 100, 3, 3, 36), f"version {at.VERSION + 1}, this aioshm reads {at.VERSION}"),
        (preamble(at.VERSION, 1 << 31, 1, 1, 1, 1), "are impossible"),
        (preamble(at.VERSION, 1, 0, 1, 1, 0), "are impossible"),
        (preamble(at.VERSION, 1, 1, 1, 1, 2), "are impossible"),
    ],
    ids=["empty", "short preamble", "short header", "version", "too many readers", "no chunk", "slots above chunks"],
)
def test_what_is_no_header_is_refused(memory: bytes, text: str) -> None:
    with pytest.raises(HandleError, match=text):
        read_header(memory)
