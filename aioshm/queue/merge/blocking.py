"""One stream out of many queues whose calls block: round robin, and one sleep on what all of their loops watch."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator, Mapping
from math import inf
from selectors import EVENT_READ, EVENT_WRITE
from time import monotonic, monotonic_ns
from typing import Any, Self

from aioshm.closing import Closing
from aioshm.errors import AioshmError, HandleError, MessagesLost, PeerDied, QueueClosed, QueueEmpty, RoleError
from aioshm.process.guard import Guard
from aioshm.queue.blocking.face import MessageQueue
from aioshm.queue.ends.reading import ReadingEnd
from aioshm.queue.inquiry import answer_within
from aioshm.queue.merge.blocking_places import BlockingPlace
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
        if not isinstance(reader.held.end, ReadingEnd):
            raise RoleError(f"readers[{rank}] must be a reader; this is a writer: {reader!r}")
        if ranks.setdefault(reader, rank) != rank:
            raise ValueError(f"readers[{ranks[reader]}] and readers[{rank}] must not be the same reader")
    return Merged({rank: reader for reader, rank in ranks.items()})


class Merged(Closing, Iterator[tuple[int, Any]]):
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
        self._running = [BlockingPlace(rank, queue.held) for rank, queue in readers.items()]  # whose turn it is first
        self._latest_ns = 0
        self._after_s = self._running[0].held.gate.options.stall_warning_s if readers else inf
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
                held = place.held
                if not held.kept:
                    try:
                        obj = held.reading.next
                    except Exception as failure:
                        self._next_begins_behind(place)
                        return place.rank, place.damage(failure)
                    if obj is not NOTHING and obj is not ELSEWHERE:
                        held.kept = [obj]  # what comes until it is returned may be interrupted
                        obj = None
                        if held.reading.owes:
                            held.tell()
                kept = held.kept
                if kept:
                    self._next_begins_behind(place)
                    obj = kept[0]
                    del kept[0]
                    return place.rank, obj
            if self._linger(running):
                continue
            found_any = False
            for place in running:
                error = self._look(place)
                if error is not None:
                    self._next_begins_behind(place)
                    return place.rank, error
                found_any = found_any or bool(place.held.kept)
            if not found_any and running is self._running:
                if monotonic_ns() >= self._look_at_ns and (found := self._check_silence()) is not None:
                    return found
                self._sleep(running)
        raise StopIteration

    def _look(self, place: BlockingPlace) -> AioshmError | None:
        """Let a queue's loop have a turn, and take what is there; return what is wrong with it, if anything."""
        try:
            place.poll()
        except QueueEmpty:
            return None
        except RoleError:
            raise
        except QueueClosed:
            self._drop(place)
            return None
        except AioshmError as error:
            own = isinstance(error, MessagesLost) and place.ring is not None
            if own or isinstance(error, (PeerDied, HandleError)):
                self._drop(place)
                self.failed[place.rank] = error
            return error.with_traceback(None)
        return None

    def _drop(self, place: BlockingPlace) -> None:
        self._running = [other for other in self._running if other is not place]

    def _next_begins_behind(self, place: BlockingPlace) -> None:
        self._latest_ns = monotonic_ns()
        running = self._running
        if running and running[-1] is not place and place in running:
            at = running.index(place) + 1
            self._running = running[at:] + running[:at]

    # Waiting

    def _linger(self, running: list[BlockingPlace]) -> bool:
        now = monotonic_ns()
        if now - self._latest_ns > HOT_NS:
            return False
        cores: list[Any] = [place.held.reading for place in running if place.held.reading is place.held.gate.core]
        while cores and monotonic_ns() - now < LINGER_NS:
            if any(core.open and core.turn > 0 and core.ready() for core in cores):
                return True
            os.sched_yield()
        return False

    def _sleep(self, running: list[BlockingPlace]) -> None:
        """Sleep until there may be something to do for one of the queues, or for its loop."""
        guard, poll, parked = Guard(), select.poll(), []
        taken: list[BlockingPlace] = []
        now = monotonic()
        due = [] if self._look_at_ns == inf else [self._look_at_ns / 1e9]
        try:
            guard.begin()
            guard.on_error = self._wake
            for place in running:
                loop = place.held.loop.private
                if loop is None or not place.held.turns.take_now():
                    due.append(now + TAKEN_S)
                    continue
                taken.append(place)
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
                ring = place.ring
                if ring is not None and not place.late:
                    parked.append(ring)
            for ring in parked:
                ring.parked[0] = 1
            memory_fence()
            if guard.error is None and running is self._running and not any(ring.ready() for ring in parked):
                poll.poll(max(0.0, min(due) - now) * 1000 + 1 if due else None)
        finally:
            for ring in parked:
                ring.parked[0] = 0
            for place in taken:
                place.held.end_turn()
            guard.end()
            error = guard.take_error()
            if error is not None:
                raise error

    def _wake(self) -> None:
        for place in self._running:
            place.held.loop.call_soon(_nothing)

    # Reporting, queue by queue: that others have messages does not keep the silence of one from being told

    def _watch_silence(self, now: float) -> None:
        """Count from here how long each queue is silent."""
        self._look_at_ns, self._asked = (now + self._after_s) * 1e9, list[BlockingPlace]()
        for place in self._running:
            place.begin_silence(now)

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
        running = self._running
        for place in asked or running:
            held = place.held
            if place not in running or place.silence_ended(now) or not held.turns.take_now():
                continue  # or another thread waits for it, and is told
            try:
                if not asked and place.reader.source.ask_writer():
                    self._asked.append(place)
                    again_s = answer_s
                    continue
            finally:
                held.end_turn()
            if asked:
                again_s = max(MIN_PAUSE_S, self._after_s - answer_s)
                if (error := self._look(place)) is not None:  # its loop finds the answer, if there is one
                    return place.rank, error
            if not held.kept:
                place.reader.source.report_waiting(now - place.silent_since)
        self._look_at_ns = (now + again_s) * 1e9
        return None

    # Closing

    def close(self) -> None:
        """End the iteration, one that waits in another thread too. The readers stay open. Idempotent."""
        running, self._running = self._running, []
        for place in running:
            place.held.loop.call_soon(_nothing)

    aclose = close

    def __repr__(self) -> str:
        return f"<blocking {type(self).__name__} of {len(self._running)} queues>"


def _nothing() -> None: ...
