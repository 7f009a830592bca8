"""Readers that join, leave, are killed and replaced, on a real ring: a model of what each has to receive.

Messages are published and taken singly and in batches; they lie in slots and in chunks, up to a chunk's whole size. One
that is larger lies elsewhere, which is not the ring's affair: here it only has to end a batch.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field

from rings import Cores, content

from aioshm.ring import Layout, RingReader, RingWriter, ShmRingBuffer
from aioshm.ring.copying import CopyingCore

ROOM = 64
PLAIN = 3  # what the header of a message begins with that batches may have


@dataclass
class Incarnation:
    """A reader, and what it is to receive next."""

    end: RingReader
    next: int
    held: bool = False
    received: list[int] = field(default_factory=list)


class Churn:
    """One writer, up to 8 places; every step says what it expects of the ring, and checks that it is so."""

    def __init__(self, cores: Cores, places: int, slots: int, chunks: int, inline_bytes: int) -> None:
        self.cores = cores
        self.layout = Layout.of(places, ROOM, chunks, slots, inline_bytes)
        self.ring = ShmRingBuffer(places, ROOM, chunks, slots=slots, inline_bytes=inline_bytes)
        self.seen_by_readers = ShmRingBuffer.from_fd(self.layout, os.dup(self.ring.fd), self.ring.queue_id)
        self.writer = RingWriter(self.layout, self.ring.view, cores.writer)
        self.writer.core.bind(bytes, PLAIN, True, None)
        for place in range(places):
            self.writer.evict(place)
        self.readers: list[Incarnation | None] = [None] * places
        self.sent = 0
        self.chunk_of: dict[int, int] = {}
        self.in_chunk: dict[int, int] = {}  # the last message that each was taken for
        self.churns = 0

    def close(self) -> None:
        for reader in self.readers:
            if reader is not None and not reader.held:
                reader.end.close()
        for end in (self.writer, self.ring, self.seen_by_readers):
            end.close()

    # What is to be

    def slowest(self) -> int:
        return min((reader.next for reader in self.readers if reader is not None), default=self.sent)

    def has_room(self, nbytes: int) -> bool:
        slowest = self.slowest()
        in_use = sum(number in self.chunk_of for number in range(slowest, self.sent))
        return self.sent - slowest < self.layout.slots and (
            nbytes <= self.layout.inline_bytes or in_use < self.layout.max_chunks
        )

    def oldest(self, history: int) -> int:
        first = self.sent
        while first > 0 and self.sent - first < min(history, self.layout.slots):
            chunk = self.chunk_of.get(first - 1)
            if chunk is not None and self.in_chunk[chunk] != first - 1:
                break
            first -= 1
        return first

    # Steps

    def send(self) -> None:
        message = content(self.sent, ROOM)
        room = self.has_room(len(message))
        slot = self.writer.claim(len(message))
        assert (slot is not None) == room, f"message {self.sent}"
        if slot is None:
            return
        slot.body[: len(message)] = message
        for at, word in ((0, PLAIN), (8, self.sent), (24, len(message))):
            slot.header[at : at + 8] = word.to_bytes(8, "little")
        self.writer.commit()
        self._sent(message)

    def send_many(self, times: int) -> None:
        """Send a batch, at most a lap; what does not fit a chunk ends it."""
        amount = min(times, self.layout.slots)
        messages = [*(content(self.sent + more, ROOM) for more in range(amount)), bytes(ROOM + 1)]
        sent = self.writer.core.put_many(messages, 0)
        for message in messages[:sent]:
            assert self.has_room(len(message)), f"message {self.sent}"
            self._sent(message)
        assert sent == amount or not self.has_room(len(messages[sent])), f"message {self.sent}"

    def _sent(self, message: bytes) -> None:
        chunk = self.writer.slots[self.sent % self.layout.slots].chunk
        assert (chunk is not None) == (len(message) > self.layout.inline_bytes)
        if chunk is not None:
            users = [n for n in range(self.slowest(), self.sent) if self.chunk_of.get(n) == chunk]
            assert not users, f"chunk {chunk} is taken while message {users} in it is to be read"
            self.chunk_of[self.sent] = chunk
            self.in_chunk[chunk] = self.sent
        self.chunk_of.pop(self.sent - 2 * self.layout.slots, None)
        self.sent += 1

    def _start(self, place: int, first: int) -> None:
        end = RingReader(self.layout, self.seen_by_readers.view, place, self.cores.reader)
        end.core.bind(bytes, PLAIN, True, None)
        end.start_at(first)
        self.readers[place] = Incarnation(end, first)
        self.churns += 1

    def join(self, place: int, history: int) -> None:
        """A newcomer takes the place, if it is vacant; or goes on where one was killed whose place is held."""
        reader = self.readers[place]
        if reader is None:
            first = self.writer.admit(place, history)
            assert first == self.oldest(history), f"of {self.sent} messages, {history} wanted"
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
        message = bytes(slot.body[: int.from_bytes(slot.header[24:32], "little")])
        assert message == content(reader.next, ROOM), f"place {place}, message {reader.next}"
        reader.end.release()
        reader.received.append(reader.next)
        reader.next += 1

    def read_many(self, place: int, most: int) -> None:
        reader = self.readers[place]
        if reader is None or reader.held:
            return
        numbers = range(reader.next, min(reader.next + most, self.sent))
        assert reader.end.core.take_many(most) == [content(number, ROOM) for number in numbers], f"place {place}"
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
            reader.end.core.skip()  # counted, but its slot was not given back
            reader.next += 1
        reader.end.close()
        if "held" in how:
            reader.held = True
            self.writer.resume(place)  # as at the death: leases go back
        else:
            self.writer.evict(place)
            self.readers[place] = None
        self.churns += 1

    def check(self) -> None:
        written = [self.writer.slots[n % self.layout.slots].flags for n in range(self.slowest(), self.sent)]
        for place, reader in enumerate(self.readers):
            unread = [number for number, flags in enumerate(written, self.slowest()) if not flags[1 + place]]
            assert unread == ([] if reader is None else list(range(reader.next, self.sent))), f"place {place}"

    def at_random(self, chance: random.Random) -> None:
        """Take one step."""
        place, what = chance.randrange(self.layout.n_reader), chance.random()
        if what < 0.2:
            self.send()
        elif what < 0.3:
            self.send_many(chance.randint(1, 6))
        elif what < 0.5:
            self.read(place)
        elif what < 0.6:
            self.read_many(place, chance.randint(1, 6))
        elif what < 0.8:
            self.join(place, chance.choice([0, 0, 1, 3, 100]))
        else:
            self.part(place, chance.choice(KILLED))


KILLED = ["leaves", "killed", "flagged", "leasing", "killed, held", "flagged, held", "leasing, held"]


def copying(churn: Churn, place: int) -> RingReader:
    """Return the end of a reader that copies, at this place."""
    return RingReader(churn.layout, churn.seen_by_readers.view, place, CopyingCore)
