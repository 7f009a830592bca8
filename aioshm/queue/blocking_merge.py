"""One stream out of many queues whose calls block: round robin, and one sleep on what all of their loops watch."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator, Mapping
from math import inf
from selectors import EVENT_READ, EVENT_WRITE
from time import monotonic, monotonic_ns
from types import TracebackType
from typing import Any, Self

from aioshm.codec import cannot_decode
from aioshm.errors import AioshmError, HandleError, MessagesLost, PeerDied, QueueClosed, QueueEmpty, RoleError
from aioshm.process.guard import Guard
from aioshm.queue.blocking import MessageQueue
from aioshm.queue.inquiry import answer_within
from aioshm.queue.reader_end import ReaderEnd
from aioshm.ring.atomics import ELSEWHERE, NOTHING, memory_fence
from aioshm.wait.stall import MIN_PAUSE_S

LINGER_NS = 100_000
"""How long a call looks again and again before it sleeps, if a message came within `HOT_NS`."""

HOT_NS = 1_000_000
TAKEN_S = 0.01  # how often to look after a reader that another thread uses


def merge(readers: Mapping[int, MessageQueue]) -> Merged:
    """Make one stream out of many queues.

    For use as ``for rank, obj in merge({rank: reader, ...})``; see `Merged`.

    Args:
        readers: Readers' ends by the rank, or any other number, that their messages are to come with. They need not be
            ready; they stay open when the iteration ends. Without any, it ends at once.

    Raises:
        TypeError: Not a mapping from ints to queues of `aioshm.blocking`.
        ValueError: A reader is there twice.
        RoleError: One of them is a writer.
    """
    if not isinstance(readers, Mapping):
        raise TypeError(f"readers must be a mapping from ranks to readers, not {readers!r}")
    ranks: dict[MessageQueue, int] = {}
    for rank, reader in readers.items():
        if not isinstance(rank, int) or isinstance(rank, bool):
            raise TypeError(f"the keys of readers must be ints, not {rank!r}")
        if not isinstance(reader, MessageQueue):
            raise TypeError(f"readers[{rank}] must be an aioshm.blocking.MessageQueue, not {reader!r}")
        if not isinstance(reader._end, ReaderEnd):
            raise RoleError(f"readers[{rank}] must be a reader; this is a writer: {reader!r}")
        if ranks.setdefault(reader, rank) != rank:
            raise ValueError(f"readers[{ranks[reader]}] and readers[{rank}] must not be the same reader")
    return Merged({rank: reader for reader, rank in ranks.items()})


class Merged(Iterator[tuple[int, Any]]):
    """The messages of many queues, each as ``(rank, obj)``. Made by `merge`.

    Each queue's messages come in its order; among the queues that have messages, each has its turn before any of them
    has another. A queue whose writer closes it drops out; one that ends otherwise, or cannot be attached to, first
    gives ``(rank, error)``: a `PeerDied`, a `HandleError`, or a `MessagesLost`. The iteration ends when all have ended.
    A message that is damaged or lost is given as ``(rank, error)``, too, and the queue goes on; `failed` tells which.

    What a signal's handler raises ends a wait and loses nothing. Two threads that iterate get different messages. While
    this waits, calls that other threads make on one of the readers wait, too; `close` ends the wait from any thread.
    An iteration may be left, and begun again, at any time.

    Attributes:
        failed: The errors of the queues that have ended with one, by rank.
    """

    def __init__(self, readers: Mapping[int, MessageQueue]) -> None:
        self.failed: dict[int, AioshmError] = {}
        self._running = list(readers.items())  # beginning with whose turn it is
        self._latest_ns = 0
        self._silences = [_Silence(rank, queue) for rank, queue in readers.items()]
        self._after_s = self._silences[0].reader._options.stall_warning_s if readers else inf
        self._watch_silence(monotonic())

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[int, Any]:
        """Receive the next message of any queue.

        Raises:
            StopIteration: All of them have ended, or this was closed.
            RoleError: This thread has an event loop that runs, or is inside of a block that has a reader's slot; or a
                reader belongs to another process.
        """
        if self._latest_ns >= self._look_at_ns and (found := self._check_silence()) is not None:
            return found
        while running := self._running:
            for place in running:
                rank, queue = place
                if not queue._kept:
                    try:
                        obj = queue._reading.next
                    except Exception as failure:
                        self._next_begins_behind(place)
                        return rank, _damage(queue, failure)
                    if obj is not NOTHING and obj is not ELSEWHERE:
                        queue._kept = [obj]  # what comes until it is returned may be interrupted
                        obj = None
                        if queue._reading.owes:
                            queue._tell()
                kept = queue._kept
                if kept:
                    self._next_begins_behind(place)
                    obj = kept[0]
                    del kept[0]
                    return rank, obj
            if self._linger(running):
                continue
            more = False
            for place in running:
                error = self._look(*place)
                if error is not None:
                    self._next_begins_behind(place)
                    return place[0], error
                more = more or bool(place[1]._kept)
            if not more and running is self._running:
                if monotonic_ns() >= self._look_at_ns and (found := self._check_silence()) is not None:
                    return found
                self._sleep(running)
        raise StopIteration

    def _look(self, rank: int, queue: MessageQueue) -> AioshmError | None:
        """Let a queue's loop have a turn, and take what is there; return what is wrong with it, if anything."""
        try:
            queue.poll()
        except QueueEmpty:
            return None
        except RoleError:
            raise
        except QueueClosed:
            self._drop(rank)
            return None
        except AioshmError as error:
            own = isinstance(error, MessagesLost) and queue._end._own_ring_or_none() is not None
            if own or isinstance(error, (PeerDied, HandleError)):
                self._drop(rank)
                self.failed[rank] = error
            return error.with_traceback(None)
        return None

    def _drop(self, rank: int) -> None:
        self._running = [place for place in self._running if place[0] != rank]

    def _next_begins_behind(self, place: tuple[int, MessageQueue]) -> None:
        self._latest_ns = monotonic_ns()
        running = self._running
        if running and running[-1] is not place and place in running:
            at = running.index(place) + 1
            self._running = running[at:] + running[:at]

    # Waiting

    def _linger(self, running: list[tuple[int, MessageQueue]]) -> bool:
        now = monotonic_ns()
        if now - self._latest_ns > HOT_NS:
            return False
        cores: list[Any] = [queue._reading for _, queue in running if queue._reading is queue._end._core]
        while cores and monotonic_ns() - now < LINGER_NS:
            if any(core.open and core.turn > 0 and core.ready() for core in cores):
                return True
            os.sched_yield()
        return False

    def _sleep(self, running: list[tuple[int, MessageQueue]]) -> None:
        """Sleep until there may be something to do for one of the queues, or for its loop."""
        guard, poll, parked = Guard(), select.poll(), []
        taken: list[MessageQueue] = []
        now = monotonic()
        due = [] if self._look_at_ns == inf else [self._look_at_ns / 1e9]
        try:
            guard.begin()
            guard.on_error = self._wake
            for _, queue in running:
                loop = queue._loop.private
                if loop is None or not queue._turns.take_now():
                    due.append(now + TAKEN_S)
                    continue
                taken.append(queue)
                if loop.busy:
                    return
                for fd, events in loop.watched():
                    poll.register(
                        fd,
                        (select.POLLIN if events & EVENT_READ else 0) | (select.POLLOUT if events & EVENT_WRITE else 0),
                    )
                timer = loop.due(now)
                if timer is not None:
                    due.append(timer)
                ring = queue._end._own_ring_or_none()
                if ring is not None and not queue.late:
                    parked.append(ring)
            for ring in parked:
                ring.parked[0] = 1
            memory_fence()
            if guard.error is None and running is self._running and not any(ring.ready() for ring in parked):
                poll.poll(max(0.0, min(due) - now) * 1000 + 1 if due else None)
        finally:
            for ring in parked:
                ring.parked[0] = 0
            for queue in taken:
                queue.end_turn()
            guard.end()
            error = guard.take_error()
            if error is not None:
                raise error

    def _wake(self) -> None:
        for _, queue in self._running:
            queue._loop.call_soon(_nothing)

    # Reporting, queue by queue: that others have messages does not keep the silence of one from being told

    def _watch_silence(self, now: float) -> None:
        """Count from here how long each queue is silent."""
        self._look_at_ns, self._asked = (now + self._after_s) * 1e9, list[_Silence]()
        for silence in self._silences:
            silence.begin(now)

    def _check_silence(self) -> tuple[int, AioshmError] | None:
        """Ask the writers whose queues have been silent since the last time, or report; nothing where nobody iterated.

        Returns:
            What is found to be wrong with a queue on the way.
        """
        now = monotonic()
        if now - self._look_at_ns / 1e9 > self._after_s:
            self._watch_silence(now)
            return None
        again_s, answer_s = self._after_s, answer_within(self._after_s)
        asked, self._asked = self._asked, []
        running = dict(self._running)
        for silence in asked or self._silences:
            queue = silence.queue
            if silence.rank not in running or silence.ended(now) or not queue._turns.take_now():
                continue  # or another thread waits for it, and is told
            try:
                if not asked and silence.reader._ask_writer():
                    self._asked.append(silence)
                    again_s = answer_s
                    continue
            finally:
                queue.end_turn()
            if asked:
                again_s = max(MIN_PAUSE_S, self._after_s - answer_s)
                if (error := self._look(silence.rank, queue)) is not None:  # its loop finds the answer, if there is one
                    return silence.rank, error
            if not queue._kept:
                silence.reader._report_waiting(now - silence.since)
        self._look_at_ns = (now + again_s) * 1e9
        return None

    # Closing

    def close(self) -> None:
        """End the iteration, one that waits in another thread too. The readers stay open. Idempotent."""
        running, self._running = self._running, []
        for _, queue in running:
            queue._loop.call_soon(_nothing)

    aclose = close

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<blocking {type(self).__name__} of {len(self._running)} queues>"


class _Silence:
    """How long a queue has brought nothing.

    Attributes:
        since: By ``time.monotonic()``.
    """

    def __init__(self, rank: int, queue: MessageQueue) -> None:
        assert isinstance(queue._end, ReaderEnd)
        self.rank, self.queue, self.reader = rank, queue, queue._end

    def begin(self, now: float) -> None:
        """Count from here."""
        self.since, self._progress = now, self.reader._progress()

    def ended(self, now: float) -> bool:
        """Return whether it has brought something since the last call; if so, count from here."""
        moved = self.reader._progress() != self._progress
        if moved:
            self.begin(now)
        return moved


def _damage(queue: MessageQueue, error: Exception) -> AioshmError:
    """Return what is wrong with a message that could not be received."""
    if isinstance(error, AioshmError):
        return error.with_traceback(None)
    assert isinstance(queue._end, ReaderEnd)
    return cannot_decode(error, queue._end.codec_name)


def _nothing() -> None: ...
