"""The readers of a merge: the state of each, their shared sleep, and the checks of arguments."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from time import monotonic_ns
from typing import Any, Literal, TypeVar

from aioshm.codec import cannot_decode
from aioshm.errors import AioshmError, RoleError
from aioshm.queue.base import QueueBase
from aioshm.queue.ends.reader import Reader
from aioshm.queue.source import nothing
from aioshm.ring import RingReader
from aioshm.ring.cores import EMPTY, SLOW_PATH
from aioshm.wait.limits import Stall
from aioshm.wait.poller import Poller

Q = TypeVar("Q", bound=QueueBase[Any])

Errors = Literal["raise", "yield"]
"""Whether the iteration raises the error of a queue, or returns the error as an item."""


class SharedSleep:
    """One sleep for several readers: a poller, and the parked flags of all rings.

    Refers to rings only during a sleep: the event loop may keep the poller for longer than the merge.
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

    def __init__(self, rank: int, queue: QueueBase[Any], shared: SharedSleep) -> None:
        assert isinstance(queue.end, Reader)
        self.rank: int = rank
        self.reader: Reader = queue.end
        # `Source.receive` of a ready reader; `nothing` otherwise, and while the next message is incomplete.
        self.receive: Callable[[], Any] = nothing
        self.ready: bool = False
        self.ring: RingReader | None = None
        # True while the next message is incomplete: no look before the next wake-up.
        self.late: bool = False
        # True while this merge has the reader's call lock.
        self.entered: bool = False
        # True if the fast path was shut, or the queue ends: the merge takes from such a reader first.
        self.hidden: bool = False
        # The error of attaching.
        self.failure: AioshmError | None = None
        self.running: bool = True
        self.watching: bool = False
        # Asks a silent writer, and reports the silence.
        self.stall: Stall = self.reader.inquiry()
        self._progress = self.reader.source.progress
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
        self.ready = True
        self.receive = self._source.receive
        self.ring = self._source.ring

    def unready(self) -> None:
        """Note that the reader has another source: a search for a writer, or the next writer."""
        self._source = self.reader.source
        self.ready = False
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
                shut = self.ready and not state.core.open
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
        if self.ready:
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

    def check_silence(self, now: float) -> None:
        """Ask the writer, or report the silence, if the reader has consumed nothing for long."""
        progress = self.reader.source.progress
        idle = now - self.stall.at > self.reader.state.options.stall_warning_s  # nobody has iterated meanwhile
        if progress != self._progress or idle or not self.entered:
            self._progress = progress
            self.stall = self.reader.inquiry()
        self.stall.check(now)

    def _ending(self) -> bool:
        reader = self.reader
        return reader.state.refusal is not None or reader.source.gone is not None or self.failure is not None

    def _woken(self) -> None:
        self._arrived()
        self._shared.wake()

    def _arrived(self) -> None:
        if self.late and self.ready:
            self.late = False
            self.receive = self._source.receive


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
