"""A reader that the writer does not wait for: whatever it is given is whole, and it knows what it has lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from rings import CORES, Cores, NewRing

from aioshm.ring import ShmRingBuffer

CHUNKS = 4
SIZE = 17


class Pair:
    """A writer, and a reader of two that it does not wait for; the other one reads everything at once."""

    def __init__(self, ring: ShmRingBuffer, cores: Cores) -> None:
        self.writer: Any = cores.writer(ring.layout, ring.view)
        self.other: Any = cores.reader(ring.layout, ring.view, 0)
        self.reader: Any = cores.reader(ring.layout, ring.view, 1)
        self.empty = cores.module.EMPTY
        self.meanwhile: Callable[[], object] = bool  # runs between a copy and the check whether it is whole
        for end in (self.writer, self.other):
            end.bind(bytes, 1, True, None)
        self.reader.bind(self.decode, 1, False, None)

    def decode(self, message: bytes) -> bytes:
        self.meanwhile()
        return message

    def publish(self, count: int = 1) -> list[bool]:
        """Publish messages, each its number `SIZE` times, and return for each whether one was passed over unread."""
        lost = []
        for _ in range(count):
            lost.append(not self.free() and self.make_room())
            assert self.writer.put(bytes([self.writer.seq % 256]) * SIZE)
            assert self.other.take() == bytes([(self.writer.seq - 1) % 256]) * SIZE
        return lost

    def free(self) -> bool:
        """Return whether there is room for a message."""
        return self.writer.free(1, self.writer.large(SIZE))

    def make_room(self) -> bool:
        """Pass over what is in the way of the next message."""
        return self.writer.pass_over(1, self.writer.blocker(1, self.writer.large(SIZE)))

    def take(self) -> int | str | tuple[int, int]:
        """Return the next message's number, the run of messages that is lost instead, or "nothing"."""
        obj = self.reader.take()
        if obj is self.empty and self.writer.seq == self.reader.seq:
            return "nothing"
        if not isinstance(obj, bytes):
            lost: tuple[int, int] = self.reader.lose()
            return lost
        assert obj == obj[:1] * SIZE, "it is whole"
        return int(obj[0])

    def close(self) -> None:
        for end in (self.writer, self.other, self.reader):
            end.close()


@pytest.fixture(params=[None, 16], ids=["in slots", "in chunks"])
def inline_bytes(request: pytest.FixtureRequest) -> int | None:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(params=CORES.values(), ids=CORES)
def pair(request: pytest.FixtureRequest, new_ring: NewRing, inline_bytes: int | None) -> Iterator[Pair]:
    slots = CHUNKS if inline_bytes is None else 3 * CHUNKS  # the one or the other runs out
    made = Pair(new_ring(2, 100, CHUNKS, slots=slots, inline_bytes=inline_bytes), request.param)
    yield made
    made.close()


def test_who_is_behind_loses_the_oldest_and_no_more(pair: Pair) -> None:
    assert pair.publish(CHUNKS + 3) == [False] * CHUNKS + [True] * 3
    assert [pair.take() for _ in range(6)] == [(0, 2), 3, 4, 5, 6, "nothing"]
    assert pair.publish(CHUNKS) == [False] * CHUNKS
    assert [pair.take() for _ in range(5)] == [7, 8, 9, 10, "nothing"]


@pytest.mark.parametrize("published", range(1, 3 * CHUNKS))
def test_what_is_overwritten_while_it_is_copied_is_lost(pair: Pair, published: int) -> None:
    """The writer publishes that many between the copy and the look."""
    pair.publish(CHUNKS)

    def meanwhile() -> None:
        pair.meanwhile = bool
        pair.publish(published)

    pair.meanwhile = meanwhile
    end, got = CHUNKS + published, []
    while (taken := pair.take()) != "nothing":
        got += [taken] if isinstance(taken, int) else [("lost", number) for number in range(taken[0], taken[1] + 1)]
    numbers = [entry if isinstance(entry, int) else entry[1] for entry in got]
    assert numbers == list(range(end)), "each message once, or told as lost"
    assert [entry for entry in got if isinstance(entry, tuple)] == [("lost", number) for number in range(published)]


def test_batches_end_where_something_is_lost(pair: Pair) -> None:
    pair.publish(3)
    assert [each[0] for each in pair.reader.take_many(10)] == [0, 1, 2]
    pair.publish(CHUNKS + 1)
    assert pair.reader.take_many(10) == []
    assert pair.take() == (3, 3)
    assert [each[0] for each in pair.reader.take_many(10)] == [4, 5, 6, 7]


def test_who_loses_again_before_it_has_read_leaves_out_half_of_the_ring(pair: Pair) -> None:
    pair.publish(CHUNKS + 1)
    assert pair.take() == (0, 0)
    pair.publish(1)
    assert [pair.take() for _ in range(3)] == [(1, 3), 4, 5]
    assert not pair.reader.ready(), "the slot of a message that was left out has none of the next lap"
    assert pair.take() == "nothing"
    assert pair.publish() == [False]
    assert pair.take() == 6


def test_replacement_of_a_reader_learns_of_messages_that_were_passed_over(pair: Pair) -> None:
    pair.publish(CHUNKS)
    assert pair.make_room()
    assert pair.writer.resume(1, copies=True) == 0


@pytest.mark.parametrize("many", [False, True])
def test_message_that_is_passed_over_while_its_decoding_fails_is_not_damaged(pair: Pair, many: bool) -> None:
    pair.publish(CHUNKS)
    tries = []

    def meanwhile() -> None:
        tries.append(pair.writer.seq)
        if len(tries) == 3:
            pair.publish()
        raise ValueError

    pair.meanwhile = meanwhile
    if many:
        assert pair.reader.take_many(CHUNKS) == []
    else:
        assert pair.reader.take() is pair.empty
    assert (pair.reader.damaged, len(tries)) == (False, 3)
    pair.meanwhile = bool
    assert [pair.take() for _ in range(2)] == [(0, 0), 1]
