"""The readers of a merge: their places, their shared sleep, whose turn it is, and reports of silence."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import cycle
from time import monotonic_ns
from typing import Any, Literal, TypeVar

from aioshm.codec import cannot_decode
from aioshm.errors import AioshmError, EndClosed, RoleError
from aioshm.queue.base import QueueBase
from aioshm.queue.ends.reader import Reader
from aioshm.queue.source import nothing
from aioshm.ring import RingReader
from aioshm.ring.cores import EMPTY, SLOW_PATH
from aioshm.wait.limits import MIN_PAUSE_S, answer_within
from aioshm.wait.poller import Poller

Q = TypeVar("Q", bound=QueueBase[Any])

Errors = Literal["raise", "yield"]
"""Whether the iteration raises the error of a queue, or returns the error as an item."""


class SharedSleep:
    """One sleep for several readers: a poller, and the parked flags of all rings.

    No references to readers: the event loop may keep the poller for longer.
    """

    def __init__(self) -> None:
        self.rings: Sequence[RingReader] = ()
        self.poller: Poller | None = None
        self.yields = False
        self._pid = os.getpid()

    def __setitem__(self, index: int, value: int) -> None:
        for ring in self.rings:
            ring.parked[index] = value

    def spin(self, budget_ns: int) -> bool:
        """Spin for at most so many nanoseconds; return whether a ring has a message."""
        polls = [ring.ready for ring in self.rings]
        until = monotonic_ns()
        if polls:
            until += budget_ns
        while True:
            for ready in polls:
                if ready():
                    return True
            if self.yields:
                os.sched_yield()
            if monotonic_ns() >= until:
                return False

    def forget(self, ring: RingReader) -> None:
        """Wait no longer for a ring that closes; the sleep continues for all other rings."""
        if ring in self.rings:
            self.rings = [other for other in self.rings if other is not ring]
            ring.parked[0] = 0

    def wake(self) -> None:
        """End the sleep."""
        if self.poller is not None:
            self.poller.wake()

    def close(self) -> None:
        """Drop the poller; a forked child leaves the parent's poller alone."""
        if self.poller is not None and os.getpid() == self._pid:
            self.poller.close()
        self.poller = None


class Place:
    """One reader in a merge."""

    __slots__ = (
        "_shared",
        "_source",
        "counted",
        "entered",
        "failure",
        "hidden",
        "late",
        "quick",
        "rank",
        "reader",
        "receive",
        "ring",
        "running",
        "watching",
    )

    def __init__(self, rank: int, queue: QueueBase[Any], shared: SharedSleep) -> None:
        assert isinstance(queue.end, Reader)
        self.rank: int = rank
        self.reader: Reader = queue.end
        self.receive: Callable[[], Any] = nothing
        # `receive` while no message is incomplete; None until the reader is ready.
        self.quick: Callable[[], Any] | None = None
        self.ring: RingReader | None = None
        # The ring's messages that the poller has counted.
        self.counted: int = 0
        # True while the next message is incomplete: `receive` returns nothing then.
        self.late: bool = False
        # True while this merge has the reader's call lock.
        self.entered: bool = False
        # True if the fast path was shut before entering; such a reader goes first.
        self.hidden: bool = False
        # The error of attaching.
        self.failure: AioshmError | None = None
        self.running: bool = True
        self.watching: bool = False
        self._shared = shared
        self._source = self.reader.source

    def start(self) -> None:
        """Begin to attach, unless that was done."""
        try:
            self.reader.start_attaching()
        except RoleError:
            raise
        except AioshmError as error:
            self.failure = error

    def now_ready(self) -> None:
        """Note that the reader is ready."""
        self._source = self.reader.source
        self.quick = self._source.quick()
        self.receive = self.quick
        self.ring = self._source.ring
        if self.ring is not None:
            self.counted = self.ring.seq

    def unready(self) -> None:
        """Note that the reader waits for a new writer, or has one."""
        self._source = self.reader.source
        self.quick = None
        self.ring = None
        self.late = False
        self.receive = nothing

    async def enter(self) -> None:
        """Watch the reader, and acquire the call lock if it is free. Never suspends the task."""
        state = self.reader.state
        state.watch(self._woken)
        self.watching = True
        if self._source is not self.reader.source:
            self.unready()
        try:
            if not state.lock.calls or state.lock.in_own_block:
                shut = self.quick is not None and not state.core.open
                self.hidden = shut or self._ending()
                await state.enter(None)
                self.entered = True
                self._arrived()
        except BaseException:
            self.watching = False
            state.unwatch()
            raise

    def leave(self) -> None:
        """Release the call lock, and stop watching. Idempotent."""
        state = self.reader.state
        if self.watching:
            self.watching = False
            state.unwatch()
        if self.entered:
            self.entered = False
            state.leave()

    def can_continue(self) -> bool:
        """Return whether there is anything to do."""
        state = self.reader.state
        if not self.entered:
            return not state.lock.calls
        if self.late:
            return False
        if self.quick is not None:
            return self.reader.can_continue()
        return state.ready or self._ending() or self.reader.has_news

    def poll(self) -> Any:
        """Return the next message, or `EMPTY`; sets `late` if the message is incomplete."""
        try:
            obj = self.reader.take()
        except AioshmError:
            if self.reader.state.refusal is not None:  # an error of the queue, not of a message
                return EMPTY
            raise
        if obj is SLOW_PATH:
            self.late = True
            self.receive = nothing
            return EMPTY
        return obj

    def reconnects_after(self, error: AioshmError) -> bool:
        """Return whether the reader now waits for the next writer."""
        try:
            self.reader.leave_writer(error)
        except AioshmError:
            return False
        self.unready()
        return True

    def damaged(self, error: Exception) -> AioshmError:
        """Return the error for a message that could not be received."""
        if self.ring is None and isinstance(error, AioshmError):
            return error.with_traceback(None)
        if self.ring is None or not self.ring.damaged:
            raise error
        self.ring.damaged = False
        assert error.__traceback__ is not None
        error.__traceback__ = error.__traceback__.tb_next  # drops the frame that will refer to the new error
        return cannot_decode(error, self.reader.codec_name)

    def _ending(self) -> bool:
        reader = self.reader
        return reader.state.refusal is not None or reader.source.gone is not None or self.failure is not None

    def _woken(self) -> None:
        self._arrived()
        self._shared.wake()

    def _arrived(self) -> None:
        if self.late and self.quick is not None:
            self.late = False
            self.receive = self.quick


class Round:
    """The queues of a merge: each has its turn before any has another. No I/O."""

    def __init__(self, places: Iterable[Place], after_s: float, now: float) -> None:
        # The queues that have not ended; replaced, never changed.
        self.running: list[Place] = list(places)
        # The same in turn, endlessly; its position is the beginning of the next round.
        self.order: cycle[Place] = cycle(self.running)
        # The errors of ended queues, by rank.
        self.failed: dict[int, AioshmError] = {}
        self.closed: bool = False
        self._places = {place.rank: place for place in self.running}  # includes ended queues
        self._after_s = after_s
        self.watch_silence(now)

    # Turns

    def in_turn(self) -> list[Place]:
        """Return the open queues in order, the next one first."""
        return [next(self.order) for _ in self.running]

    def begin_behind(self, place: Place) -> None:
        """Begin the next round behind this queue."""
        self.order = cycle(self._behind(place))

    def _behind(self, place: Place) -> list[Place]:
        at = 0
        if place.running:
            at = self.running.index(place) + 1
        return self.running[at:] + self.running[:at]

    def drop(self, place: Place, error: AioshmError | None = None) -> None:
        """Remove a queue that has ended, maybe with an error; the next round begins behind the queue."""
        behind = self._behind(place)
        place.running = False
        self._go_round([other for other in behind if other is not place])
        if error is not None:
            self.failed[place.rank] = error

    def check_addition(self, rank: int, reader: Reader) -> None:
        """Reject a rank that is taken, a known reader, or any after closing."""
        if self.closed:
            raise EndClosed("this merge was closed: merge the readers anew")
        for place in self.running:
            if place.rank == rank:
                raise ValueError(f"rank {rank} is taken by {place.reader!r}: take another one, or remove({rank}) first")
            if place.reader is reader:
                raise ValueError(f"{reader!r} is there already, as rank {place.rank}")

    def add(self, place: Place, now: float) -> None:
        """Add a queue behind all others; the rank may be that of an ended queue."""
        self._places[place.rank] = place
        self.failed.pop(place.rank, None)
        self._heard[place.rank] = (place.reader.source.progress, now)
        self._go_round([*self.in_turn(), place])

    def remove(self, rank: int) -> Place | None:
        """Remove a queue and its error; return its place, unless it has ended."""
        place = self._places.pop(rank, None)
        if place is None:
            known = sorted(self._places) or "none at all"
            raise ValueError(f"rank {rank!r} is not in this merge: there is {known}")
        self.failed.pop(rank, None)
        if not place.running:
            return None
        place.running = False
        self._go_round([other for other in self.in_turn() if other is not place])
        return place

    def close(self) -> None:
        """Remove every queue."""
        self.closed = True
        self._go_round([])

    def _go_round(self, running: list[Place]) -> None:
        self.running = running
        self.order = cycle(running)

    # Silence of single queues, whatever messages other queues have

    def watch_silence(self, now: float) -> None:
        """Measure each queue's silence from now on."""
        self.look_at: float = now + self._after_s
        self.asked: list[Place] = []
        self._heard = {place.rank: (place.reader.source.progress, now) for place in self.running}

    def silence_due(self, now: float) -> bool:
        """Return whether `report_silence` is due; time without an iteration does not count."""
        if now - self.look_at > self._after_s:
            self.watch_silence(now)
        return now >= self.look_at

    def report_silence(self, now: float) -> float:
        """Ask silent queues' writers, or report them; return the seconds until the next call."""
        asked = self.asked
        self.asked = []
        answer_s = answer_within(self._after_s)
        again_s = self._after_s
        if asked:
            again_s = max(MIN_PAUSE_S, again_s - answer_s)
        for place in asked or self.running:
            source = place.reader.source
            if not place.running or self._moved(place, now) or not place.entered:
                continue
            if not asked and source.ask_writer():
                self.asked.append(place)
                again_s = answer_s
            else:
                source.report_waiting(now - self._heard[place.rank][1])
        self.look_at = now + again_s
        return again_s

    def _moved(self, place: Place, now: float) -> bool:
        """Return whether the reader has consumed messages since the last call."""
        progress = place.reader.source.progress
        if progress == self._heard[place.rank][0]:
            return False
        self._heard[place.rank] = progress, now
        return True


# Arguments and errors


def check_errors(errors: Errors) -> None:
    """Raise `ValueError` for any other value."""
    if errors not in ("raise", "yield"):
        raise ValueError(f'errors must be "raise" or "yield", not {errors!r}')


def check_rank(must: str, rank: object) -> None:
    """Raise `TypeError` unless the rank is an int; ``must`` begins the text."""
    if not isinstance(rank, int) or isinstance(rank, bool):
        raise TypeError(f"{must}, not {rank!r}")


def checked_reader(argument: str, reader: object, kind: type[Q], name: str) -> Q:
    """Return a reader of a kind; ``argument`` and ``name`` (of the kind) are for error texts."""
    if not isinstance(reader, kind):
        raise TypeError(f"{argument} must be {name}, not {reader!r}")
    if not isinstance(reader.end, Reader):
        raise RoleError(f"{argument} must be a reader; this is a writer: {reader!r}")
    return reader


def checked_readers(readers: Mapping[int, Q], kind: type[Q], name: str) -> Mapping[int, Q]:
    """Return ``merge``'s argument, checked."""
    if not isinstance(readers, Mapping):
        raise TypeError(f"readers must be a mapping from ranks to readers, not {readers!r}")
    ranks: dict[object, int] = {}
    for rank, reader in readers.items():
        check_rank("the keys of readers must be ints", rank)
        end = checked_reader(f"readers[{rank}]", reader, kind, name).end
        if ranks.setdefault(end, rank) != rank:
            raise ValueError(f"readers[{ranks[end]}] and readers[{rank}] must not be the same reader")
    return readers


def ranked(error: AioshmError, rank: int) -> AioshmError:
    """Return an error to raise, with the rank of its queue."""
    error.rank = rank
    note = f"this is about the queue that the merge has as rank {rank}"
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)
    return error
