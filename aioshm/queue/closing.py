"""The order in which an end closes: refuse, linger, say goodbye, wait until no call uses it, give all back, finish."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import TYPE_CHECKING, Protocol

from aioshm.closing import warn_not_closed
from aioshm.process.limits import detach_when_forked
from aioshm.queue.stats import QueueStats

if TYPE_CHECKING:
    from aioshm.queue.state import EndState

LOOP_POLL_S = 0.05
"""How often closing from another thread looks whether the loop that is to do it still runs."""


class Closable(Protocol):
    """The closing interface of a writing or a reading end."""

    def wake_peers(self) -> None:
        """Wake parked peers that can continue; call it again after an interruption."""

    def lingers(self) -> bool:
        """Return whether `linger` has something to wait for."""

    async def linger(self) -> None:
        """Wait, before the goodbye, for readers that may still fetch kept messages."""

    def say_goodbye(self) -> None:
        """Notify the peers that this end closes."""

    def close(self) -> None:
        """Give everything back; called once, when no call uses the ring any more. Needs no loop."""

    def detach_after_fork(self) -> None:
        """Release, in a forked child, everything that would hide the parent's death."""

    def finished(self) -> bool:
        """Return whether `finish` has nothing to do."""

    async def finish(self) -> None:
        """Do the slow part of closing."""

    def stats(self) -> QueueStats:
        """Return the statistics while they can be read."""


class ClosingOrder:
    """Closes one end, once. Made before the end's parts: Python finalizes the oldest first."""

    last_stats: QueueStats  # once dismantled
    _inside: Closable

    def __init__(self, state: EndState) -> None:
        self._state = state
        # Whether closing has begun.
        self.begun: bool = False
        self._parted = False  # whether the goodbye was said
        self.dismantled: bool = True  # as long as there is nothing to give back
        self._inherited = False  # whether this is a forked child's copy

    def enclose(self, inside: Closable) -> None:
        """Take over the closing of an end, which is complete by now."""
        self._inside = inside
        self.dismantled = False
        detach_when_forked(self)

    async def aclose(self) -> None:
        """Close the end; see `aioshm.MessageQueue.aclose`."""
        if self._inherited:  # the other ends, and the loop, are the parent's
            self.begun = True
            return
        loop = self._state.loop
        if loop is None or loop is asyncio.get_running_loop() or not loop.is_running():
            await self._close_here()
        else:
            await self._close_there(loop)

    async def _close_here(self) -> None:
        state = self._state
        if state.loop is not None and state.loop.is_closed():
            state.lock.calls = 0  # the calls that waited there will never go on
        try:
            self._begin()
            if not self._parted and self._inside.lingers() and state.loop is asyncio.get_running_loop():
                await self._inside.linger()
            if state.lock.calls:
                await asyncio.sleep(0)  # the waiting calls raise while the ring is still mapped
        finally:
            self._part()
            self.dismantle_unless_used()
        await self._inside.finish()

    async def _close_there(self, loop: asyncio.AbstractEventLoop) -> None:
        """Close on the loop that the end belongs to, which another thread runs; here if that ends before."""
        done: Future[None] = Future()
        finishing: list[asyncio.Task[None]] = []

        async def finish() -> None:
            await self._close_here()

        def close() -> None:
            try:
                self._begin()
                lingers = not self._parted and self._inside.lingers()
                if not lingers:
                    self._part()
                    self.dismantle_unless_used()
                # That is all, as a rule; a task might be forgotten where the loop ends now.
                if not lingers and self._inside.finished():
                    done.set_result(None)
                else:
                    finishing.append(loop.create_task(finish()))
                    finishing[0].add_done_callback(lambda _: done.set_result(None))
            except Exception as error:
                done.set_exception(error)

        try:
            loop.call_soon_threadsafe(close)
        except RuntimeError:  # it is closed by now
            await self._close_here()
            return
        waiting = asyncio.wrap_future(done)
        while not done.done() and loop.is_running():
            await asyncio.wait({waiting}, timeout=LOOP_POLL_S)
        if done.done():
            done.result()
        else:
            await self._close_here()

    def discard(self) -> None:
        """Close an end that nobody has used, outside of any loop."""
        if self._inherited:
            self.begun = True
            return
        self._begin()
        self._part()
        self.dismantle_unless_used()

    def _begin(self) -> None:
        if not self.begun:
            self.begun = True
            self._state.refuse_closed()

    def _part(self) -> None:
        if not self._parted:
            self._parted = True
            self._inside.say_goodbye()

    def dismantle_unless_used(self) -> None:
        """Release everything, if the goodbye was said and no call is waiting."""
        if self._parted and not self.dismantled and not self._state.lock.calls:
            self.last_stats = self._inside.stats()
            self.dismantled = True
            self._take_apart()

    def _take_apart(self) -> None:
        if self._state.poller is not None:
            self._state.poller.close()
        self._inside.close()

    def detach_after_fork(self) -> None:
        """Refuse every call in a forked child, and let the parent's end go on."""
        self._inherited = True
        if not self.dismantled:
            self._state.forbid()
            self.last_stats = self._inside.stats()
            self.dismantled = True
            self._inside.detach_after_fork()

    def __del__(self) -> None:
        if getattr(self, "dismantled", True):
            return
        try:
            warn_not_closed(self._state, "use `async with`, or await aclose()")
        finally:  # the warning may be an error
            self.dismantled = True
            self._take_apart()
