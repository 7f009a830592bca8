"""The order in which an end closes: refuse calls, linger, announce, wait for calls to end, release, finish."""

# ruff: noqa: B027 - methods that do nothing are defaults

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from aioshm.closing import warn_not_closed
from aioshm.process.limits import detach_when_forked
from aioshm.queue.stats import QueueStats

if TYPE_CHECKING:
    from aioshm.queue.state import EndState


class Closable(ABC):
    """The closing interface of both ends and of a reader's source."""

    @abstractmethod
    def announce_close(self) -> None:
        """Notify the peers that this end closes."""

    @abstractmethod
    def close(self) -> None:
        """Release everything; called once, when no call uses the ring any more. Needs no loop."""

    @abstractmethod
    def stats(self) -> QueueStats:
        """Return the statistics while they can be read."""

    def detach_after_fork(self) -> None:
        """Release, in a forked child, everything that would hide the parent's death."""

    def lingers(self) -> bool:
        """Return whether `linger` has something to wait for."""
        return False

    async def linger(self) -> None:
        """Wait, before `announce_close`, for readers that may still fetch kept messages."""

    def finished(self) -> bool:
        """Return whether `finish` has nothing to do."""
        return True

    async def finish(self) -> None:
        """Do the slow part of closing."""


class ClosingOrder:
    """Closes one end, once. Created before the end's parts: Python finalizes the oldest first."""

    last_stats: QueueStats  # set when the end is released
    _end: Closable

    def __init__(self, state: EndState) -> None:
        self._state = state
        # Whether closing has begun.
        self.begun: bool = False
        self._announced = False
        # Whether there is nothing to release.
        self.dismantled: bool = True
        # Whether this is a forked child's copy.
        self._inherited = False

    def watch(self, end: Closable) -> None:
        """Take over the closing of an end, which is complete by now."""
        self._end = end
        self.dismantled = False
        detach_when_forked(self)

    async def aclose(self) -> None:
        """Close the end; see `aioshm.MessageQueue.aclose`."""
        if self._inherited:  # the loop and the peers belong to the parent
            self.begun = True
            return
        state = self._state
        loop = state.loop
        here = loop is not None and loop is asyncio.get_running_loop()
        if loop is not None and not here:
            if loop.is_running():
                if not self.dismantled:
                    state.check_here()
                return
            if loop.is_closed():
                state.lock.calls = 0  # the calls that waited there never continue
        try:
            self._begin()
            if here and not self._announced and self._end.lingers():
                await self._end.linger()
            if state.lock.calls:
                await asyncio.sleep(0)  # the waiting calls raise while the ring is still mapped
        finally:
            self._announce()
            self.dismantle_unless_used()
        await self._end.finish()

    def discard(self) -> None:
        """Close an unused end, outside of any loop."""
        if self._inherited:
            self.begun = True
            return
        self._begin()
        self._announce()
        self.dismantle_unless_used()

    def _begin(self) -> None:
        if not self.begun:
            self.begun = True
            self._state.refuse_closed()

    def _announce(self) -> None:
        if not self._announced:
            self._announced = True
            self._end.announce_close()

    def dismantle_unless_used(self) -> None:
        """Release everything, if the close was announced and no call is waiting."""
        if self._announced and not self.dismantled and not self._state.lock.calls:
            self.last_stats = self._end.stats()
            self.dismantled = True
            self._release()

    def _release(self) -> None:
        if self._state.poller is not None:
            self._state.poller.close()
        self._end.close()

    def detach_after_fork(self) -> None:
        """Make every call in a forked child raise; the parent's end stays open."""
        self._inherited = True
        if not self.dismantled:
            self._state.forbid()
            self.last_stats = self._end.stats()
            self.dismantled = True
            self._end.detach_after_fork()

    def __del__(self) -> None:
        if getattr(self, "dismantled", True):
            return
        remedy = "use `with`, or call close()" if self._state.blocks else "use `async with`, or await aclose()"
        try:
            warn_not_closed(self._state, remedy)
        finally:  # the warning may be an error
            self.dismantled = True
            self._release()
