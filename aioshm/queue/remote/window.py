"""The send window of a writer and the receive window of a remote reader. No I/O, no clock.

The writer keeps each message until every remote reader has *consumed* it; the window bounds the kept messages.

Readers need no timers to detect losses. Data arrives over one connection at a time, in order, and each connection
begins with a mark: the number of its first message. So a message or a mark behind a gap proves that the messages in the
gap arrive only if the reader asks for them. The reader drops everything behind a gap, and the writer sends everything
from the first missing message on (go-back-N). A new connection begins with a new mark, and the reader asks again.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import islice

from aioshm.queue.remote import wire
from aioshm.queue.remote.wire import WireError


class Outgoing:
    """A message that the writer keeps until every reader has acknowledged it, and may retransmit."""

    __slots__ = ("body", "head", "nbytes")

    def __init__(self, head: bytes, body: bytes | memoryview | None = None) -> None:
        self.head: bytes = head  # the first frame, without the address
        self.body: bytes | memoryview | None = body  # the second frame, if there is one
        self.nbytes: int = wire.ADDRESS_BYTES + len(head)
        if body is not None:
            self.nbytes += len(body)


class SendWindow:
    """The writer's side: the messages that some remote reader has not consumed."""

    def __init__(self, max_messages: int, max_bytes: int, history: int = 0) -> None:
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._history = min(history, max_messages)
        self._kept: deque[Outgoing] = deque()
        self._past: deque[Outgoing] = deque()  # the history: consumed messages before the kept ones
        self._past_bytes = 0
        self.seq: int = 0  # number of the next message
        self.nbytes: int = 0
        self.readers: dict[int, int] = {}  # by rank: how many messages the reader has consumed
        self._resent: dict[int, int] = {}  # by rank: the present connection carries the messages below, sent again

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def first(self) -> int:
        """Number of the oldest kept message."""
        return self.seq - len(self._kept)

    def room(self, messages: int, nbytes: int) -> bool:
        """Return whether the window admits more messages; an empty one admits any."""
        if not self.readers or not self._kept:
            return True
        return len(self._kept) + messages <= self._max_messages and self.nbytes + nbytes <= self._max_bytes

    def part(self, sizes: list[int]) -> int:
        """Return how many messages, from the first on, fit an empty window together."""
        total = 0
        for count, size in enumerate(sizes):
            total += size
            if count and (count >= self._max_messages or total > self._max_bytes):
                return count
        return len(sizes)

    @property
    def idle(self) -> bool:
        """True without readers and without a history: messages are only counted."""
        return not self.readers and not self._history

    def sent(self, message: Outgoing | None) -> None:
        """Keep the next message, in the history if there are no readers; None, while idle: only count the message."""
        self.seq += 1
        if message is None:
            return
        if self.readers:
            self._kept.append(message)
            self.nbytes += message.nbytes
        else:
            self._retire(message)

    def join(self, rank: int, history: int = 0) -> int:
        """Add a reader; return the number of its first message."""
        while self._past and len(self._kept) < min(history, self._max_messages):
            nbytes = self._past[-1].nbytes
            if self._kept and self.nbytes + nbytes > self._max_bytes:
                break
            self._kept.appendleft(self._past.pop())
            self._past_bytes -= nbytes
            self.nbytes += nbytes
        first = self.readers[rank] = self.seq - min(history, len(self._kept))
        return first

    def connected(self, rank: int) -> None:
        """Note that a reader has a new connection, without retransmissions so far."""
        self._resent.pop(rank, None)

    def leave(self, rank: int) -> None:
        """Remove a reader."""
        self.readers.pop(rank, None)
        self._resent.pop(rank, None)
        self._consume()

    def acknowledged(self, rank: int, consumed: int) -> bool:
        """Note a reader's acknowledgement, unless it is outdated; return whether that makes room.

        Raises:
            WireError: The writer has not sent so many messages.
        """
        if not 0 <= consumed <= self.seq:
            raise WireError(f"reader {rank} acknowledges {consumed} of {self.seq} messages")
        if consumed <= self.readers[rank]:
            return False
        self.readers[rank] = consumed
        return self._consume()

    def resend(self, rank: int, first: int) -> list[Outgoing]:
        """Return the messages from ``first`` on to send again; none if this connection carries them again already.

        Repeated requests thus put no more than two windows on their way, and the sockets have room for two.

        Raises:
            WireError: The writer has not sent the message.
        """
        if first >= self.seq:
            raise WireError(f"reader {rank} asks for message {first} of {self.seq}")
        if first < self._resent.get(rank, 0):
            return []
        self._resent[rank] = self.seq
        return list(islice(self._kept, max(0, first - self.first), None))

    def laggards(self) -> list[int]:
        """Return the ranks that have not consumed the oldest message."""
        first = self.first
        return [rank for rank, consumed in self.readers.items() if consumed <= first < self.seq]

    def _consume(self) -> bool:
        """Move acknowledged messages into the history; return whether there were any."""
        needed = min(self.readers.values(), default=self.seq)
        before = len(self._kept)
        while self._kept and self.first < needed:
            message = self._kept.popleft()
            self.nbytes -= message.nbytes
            self._retire(message)
        return len(self._kept) < before

    def _retire(self, message: Outgoing) -> None:
        """Add a message to the history, and drop the oldest messages from there."""
        if not self._history:
            return
        self._past.append(message)
        self._past_bytes += message.nbytes
        while len(self._past) > self._history or self._past_bytes > self._max_bytes:
            self._past_bytes -= self._past.popleft().nbytes


@dataclass(frozen=True, slots=True)
class Missing:
    """Takes the place of lost messages in a reader's queue."""

    first: int
    last: int


@dataclass(slots=True)
class ReceiveWindow:
    """The reader's side: drops everything behind a gap; decides when to ask and when to acknowledge."""

    max_messages: int
    max_bytes: int
    skips: bool = False  # messages count as consumed on arrival; the oldest are lost when the window is full
    held: bool = False  # a block uses the first message
    next: int = 0  # number of the first message that has not arrived
    taken: int = 0  # number of the first message that has not been consumed
    nbytes: int = 0  # of the consumed messages
    ready: deque[tuple[wire.Data | Missing, int]] = field(default_factory=deque)  # each message with its size
    end: int | None = None  # number behind the last message of a closing writer
    _known: int = 0  # messages below were sent before the latest data, and arrive only if the reader asks
    _asked: int = 0  # messages below were asked for
    _acknowledged: int = 0
    _unacknowledged_bytes: int = 0
    _ready_bytes: int = 0

    def begin(self, first: int) -> None:
        """Set the number of the first message, before any message arrives."""
        self.next = self.taken = self._acknowledged = first

    @property
    def released(self) -> int:
        """Number of the first message that the writer has to keep."""
        return self.next if self.skips else self.taken

    def expects(self, seq: int) -> bool:
        """Return whether a message is the next one; note a gap before the message.

        Raises:
            WireError: The number lies beyond the window.
        """
        if seq >= self.released + self.max_messages:
            raise WireError(f"message {seq} came while {self.released} is not finished with")
        if seq > self.next:
            self._known = max(self._known, seq + 1)
        return seq == self.next

    def arrived(self, message: wire.Data, nbytes: int) -> None:
        """Add the next message."""
        self.ready.append((message, nbytes))
        self._ready_bytes += nbytes
        self.next += 1
        if self.skips:
            self._unacknowledged_bytes += nbytes
            self._keep_newest()

    def _keep_newest(self) -> None:
        """Lose the oldest messages while there are too many, or too many bytes."""
        ready = self.ready
        at = int(self.held)
        first = last = self.taken + at
        while len(ready) > at + 1 and (len(ready) > self.max_messages + 1 or self._ready_bytes > self.max_bytes):
            message, nbytes = ready[at]
            del ready[at]
            self._ready_bytes -= nbytes
            last = message.last + 1 if isinstance(message, Missing) else last + 1
        if last > first:
            ready.insert(at, (Missing(first, last - 1), 0))

    def marked(self, seq: int) -> None:
        """Note that a new connection carries the messages from ``seq`` on."""
        self._known = max(self._known, seq)
        self.ask_again()

    def ask_again(self) -> None:
        """Note that earlier requests may be lost."""
        self._asked = self.next

    def to_ask_for(self) -> int | None:
        """Return the first message to ask for now, which then counts as asked for; None: there is none."""
        if not self._asked <= self.next < self._known:
            return None
        self._asked = self._known
        return self.next

    def lose(self, end: int) -> None:
        """Replace all messages below ``end`` that have not arrived by a `Missing`."""
        if self.next < end:
            self.ready.append((Missing(self.next, end - 1), 0))
            self.next = end

    def finished(self) -> None:
        """Remove the first message, which was consumed."""
        message, nbytes = self.ready.popleft()
        self._ready_bytes -= nbytes
        self.nbytes += nbytes
        self.taken = message.last + 1 if isinstance(message, Missing) else self.taken + 1
        if not self.skips:
            self._unacknowledged_bytes += nbytes

    @property
    def complete(self) -> bool:
        """True if the writer is closing, and all of its messages have arrived."""
        return self.end is not None and self.next >= self.end

    def must_acknowledge(self) -> bool:
        """Return whether an eighth of the window is unacknowledged, so that the writer may be waiting."""
        messages = self.released - self._acknowledged
        return messages * 8 >= self.max_messages or self._unacknowledged_bytes * 8 >= self.max_bytes

    def acknowledged(self) -> None:
        """Note that an acknowledgement was sent."""
        self._acknowledged = self.released
        self._unacknowledged_bytes = 0
