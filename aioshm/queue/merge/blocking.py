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
from aioshm.config import Options
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
from aioshm.queue.ends.reading import ReadingEnd
from aioshm.queue.ends.writing import WritingEnd
from aioshm.queue.merge.blocking_places import BlockingPlace
from aioshm.queue.merge.places import check_rank, checked_reader, checked_readers
from aioshm.queue.merge.round import Errors, Round, check_errors, ranked
from aioshm.ring.atomics import ELSEWHERE, NOTHING, memory_fence

LINGER_S = 100e-6
"""How long a call looks again and again before it sleeps, if a message came within `HOT_S`."""

HOT_S = 1e-3
TAKEN_S = 0.01  # how often to look after a reader that another thread uses


def merge(readers: Mapping[int, MessageQueue[T]], *, errors: Errors = "raise") -> Merged[T]:
    """Make one stream out of many queues.

    For use as ``for rank, obj in merge({rank: reader, ...})``; see `Merged`.

    Args:
        readers: Readers' ends by the rank, or any other number, that their messages are to come with. They need not be
            ready; they stay open when the iteration ends. Without any, it ends at once.
        errors: What becomes of an error of one of the queues: ``"raise"``: it comes out of the iteration, with the
            queue's rank as its ``rank``; ``"yield"``: it is an item, ``(rank, error)``. Both ways one can go on.

    Raises:
        TypeError: Not a mapping from ints to queues of `aioshm.blocking`.
        ValueError: A reader is there twice; ``errors`` is neither.
        RoleError: One of them is a writer.
    """
    check_errors(errors)
    ends = checked_readers(readers, MessageQueue, _KIND, _end_of)
    return Merged([BlockingPlace(rank, readers[rank].held, end) for rank, end in ends.items()], errors)


class Merged(Closing, Iterator[tuple[int, T | Any]]):
    """The messages of many queues, each as ``(rank, obj)``. Made by `merge`.

    Each queue's messages come in its order; among the queues that have messages, each has its turn before any of them
    has another. A queue whose writer closes it drops out; one that ends otherwise, or cannot be attached to, does so
    with an error: a `PeerDied`, a `HandleError`, a `ReaderEvicted`, or a `MessagesLost`. It is told once, by then the
    queue is out, and the iteration can be gone on with: ``next``, or another ``for``. It ends when all have ended.
    `add` and `remove` change what it is of. A message that is damaged or lost is told in the same way, as is a
    `QueueRestarted`, and the queue goes on; `failed` tells which error is its queue's end. With ``errors="yield"``
    errors are items, as are exceptions that were sent as messages: nothing else tells one from the other.

    What a signal's handler raises ends a wait and loses nothing. Two threads that iterate get different messages. While
    this waits, calls that other threads make on one of the readers wait, too; `close` ends the wait from any thread.
    An iteration may be left, and begun again, at any time.

    Attributes:
        failed: The errors of the queues that have ended with one, by rank.
    """

    def __init__(self, places: Sequence[BlockingPlace], errors: Errors = "raise") -> None:
        self._raises = errors == "raise"
        after_s = places[0].held.gate.options.stall_warning_s if places else Options().stall_warning_s
        self._round = Round(places, after_s, monotonic())
        self.failed: dict[int, AioshmError] = self._round.failed
        self._latest = 0.0  # when a message was returned

    # Changing what is merged

    def add(self, rank: int, reader: MessageQueue[T]) -> None:
        """Let another queue have its turns, from any thread, also while one waits here.

        Args:
            rank: What its messages are to come with; that of a queue which has ended, or was removed, is free again.
            reader: Its reader's end, which need not be ready.

        Raises:
            TypeError: Not an int and a queue of `aioshm.blocking`.
            ValueError: The rank is taken, or the reader is there already.
            RoleError: The queue is a writer.
            EndClosed: This was closed.
        """
        check_rank("rank must be an int", rank)
        end = checked_reader("reader", reader, MessageQueue, _KIND, _end_of)
        self._round.add(BlockingPlace(rank, reader.held, end), monotonic())
        self._wake()

    def remove(self, rank: int) -> None:
        """Leave a queue out from now on, from any thread, also while one waits here.

        Its reader stays open, and receives what was not received here: the message alone that another thread is just
        being given comes still. The iteration ends if it was the last.

        Args:
            rank: That of the queue; one that has ended is forgotten, with its error.

        Raises:
            ValueError: There is no such rank.
        """
        place = self._round.remove(rank)
        if place is not None:
            place.held.loop.call_soon(_nothing)  # a thread that sleeps here has the reader's turn until it wakes

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[int, T | Any]:
        """Receive the next message of any queue.

        Raises:
            StopIteration: All of them have ended, or this was closed.
            AioshmError: One of them has ended with it, or has a damaged message, unless errors are items; its ``rank``
                is the queue's.
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
                        return self._tell(place, place.damage(failure))
                    if obj is not NOTHING and obj is not ELSEWHERE:
                        held.kept.append(obj)  # what comes until it is returned may be interrupted
                        obj = None
                if held.kept:
                    if held.gate.core.owes:
                        held.tell()
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
                    around.begin_behind(other)
                    return self._tell(other, error)
                found_any = found_any or bool(other.held.kept)
            if not found_any and running is around.running:
                if monotonic() >= around.look_at and (found := self._check_silence()) is not None:
                    return found
                self._sleep(running)
        raise StopIteration

    def _tell(self, place: BlockingPlace, error: AioshmError) -> tuple[int, Any]:
        """Return an error as an item, or raise it."""
        self._latest = monotonic()
        if self._raises:
            raise ranked(error, place.rank)
        return place.rank, error

    def _look(self, place: BlockingPlace) -> AioshmError | None:
        """Let a queue's loop have a turn, and take what is there; return what is wrong with it, if anything."""
        if not place.running:
            return None
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
            unchanged = guard.error is None and running is self._round.running
            if unchanged and not any(place.may_go_on() for place in taken):
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
            if (error := self._look(place)) is not None:  # its loop finds the answer, if there is one
                return self._tell(place, error)
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


_KIND = "an aioshm.blocking.MessageQueue"


def _end_of(reader: MessageQueue[Any]) -> ReadingEnd | WritingEnd:
    return reader.held.end


def _nothing() -> None: ...
