"""The windows of a writer and a remote reader: numbers, acknowledgements, retransmits. Nothing is lost or comes twice.

No I/O, no clock. The writer keeps each message until every remote reader has *consumed* it; what it keeps is bounded
(the window), so a reader that does not read holds the writer back instead of filling memory at either end.

A reader never has to guess from a timer that something was lost. Data comes over one connection at a time, which keeps
its order, and begins with a mark: the number of the first message that will come by itself. So a message behind a gap,
or a mark behind one, proves that what lies in the gap will not come unless it is asked for. What was asked for over a
connection that ended is asked for again when the next mark has come.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from aioshm.queue.remote.wire import MAX_RANGES, WireError


class Kept(Protocol):
    """A message that the writer may have to send again."""

    @property
    def nbytes(self) -> int:
        """Its size."""


K = TypeVar("K", bound=Kept)
M = TypeVar("M")


class SendWindow(Generic[K]):
    """The writer's side: what was sent and not yet consumed by every remote reader."""

    def __init__(self, max_messages: int, max_bytes: int, history: int = 0) -> None:
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._history = min(history, max_messages)
        self._kept: deque[K] = deque()
        self._past: deque[K] = deque()  # what comes before those, which nobody waits for
        self._past_bytes = 0
        self.seq: int = 0  # sequence number of the next message
        self.nbytes: int = 0
        self.readers: dict[int, int] = {}  # how many messages each reader has finished with, by rank
        self._again: dict[int, set[int]] = {}  # what each reader was sent again over its present connection

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def first(self) -> int:
        """Sequence number of the oldest message in it."""
        return self.seq - len(self._kept)

    def room(self, messages: int, nbytes: int, elsewhere: int = 0) -> bool:
        """Return whether so much more may be sent."""
        if not self.readers:
            return True
        if not self._kept and not elsewhere:
            return True
        return len(self._kept) + messages <= self._max_messages and self.nbytes + elsewhere + nbytes <= self._max_bytes

    def part(self, sizes: list[int]) -> int:
        """Return how many of messages of these sizes may go together, so that there will be room for them once."""
        total = 0
        for count, size in enumerate(sizes):
            total += size
            if count and (count >= self._max_messages or total > self._max_bytes):
                return count
        return len(sizes)

    @property
    def idle(self) -> bool:
        """Whether messages need only be counted: nobody reads, and nobody who comes later may ask for them."""
        return not self.readers and not self._history

    def sent(self, message: K) -> Sequence[K]:
        """Keep the next message; return what need not be kept any more, which without readers it may be itself."""
        self.seq += 1
        if self.readers:
            self._kept.append(message)
            self.nbytes += message.nbytes
            return ()
        return self._retire([message])

    def skip(self) -> None:
        """Count the next message, while this is idle."""
        self.seq += 1

    def join(self, rank: int, history: int = 0) -> int:
        """Count on a reader from now on; return the number of its first message."""
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
        """Note that a reader has a new connection, over which nothing was sent again so far."""
        self._again[rank] = set()

    def leave(self, rank: int) -> list[K]:
        """Count on a reader no more; return what need not be kept any more."""
        self.readers.pop(rank, None)
        self._again.pop(rank, None)
        return self._let_go()

    def acknowledged(self, rank: int, consumed: int) -> list[K]:
        """Note how far a reader is; return what need not be kept any more. Older news changes nothing.

        Raises:
            WireError: It cannot have what was not sent.
        """
        if not 0 <= consumed <= self.seq:
            raise WireError(f"reader {rank} acknowledges {consumed} of {self.seq} messages")
        if consumed <= self.readers[rank]:
            return []
        self.readers[rank] = consumed
        return self._let_go()

    def resend(self, rank: int, first: int, last: int) -> tuple[Iterator[tuple[int, K]], tuple[int, int] | None]:
        """Return what is to be sent again of a run of messages, and what run of it is lost for good.

        A connection loses nothing while it lasts. So what was sent again over this one is left out: however often a
        reader asks, no more than two windows are on their way, which is what the sockets have room for.

        Raises:
            WireError: Some of it was never sent.
        """
        if not first <= last < self.seq:
            raise WireError(f"messages {first} to {last} of {self.seq} are asked for")
        oldest = self.first
        lost = (first, min(last, oldest - 1)) if first < oldest else None
        again = self._again.setdefault(rank, set())
        if len(again) > self._max_messages:
            again.difference_update([seq for seq in again if seq < oldest])
        return self._once(again, max(first, oldest), last), lost

    def backlog(self) -> int:
        """Return how many messages the slowest reader has not finished with."""
        return self.seq - min(self.readers.values(), default=self.seq)

    def laggards(self) -> list[int]:
        """Return the readers that the window waits for."""
        first = self.first
        return [rank for rank, consumed in self.readers.items() if consumed <= first < self.seq]

    def _once(self, again: set[int], first: int, last: int) -> Iterator[tuple[int, K]]:
        for seq in range(first, last + 1):
            if seq not in again:
                again.add(seq)
                yield seq, self._kept[seq - self.first]

    def _let_go(self) -> list[K]:
        needed = min(self.readers.values(), default=self.seq)
        free = []
        while self._kept and self.first < needed:
            message = self._kept.popleft()
            self.nbytes -= message.nbytes
            free.append(message)
        return self._retire(free) if self._history else free

    def _retire(self, messages: list[K]) -> list[K]:
        """Keep messages that all have finished with as long as newcomers may ask for them; return who goes for that."""
        if not self._history:
            return messages
        free = []
        for message in messages:
            self._past.append(message)
            self._past_bytes += message.nbytes
        while len(self._past) > self._history or self._past_bytes > self._max_bytes:
            free.append(self._past.popleft())
            self._past_bytes -= free[-1].nbytes
        return free


@dataclass(frozen=True, slots=True)
class Missing:
    """Stands in a reader's line for messages that cannot be had any more."""

    first: int
    last: int


@dataclass(slots=True)
class ReceiveWindow(Generic[M]):
    """The reader's side: puts messages in order, knows what to ask for and when to acknowledge."""

    max_messages: int
    max_bytes: int
    # Messages count as finished with when they arrive; no more unread ones are kept than the window holds.
    skips: bool = False
    held: bool = False  # whether the first message in line is in use
    next: int = 0  # sequence number of the first message that has not been received
    taken: int = 0  # sequence number of the first message that has not been finished with
    # What can be read, in order, each with its size.
    ready: deque[tuple[M | Missing, int]] = field(default_factory=deque)
    end: int | None = None  # where the writer said that the stream ends
    _early: dict[int, tuple[M, int]] = field(default_factory=dict)  # behind a gap
    _lost: list[tuple[int, int]] = field(default_factory=list)
    _known: int = 0  # everything below is there, or will not come by itself
    _asked: int = 0  # everything below was asked for, as far as it is missing
    _acknowledged: int = 0
    _unacknowledged_bytes: int = 0
    _ready_bytes: int = 0

    def begin(self, first: int) -> None:
        """Expect this message first; said before any has come."""
        self.next = self.taken = self._known = self._asked = self._acknowledged = first

    @property
    def released(self) -> int:
        """Sequence number of the first message that the writer is to count on."""
        return self.next if self.skips else self.taken

    def has(self, seq: int) -> bool:
        """Return whether a message has arrived, or counts as lost."""
        return seq < self.next or seq in self._early

    def arrived(self, seq: int, message: M, nbytes: int) -> bool:
        """Take a message over; return False for one that is here already.

        Raises:
            WireError: The writer cannot have sent it: it lies beyond the window.
        """
        if self.has(seq):
            return False
        if seq >= (self.next if self.skips else self.taken) + self.max_messages:
            raise WireError(f"message {seq} came while {self.released} is not finished with")
        self._known = max(self._known, seq)
        if seq != self.next:
            self._early[seq] = message, nbytes
            return True
        self.ready.append((message, nbytes))
        self._ready_bytes += nbytes
        self.next += 1
        if self._early or self._lost:
            self._close_gap()
        if self.skips:
            self._unacknowledged_bytes += nbytes
            self._keep_newest()
        return True

    def _keep_newest(self) -> None:
        """Lose the oldest messages in line that are too many, or too many bytes."""
        ready, at = self.ready, int(self.held)
        first = last = self.taken + at
        while len(ready) > at + 1 and (len(ready) > self.max_messages + 1 or self._ready_bytes > self.max_bytes):
            message, nbytes = ready[at]
            del ready[at]
            self._ready_bytes -= nbytes
            last = message.last + 1 if isinstance(message, Missing) else last + 1
        if last > first:
            ready.insert(at, (Missing(first, last - 1), 0))

    def marked(self, seq: int) -> None:
        """Note that from here on, messages from ``seq`` on come by themselves, and older ones do not."""
        self._known = max(self._known, seq)
        self.ask_again()

    def ends(self, seq: int) -> None:
        """Note where the writer said that the stream ends; what is still missing comes by itself, or a mark tells."""
        self.end = seq

    def ask_again(self) -> None:
        """Note that what was asked for may have been asked in vain."""
        self._asked = self.next

    def lost(self, first: int, last: int) -> None:
        """Note that messages cannot be had any more; those of them that are here, or still come, stay."""
        self._lost.append((first, last))
        self._close_gap()

    def lost_the_rest(self) -> None:
        """Note that nothing more will come of a stream whose end is known."""
        if self.end is not None and not self.complete:
            self.lost(self.next, self.end - 1)

    def to_ask_for(self) -> list[tuple[int, int]]:
        """Return the runs of messages to ask for now; they count as asked for."""
        start, end = max(self.next, self._asked), self._known
        if start >= end:
            return []
        runs: list[tuple[int, int]] = []
        for seq in sorted(held for held in self._early if start <= held < end):
            if start < seq:
                runs.append((start, seq - 1))
            start = seq + 1
        if start < end:
            runs.append((start, end - 1))
        self._asked = end
        if len(runs) > MAX_RANGES:
            runs[MAX_RANGES - 1 :] = [(runs[MAX_RANGES - 1][0], runs[-1][1])]  # some of it comes twice
        return runs

    def finished(self) -> None:
        """Note that the first message in line is finished with."""
        message, nbytes = self.ready.popleft()
        self._ready_bytes -= nbytes
        self.taken = message.last + 1 if isinstance(message, Missing) else self.taken + 1
        if not self.skips:
            self._unacknowledged_bytes += nbytes

    @property
    def complete(self) -> bool:
        """Whether everything that the writer has ever sent was received."""
        return self.end is not None and self.next >= self.end

    @property
    def unacknowledged(self) -> bool:
        """Whether there is anything finished with that was not acknowledged."""
        return self.released != self._acknowledged

    def must_acknowledge(self) -> bool:
        """Return whether the writer may be waiting for the window: an eighth of it is unacknowledged."""
        return (self.released - self._acknowledged) * 8 >= self.max_messages or (
            self._unacknowledged_bytes * 8 >= self.max_bytes
        )

    def acknowledged(self) -> None:
        """Note that the writer was told what is finished with."""
        self._acknowledged = self.released
        self._unacknowledged_bytes = 0

    def _close_gap(self) -> None:
        while True:
            while (held := self._early.pop(self.next, None)) is not None:
                self.ready.append(held)
                self._ready_bytes += held[1]
                self.next += 1
            last = max((last for first, last in self._lost if first <= self.next <= last), default=None)
            if last is None:
                break
            last = min([last, *(seq - 1 for seq in self._early)])
            self.ready.append((Missing(self.next, last), 0))
            self.next = last + 1
        self._lost = [(first, last) for first, last in self._lost if last >= self.next]
