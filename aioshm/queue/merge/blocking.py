"""One stream out of many queues whose calls block: round robin, and one sleep on what all of their loops watch."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator, Mapping, Sequence
from math import inf
from selectors import EVENT_READ, EVENT_WRITE
from time import monotonic
from typing import Any, Self

from aioshm.closing import Closing
from aioshm.codec import T
from aioshm.errors import (
    AioshmError,
    HandleError,
    MessagesLost,
    PeerDied,
    QueueClosed,
    QueueEmpty,
    ReaderEvicted,
    RoleError,
)
from aioshm.process.guard import Guard
from aioshm.queue.blocking.face import MessageQueue
from aioshm.queue.merge.blocking_places import BlockingPlace
from aioshm.queue.merge.places import checked_readers
from aioshm.queue.merge.round import Round
from aioshm.ring.atomics import ELSEWHERE, NOTHING, memory_fence

LINGER_S = 100e-6
"""How long a call looks again and again before it sleeps, if a message came within `HOT_S`."""

HOT_S = 1e-3
TAKEN_S = 0.01  # how often to look after a reader that another thread uses


def merge(readers: Mapping[int, MessageQueue[T]]) -> Merged[T]:
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
    ends = checked_readers(readers, MessageQueue, "an aioshm.blocking.MessageQueue", lambda reader: reader.held.end)
    return Merged([BlockingPlace(rank, readers[rank].held, end) for rank, end in ends.items()])


class Merged(Closing, Iterator[tuple[int, T | Any]]):
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

    def __init__(self, places: Sequence[BlockingPlace]) -> None:
        after_s = places[0].held.gate.options.stall_warning_s if places else inf
        self._round = Round(places, after_s, monotonic())
        self.failed: dict[int, AioshmError] = self._round.failed
        self._latest = 0.0  # when a message was returned

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[int, T | Any]:
        """Receive the next message of any queue.

        Raises:
            StopIteration: All of them have ended, or this was closed.
            RoleError: This thread has an event loop that runs, or is inside of a block that has a reader's slot; or a
                reader belongs to another process.
        """
        around = self._round
        if self._latest >= around.look_at and (found := self._check_silence()) is not None:
            return found
        while running := around.running:
            place, left = running[-1], len(running)
            for place in around.order:
                held = place.held
                if not held.kept:
                    try:
                        obj = held.reading.next
                    except Exception as failure:
                        self._latest = monotonic()
                        return place.rank, place.damage(failure)
                    if obj is not NOTHING and obj is not ELSEWHERE:
                        held.kept = [obj]  # what comes until it is returned may be interrupted
                        obj = None
                        if held.reading.owes:
                            held.tell()
                if held.kept:
                    self._latest = monotonic()
                    kept = held.kept  # from here on no call: a handler, or another thread, could run in it
                    if kept:
                        obj = kept[0]
                        del kept[0]
                        return place.rank, obj
                left -= 1
                if not left:
                    break
            if self._linger(running):
                continue
            found_any = False
            for other in around.behind(place):
                error = self._look(other)
                if error is not None:
                    self._latest = monotonic()
                    around.begin_behind(other)
                    return other.rank, error
                found_any = found_any or bool(other.held.kept)
            if not found_any and running is around.running:
                if monotonic() >= around.look_at and (found := self._check_silence()) is not None:
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
            self._round.drop(place)
            return None
        except AioshmError as error:
            own = isinstance(error, MessagesLost) and place.ring is not None and not place.ring.copies
            if own or isinstance(error, (PeerDied, HandleError, ReaderEvicted)):
                self._round.fail(place, error)
            return error.with_traceback(None)
        return None

    # Waiting

    def _linger(self, running: list[BlockingPlace]) -> bool:
        now = monotonic()
        if now - self._latest > HOT_S:
            return False
        cores: list[Any] = [place.held.reading for place in running if place.held.reading is place.held.gate.core]
        while cores and monotonic() - now < LINGER_S:
            if any(core.open and core.turn > 0 and core.ready() for core in cores):
                return True
            os.sched_yield()
        return False

    def _sleep(self, running: list[BlockingPlace]) -> None:
        """Sleep until there may be something to do for one of the queues, or for its loop."""
        guard, poll, parked = Guard(), select.poll(), []
        taken: list[BlockingPlace] = []
        now = monotonic()
        due = [] if self._round.look_at == inf else [self._round.look_at]
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
            if guard.error is None and running is self._round.running and not any(ring.ready() for ring in parked):
                poll.poll(max(0.0, min(due) - now) * 1000 + 1 if due else None)
        finally:
            for ring in parked:
                ring.parked[0] = 0
            for place in taken:
                place.held.end_turn()
            try:
                guard.end()
            finally:
                if guard.error is not None:
                    raise guard.error

    def _wake(self) -> None:
        for place in self._round.running:
            place.held.loop.call_soon(_nothing)

    def _check_silence(self) -> tuple[int, AioshmError] | None:
        """Tell of silent queues, if it is due; return what is found to be wrong with one on the way."""
        around, now = self._round, monotonic()
        if not around.silence_due(now):
            return None
        for place in around.asked:
            if place.running and (error := self._look(place)) is not None:  # its loop finds the answer, if there is one
                return place.rank, error
        around.tell_silence(now)
        return None

    # Closing

    def close(self) -> None:
        """End the iteration, one that waits in another thread too. The readers stay open. Idempotent."""
        running = self._round.running
        self._round.close()
        for place in running:
            place.held.loop.call_soon(_nothing)

    aclose = close

    def __repr__(self) -> str:
        return f"<blocking {type(self).__name__} of {len(self._round.running)} queues>"


def _nothing() -> None: ...
