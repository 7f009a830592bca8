"""The places of a merge's readers, and their shared sleep; see ``stream.py``."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from time import monotonic_ns
from typing import Any, TypeVar

from aioshm.codec import cannot_decode
from aioshm.errors import AioshmError, RoleError
from aioshm.queue.base import QueueBase
from aioshm.queue.ends.reader import Reader
from aioshm.ring import RingReader
from aioshm.ring.cores import EMPTY, SLOW_PATH
from aioshm.wait.poller import Poller, ThreadPoller

Q = TypeVar("Q", bound=QueueBase[Any])


class SharedSleep:
    """One sleep for several readers: a poller, and rings whose parked flags rise as one.

    It has no references to readers, since the event loop may keep the poller for longer.
    """

    def __init__(self) -> None:
        self.rings: Sequence[RingReader] = ()
        self.poller: Poller | ThreadPoller | None = None
        self.yields = False
        self._pid = os.getpid()

    def __setitem__(self, index: int, value: int) -> None:
        for ring in self.rings:
            ring.parked[index] = value

    def spin(self, budget_ns: int) -> bool:
        """Spin for at most so many nanoseconds; return whether one of the rings has a message."""
        looks = [ring.ready for ring in self.rings]
        until = monotonic_ns() + budget_ns if looks else 0
        while True:
            for ready in looks:
                if ready():
                    return True
            if self.yields:
                os.sched_yield()
            if monotonic_ns() >= until:
                return False

    def forget(self, ring: RingReader) -> None:
        """Sleep for a ring no longer, in a wait that goes on too: its flag is its reader's again."""
        if ring in self.rings:
            self.rings = [other for other in self.rings if other is not ring]
            ring.parked[0] = 0

    def wake(self) -> None:
        """Make the wait look again."""
        if self.poller is not None:
            self.poller.wake()

    def close(self) -> None:
        """Drop the poller; a forked child leaves the parent's poller alone."""
        if self.poller is not None and os.getpid() == self._pid:
            self.poller.close()
        self.poller = None


class Place:
    """One reader's place in the round."""

    __slots__ = (
        "_shared",
        "_source",
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
        self.receive: Callable[[], Any] = _nothing
        # `receive` while the reader is healthy; None until it is ready.
        self.quick: Callable[[], Any] | None = None
        self.ring: RingReader | None = None
        # True while the next message is incomplete: `receive` returns nothing then.
        self.late: bool = False
        # Whether this merge is in the reader's queue of waiters.
        self.entered: bool = False
        # Whether the quick way was shut before entering; such a place goes first.
        self.hidden: bool = False
        # The reason why attaching could not begin.
        self.failure: AioshmError | None = None
        self.running: bool = True
        self.watching: bool = False
        self._shared = shared
        self._source = self.reader.source

    def now_ready(self) -> None:
        """Note that the reader is ready."""
        source = self.reader.source
        self._source = source
        self.receive = self.quick = source.quick()
        self.ring = source.ring

    async def enter(self) -> None:
        """Acquire the call lock if it is free, and watch the reader anyway. Never suspends the task."""
        state = self.reader.state
        state.watch(self._woken)
        self.watching = True
        if self._source is not self.reader.source:  # that of a writer which is gone
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
        """Release the call lock, and stop watching, if this merge does either."""
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
        """Return the next message, or `EMPTY`: see `late`."""
        try:
            obj = self.reader.take()
        except AioshmError:
            if self.reader.state.refusal is not None:  # which is the end of the queue, not of a message
                return EMPTY
            raise
        if obj is not SLOW_PATH:
            return obj
        self.late, self.receive = True, _nothing
        return EMPTY

    def goes_on_after(self, error: AioshmError) -> bool:
        """Wait for the next writer, if the reader does; return whether it does."""
        try:
            self.reader.leave_writer(error)
        except AioshmError:
            return False
        self.unready()
        return True

    def unready(self) -> None:
        """Note a reader that waits for a new writer, or has one."""
        self._source = self.reader.source
        self.quick, self.ring, self.late, self.receive = None, None, False, _nothing

    def damaged(self, error: Exception) -> AioshmError:
        """Return the error for a message that could not be received."""
        if self.ring is None and isinstance(error, AioshmError):
            return error.with_traceback(None)
        if self.ring is None or not self.ring.core.damaged:
            raise error
        self.ring.core.damaged = False
        assert error.__traceback__ is not None
        error.__traceback__ = error.__traceback__.tb_next  # without the frame that is to refer to what is made of it
        return cannot_decode(error, self.reader.codec_name)

    def _ending(self) -> bool:
        reader = self.reader
        return reader.state.refusal is not None or reader.source.gone is not None or self.failure is not None

    def _woken(self) -> None:
        self._arrived()
        self._shared.wake()

    def _arrived(self) -> None:
        if self.late and self.quick is not None:
            self.late, self.receive = False, self.quick


def check_rank(must: str, rank: object) -> None:
    """Raise `TypeError` unless it is an int; ``must`` is the beginning of its text."""
    if not isinstance(rank, int) or isinstance(rank, bool):
        raise TypeError(f"{must}, not {rank!r}")


def checked_reader(what: str, reader: object, kind: type[Q], name: str) -> Q:
    """Return a reader; ``what`` names the argument for errors, ``name`` the kind."""
    if not isinstance(reader, kind):
        raise TypeError(f"{what} must be {name}, not {reader!r}")
    if not isinstance(reader.end, Reader):
        raise RoleError(f"{what} must be a reader; this is a writer: {reader!r}")
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


def _nothing() -> Any:
    return EMPTY
