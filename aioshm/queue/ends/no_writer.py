"""The source of a reader without a writer: looks for a writer."""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Callable
from time import monotonic
from typing import Any, Protocol

from aioshm.errors import AioshmError
from aioshm.queue.ends.source import SourceBlock, Waker
from aioshm.queue.ends.state import EndState
from aioshm.queue.handle import Handle
from aioshm.queue.stats import QueueStats
from aioshm.ring import RingReader
from aioshm.ring.cores import EMPTY
from aioshm.wait.limits import seconds

logger: logging.Logger = logging.getLogger("aioshm.queue")

FIRST_PAUSE_S, LONGEST_PAUSE_S, PAUSE_GROWTH = 0.001, 0.05, 1.3
"""How often to look for a writer: a look is one ``stat``, so that even the longest pause costs next to nothing."""


class Writers(Protocol):
    """Finds the writers of a reader, one after the other."""

    def look(self) -> Handle | None:
        """Return the handle of the present writer; None if there is none, or only a `left` one."""

    def left(self) -> None:
        """Note that the writer of the latest handle is gone."""

    def awaited(self) -> str:
        """Describe the awaited writer for log lines and errors."""


class SameWriter:
    """Writers of one handle, as writers of one identity have."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle

    def look(self) -> Handle | None:
        return self._handle

    def left(self) -> None:
        """Do nothing: the next writer has the same handle."""

    def awaited(self) -> str:
        return f"no writer answers at {self._handle.remote and self._handle.remote.control}"


class NoWriter:
    """Stands for a source while there is no writer: looks for a writer."""

    ring: RingReader | None = None
    waker: Waker | None = None
    gone: Callable[[], AioshmError] | None = None
    progress: int = 0
    writer_pid: int = 0

    def __init__(
        self,
        state: EndState,
        rank: int,
        writers: Writers,
        found: Callable[[Handle], bool],
        failed: Callable[[AioshmError], None],
    ) -> None:
        self._state = state
        self._rank = rank
        self._writers = writers
        # Gets the handle; returns whether the reader can use the writer.
        self._found = found
        self._failed = failed
        self._pause_s = FIRST_PAUSE_S
        self._timer: asyncio.TimerHandle | None = None
        # The start of the search, by the monotonic clock.
        self.since: float = monotonic()
        self.receive: Callable[[], Any] = _nothing

    # Looking

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer is None:
            self._timer = loop.call_later(0, _look, weakref.ref(self), loop)  # an end that is forgotten looks no more

    def look_now(self, loop: asyncio.AbstractEventLoop) -> None:
        """Look once; retry later if there is nothing."""
        try:
            handle = self._writers.look()
            if handle is not None and self._found(handle):
                return
        except AioshmError as error:
            self._failed(error)
        except (MemoryError, OSError):
            logger.debug("%r: cannot look for a writer now; trying again", self._state, exc_info=True)
        if self._timer is not None:
            self._timer = loop.call_later(self._pause_s, _look, weakref.ref(self), loop)
            self._pause_s = min(LONGEST_PAUSE_S, self._pause_s * PAUSE_GROWTH)

    def too_late(self) -> Exception:
        return TimeoutError(f"{self._state!r}: {self._writers.awaited()}")

    def report_waiting(self, waited_s: float) -> None:
        logger.warning(
            "%r, rank %d: waited %s: %s", self._state, self._rank, seconds(waited_s), self._writers.awaited()
        )

    # Receiving: there is nothing

    def ready(self) -> bool:
        return False

    look = ready
    look_on = ready

    def take(self) -> Any:
        return EMPTY

    def take_many(self, _most: int) -> list[Any]:
        return []

    def open_block(self, *, decoded: bool) -> SourceBlock | None:
        raise AssertionError("there is nothing to open")

    def settle(self) -> None: ...

    def quick(self) -> Callable[[], Any]:
        return self.receive

    def lost(self) -> AioshmError:
        raise AssertionError("nothing is under way")

    def traces(self, _most: int) -> list[bytes]:
        return []

    def ask_writer(self) -> bool:
        return False

    @property
    def doorbell(self) -> None:
        """There is none."""
        return None

    def other_ends(self) -> list[int]:
        return []

    def wake_writer(self) -> None: ...

    # Closing

    def stats(self) -> QueueStats:
        return self._state.new_stats(
            side="reader", rank=self._rank, messages=0, max_chunks=0, slots=0, overflows=0, backlog=0, readers=0
        )

    def say_goodbye(self) -> None: ...

    def close(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()

    def finished(self) -> bool:
        return True

    async def finish(self) -> None: ...

    def abandon(self) -> None:
        self._timer = None  # the loop is the parent's


def _look(looking: weakref.ref[NoWriter], loop: asyncio.AbstractEventLoop) -> None:
    source = looking()
    if source is not None:
        source.look_now(loop)


def _nothing() -> Any:
    return EMPTY
