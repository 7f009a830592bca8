"""Readers that join, leave, are killed and replaced, on a real ring: a model of what each has to receive.

Messages are published and taken singly and in batches; they lie in slots and in chunks, up to a chunk's whole size, and
in overflow segments, whose descriptors readers are passed as a queue's are: a newcomer those that there are, each one
the new ones, and each looks for them when it needs one.
"""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from rings import Cores, content

from aioshm.codec.frames import OVERFLOW, pack_header
from aioshm.queue.local.overflow import SECRET_BYTES, OverflowSegments, PassedSegments, unpack_marker
from aioshm.ring import Layout, ShmRingBuffer

ROOM = 64
PLAIN = 3  # what the header of a message begins with that batches may have
SECRET = bytes(range(SECRET_BYTES))
PAGE = 4096


def overflowing(number: int) -> bytes:
    """Return what a message holds that does not fit a chunk: as much as some pages do, so that segments grow."""
    return content(number, ROOM) * (1 + number % 5 * PAGE // ROOM) + bytes(ROOM)


class Passed:
    """The overflow segments that a reader has been passed: acts as the writer's `Peer` and the reader's `Lifeline`."""

    holds_back = False

    def __init__(self) -> None:
        self._under_way: deque[int] = deque()
        self.segments = PassedSegments(SECRET, self)  # type: ignore[arg-type]

    def hand_over(self, fd: int) -> None:
        """Pass a descriptor on; it is taken over when a message needs it."""
        self._under_way.append(os.dup(fd))

    def look(self) -> None:
        """Take over what is under way."""
        while self._under_way:
            self.segments.arrived(self._under_way.popleft())

    def close(self) -> None:
        """Give everything back, also what was never looked at."""
        self.look()
        self.segments.close()


@dataclass
class Incarnation:
    """A reader, and what it is to receive next."""

    end: Any
    next: int
    held: bool = False
    received: list[int] = field(default_factory=list)
    passed: Passed = field(init=False)

    def __post_init__(self) -> None:
        self.passed = Passed()


class Churn:
    """One writer, up to 8 places; every step says what it expects of the ring, and checks that it is so."""

    def __init__(self, cores: Cores, places: int, slots: int, chunks: int, inline_bytes: int) -> None:
        self.cores = cores
        self.layout = Layout.of(places, ROOM, chunks, slots, inline_bytes)
        self.ring = ShmRingBuffer(places, ROOM, chunks, slots=slots, inline_bytes=inline_bytes)
        self.seen_by_readers = ShmRingBuffer.from_fd(self.layout, os.dup(self.ring.fd), self.ring.queue_id)
        self.writer = cores.writer(self.layout, self.ring.view)
        self.writer.bind(bytes, PLAIN, True, None)
        self.overflow = OverflowSegments(self.writer, self.ring.queue_id, SECRET, self)  # type: ignore[arg-type]
        for place in range(places):
            self.writer.evict(place)
        self.readers: list[Incarnation | None] = [None] * places
        self.sent = 0
        self.chunk_of: dict[int, int] = {}
        self.in_chunk: dict[int, int] = {}  # the last message that each was taken for
        self.segment_of: dict[int, int] = {}
        self.in_segment: dict[int, int] = {}  # the last message that each has
        self.again: set[int] = set()  # what lies in segments and was read by all, before a newcomer was to have it, too

    def peers(self) -> list[Passed]:
        """Return what segments are passed to."""
        return [reader.passed for reader in self.readers if reader is not None and not reader.held]

    def close(self) -> None:
        for reader in self.readers:
            if reader is not None and not reader.held:
                reader.end.close()
                reader.passed.close()
        for end in (self.overflow, self.writer, self.ring, self.seen_by_readers):
            end.close()

    # What is to be

    def slowest(self) -> int:
        return min((reader.next for reader in self.readers if reader is not None), default=self.sent)

    def has_room(self, nbytes: int) -> bool | None:
        """Return whether there is room for a message of so many bytes; None where it may be so or not.

        A message that lies elsewhere takes a chunk all the same, so that there are not too many of them; but not where
        a newcomer's history begins with it, which may have been taken for another one meanwhile.
        """
        slowest = self.slowest()
        if self.sent - slowest >= self.layout.slots:
            return False
        if nbytes <= self.layout.inline_bytes:
            return True
        takers = [number for number in range(slowest, self.sent) if number in self.chunk_of]
        if len(takers) < self.layout.max_chunks:
            return True
        return None if len([n for n in takers if n not in self.again]) < self.layout.max_chunks else False

    def oldest(self, history: int) -> int:
        first = self.sent
        while first > 0 and self.sent - first < min(history, self.layout.slots):
            segment, chunk = self.segment_of.get(first - 1), self.chunk_of.get(first - 1)
            if segment is not None:
                if self.in_segment.get(segment) != first - 1:
                    break
            elif chunk is not None and self.in_chunk[chunk] != first - 1:
                break
            first -= 1
        return first

    # Steps

    def send(self, abandoned: int | None = None) -> None:
        """Send a message; with ``abandoned``: after another claim, which was given up."""
        message = content(self.sent, ROOM)
        room = self.has_room(len(message))
        slot = self.writer.claim(len(message))
        assert room is None or (slot is not None) == room, f"message {self.sent}"
        if slot is None:
            return
        if abandoned is not None:
            if (given_up := self.writer.claim(abandoned)) is not None:
                given_up.body[:] = b"?" * len(given_up.body)
                if given_up.chunk is not None:
                    self.in_chunk[given_up.chunk] = self.sent  # of the message that was there, no history is left
                given_up.header[:] = b"?" * 64
            slot = self.writer.claim(len(message))
            assert slot is not None, "a slot that was claimed can be claimed again"
        slot.body[: len(message)] = message
        for at, word in ((0, PLAIN), (8, self.sent), (24, len(message))):
            slot.header[at : at + 8] = word.to_bytes(8, "little")
        self.writer.commit()
        self._sent(message, slot.chunk)

    def send_large(self) -> None:
        """Send a message that does not fit a chunk."""
        message = overflowing(self.sent)
        room = self.has_room(len(message))
        slot = self.writer.claim(len(message))
        assert room is None or (slot is not None) == room, f"message {self.sent}"
        if slot is None:
            return
        chunk = slot.chunk
        self.overflow.put(slot.header, [message], [], len(message))
        pack_header(slot.header, 0, OVERFLOW, 0, 0, 0, self.sent, 0, len(message))
        marker = unpack_marker(slot.header, SECRET, self.sent)
        assert marker is not None
        self.writer.commit()
        segment = marker[0]
        users = [n for n in range(self.slowest(), self.sent) if self.segment_of.get(n) == segment]
        assert not users, f"segment {segment} is taken while message {users} in it is to be read"
        self.segment_of[self.sent], self.in_segment[segment] = segment, self.sent
        for number, written in enumerate(self.overflow.segments):
            if not written.used:
                self.in_segment.pop(number, None)  # its memory went back
        self._sent(message, chunk)

    def send_many(self, times: int) -> None:
        """Send a batch, at most a lap; what does not fit a chunk ends it."""
        amount = min(times, self.layout.slots)
        messages = [*(content(self.sent + more, ROOM) for more in range(amount)), bytes(ROOM + 1)]
        sent = self.writer.put_many(messages, 0)
        for message in messages[:sent]:
            assert self.has_room(len(message)) is not False, f"message {self.sent}"
            self._sent(message, self.writer.slots[self.sent % self.layout.slots].chunk)
        assert sent == amount or not self.has_room(len(messages[sent])), f"message {self.sent}"

    def _sent(self, message: bytes, chunk: int | None) -> None:
        assert (chunk is not None) == (len(message) > self.layout.inline_bytes)
        if chunk is not None:
            lie_there = {n for n, other in self.chunk_of.items() if other == chunk} - self.segment_of.keys()
            users = sorted(lie_there & {*range(self.slowest(), self.sent)})
            assert not users, f"chunk {chunk} is taken while message {users} in it is to be read"
            self.chunk_of[self.sent] = chunk
            self.in_chunk[chunk] = self.sent
        past = self.sent - 2 * self.layout.slots
        self.chunk_of.pop(past, None)
        self.segment_of.pop(past, None)
        self.again.discard(past)
        self.sent += 1

    def _start(self, place: int, first: int) -> None:
        end = self.cores.reader(self.layout, self.seen_by_readers.view, place)
        end.bind(bytes, PLAIN, True, None)
        end.start_at(first)
        self.readers[place] = reader = Incarnation(end, first)
        self.overflow.expect_reader(reader.passed)  # type: ignore[arg-type]

    def join(self, place: int, history: int) -> None:
        """A newcomer takes the place, if it is vacant; or goes on where one was killed whose place is held."""
        reader = self.readers[place]
        if reader is None:
            before = self.slowest()
            first = self.writer.admit(place, history, self.overflow.is_gone)
            assert first == self.oldest(history), f"of {self.sent} messages, {history} wanted"
            self.again.update(self.segment_of.keys() & {*range(first, before)})
            self._start(place, first)
        elif reader.held:
            first = self.writer.resume(place)
            assert first == reader.next, "the first that was not taken"
            self._start(place, first)

    def read(self, place: int) -> None:
        reader = self.readers[place]
        if reader is None or reader.held:
            return
        slot = reader.end.peek()
        if reader.next == self.sent:
            assert slot is None
            return
        assert slot is not None
        if reader.next in self.segment_of:
            body = reader.passed.segments.body(slot.header, reader.next)
            assert body is not None, f"place {place}, message {reader.next}: its segment was not passed"
            with body:
                assert body == overflowing(reader.next), f"place {place}, message {reader.next}"
        else:
            message = bytes(slot.body[: int.from_bytes(slot.header[24:32], "little")])
            assert message == content(reader.next, ROOM), f"place {place}, message {reader.next}"
        reader.end.release()
        reader.received.append(reader.next)
        reader.next += 1

    def read_many(self, place: int, most: int) -> None:
        reader = self.readers[place]
        if reader is None or reader.held:
            return
        end = min(reader.next + most, self.sent)
        numbers = range(reader.next, min((n for n in self.segment_of if reader.next <= n < end), default=end))
        assert reader.end.take_many(most) == [content(number, ROOM) for number in numbers], f"place {place}"
        reader.received += numbers
        reader.next += len(numbers)

    def part(self, place: int, how: str) -> None:
        """The reader at a place ends; how is "leaves" or one of `KILLED`, behind which "held" may stand."""
        reader = self.readers[place]
        if reader is None or reader.held:
            return
        first = reader.next - len(reader.received)
        assert reader.received == list(range(first, reader.next))
        if "flagged" in how and reader.next < self.sent:
            reader.end.slots[reader.next % self.layout.slots].flags[1 + place] = 1  # but it was not counted
            reader.next += 1
        elif "leasing" in how and reader.next < self.sent:
            reader.end.skip()  # counted, but its slot was not given back
            reader.next += 1
        reader.end.close()
        reader.passed.close()
        if "held" in how:
            reader.held = True
            self.writer.resume(place)  # as at the death: leases go back
        else:
            self.writer.evict(place)
            self.readers[place] = None

    def check(self) -> None:
        free = self.has_room(0)
        assert self.writer.free() is free
        waited_for = [
            place
            for place, reader in enumerate(self.readers)
            if reader is not None and reader.next <= self.sent - self.layout.slots
        ]
        assert self.writer.laggards() == waited_for
        written = [self.writer.slots[n % self.layout.slots].flags for n in range(self.slowest(), self.sent)]
        for place, reader in enumerate(self.readers):
            unread = [number for number, flags in enumerate(written, self.slowest()) if not flags[1 + place]]
            assert unread == ([] if reader is None else list(range(reader.next, self.sent))), f"place {place}"


KILLED = ["leaves", "killed", "flagged", "leasing", "killed, held", "flagged, held", "leasing, held"]
