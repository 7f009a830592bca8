"""Waiting where the event loop has nobody else to serve: in place, on the loop's own descriptors.

A call that blocks its thread runs its end's private loop, and that loop runs nothing but the call. So a wait need not
hand the loop back to let others run: it looks and lets other processes have the CPU, or sleeps in poll(2) on whatever
the loop would sleep on. Only where something else than the bell has come, the loop gets its turn.
"""

from __future__ import annotations

import asyncio
import heapq
import os
import selectors
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextvars import Context
from time import monotonic, monotonic_ns
from typing import Any, TypeVarTuple

from aioshm.config import Wait
from aioshm.lifeline.bell import Bell
from aioshm.ring.atomics import memory_fence
from aioshm.wait.apart import move_away
from aioshm.wait.poller import Flags, Poller, Waiting
from aioshm.wait.predictor import NAPS, Predictor

_Args = TypeVarTuple("_Args")

TURN_NS = 200_000
"""How long a spin goes on before the loop has its turn, in which it learns of a death or of Ctrl-C."""


NEVER_NS = 1 << 63


class WindowBegins(Exception):
    """A message is expected soon: the call is to leave its loop and to `BlockingPoller.watch` for it.

    Cold code is slow: after a sleep of some milliseconds, all that lies between a message and its receiver, the loop's
    end included, takes a tenth of one and more. What can be done before the message comes is done before.
    """


class BlockingLoop(asyncio.SelectorEventLoop):
    """A loop that can be slept for: it knows when its next timer is due, and what it would sleep on.

    Not uvloop: it starts and stops slower, and does nothing better here. And no epoll: a forked child, which shares it,
    would take its descriptors out of it for the parent, too.

    It keeps no weak set of its asynchronous generators: the set's callback runs in Python wherever one of them dies,
    and what a signal's handler raises in such a callback is lost.
    """

    def __init__(self) -> None:
        self._timers: list[float] = []
        self._polled = selectors.PollSelector()
        super().__init__(self._polled)

    def __del__(self) -> None:
        if not self.is_closed() and not self.is_running():
            self.close()  # without the warning of asyncio's: the end that it is of warns of the same

    def call_at(
        self, when: float, callback: Callable[[*_Args], object], *args: *_Args, context: Context | None = None
    ) -> asyncio.TimerHandle:
        heapq.heappush(self._timers, when)
        return super().call_at(when, callback, *args, context=context)

    def _asyncgen_firstiter_hook(self, agen: AsyncGenerator[Any, Any]) -> None: ...  # which asyncio's adds to the set

    @property
    def busy(self) -> bool:
        """Whether there is something that it would do at once."""
        return bool(self._ready)  # type: ignore[attr-defined]  # what all of asyncio's own loops have

    def due(self, now: float) -> float | None:
        """Return when the next timer is due, as far as that is not past; one that was cancelled counts too."""
        timers = self._timers
        while timers and timers[0] < now:
            heapq.heappop(timers)
        return timers[0] if timers else None

    def watched(self) -> list[tuple[int, int]]:
        """Return the descriptors that it watches, each with the events."""
        return [(key.fd, key.events) for key in self._polled.get_map().values()]

    def sleep(self, timeout: float | None) -> list[int]:
        """Block until one of the loop's descriptors is ready; return those that are."""
        return [key.fd for key, _ in self._polled.select(timeout)]


class BlockingPoller(Poller):
    """Waits for one end of a ring whose calls block.

    Args:
        loop: The end's private loop.
        parked, predictor, mode, spin: As `Poller`.
        bell: What the other end wakes this one by; None: something else that the loop knows of.
        crowded: Whether there are more ends than CPUs: a spin then hands its CPU on after each look.
        told, tell: As `Poller`.

    Attributes:
        leaves: Whether a wait whose window begins raises `WindowBegins` instead of spinning.
        watch_until_ns: When the window ends that the call has left its loop for; 0: there is none.
    """

    def __init__(
        self,
        loop: BlockingLoop,
        parked: Flags,
        predictor: Predictor,
        mode: Wait,
        spin: Callable[[int], bool],
        bell: Bell | None,
        *,
        crowded: bool,
        told: Callable[[], Sequence[int]] | None = None,
        tell: Callable[[Sequence[int]], None] | None = None,
    ) -> None:
        super().__init__(loop, parked, predictor, mode, spin, told, tell)
        self._private = loop
        self._bell = bell
        self._turned_ns = 0
        self.leaves = False
        self.watch_until_ns: int = 0
        self._due_ns = 0  # when this end was to be woken for its window
        self._missed = -1  # how many messages had passed when nothing came in a window
        self._count = 0
        if crowded:
            self._first_slice_ns = self.inline_spin_ns = 0

    async def _adapt(self, wait: Waiting, count: int, at_ns: int) -> None:
        self._count, missed, self._missed = count, self._missed, -1
        try:
            if missed == count:  # as if it had spun here
                await self._follow(wait, self._predictor.after_miss(monotonic_ns()))
            else:
                await super()._adapt(wait, count, at_ns)
        finally:
            costs, patience_ns = self._costs, int(self._predictor.patience_ns)  # longer where spins last longer
            self.linger_ns: int = costs.linger_ns + patience_ns - costs.yielding_spin_ns if self._predictor.hot else 0

    def _woken(self, due_ns: int) -> None:
        if self.leaves:
            self._due_ns = due_ns  # to be learned once the loop is left
        else:
            super()._woken(due_ns)

    async def _spin(self, wait: Waiting, until_ns: int, *, window: bool = False) -> bool:
        if window and self.leaves:
            self.watch_until_ns = until_ns
            raise WindowBegins
        return await super()._spin(wait, until_ns, window=window)

    def lingered(self, since_ns: int) -> None:
        """Learn that the call has looked for its message since then, and comes to wait for it now."""
        self._predictor.looked(since_ns)

    def watch(self, ready: Callable[[], object], until_ns: int) -> bool:
        """Spin through the window that the loop was left for; return whether what is waited for came.

        Args:
            ready: Looks for it.
            until_ns: When to stop, at the latest.
        """
        until_ns, self.watch_until_ns = min(until_ns, self.watch_until_ns), 0
        began = now = monotonic_ns()
        if self._due_ns:
            self._predictor.woke(began - self._due_ns)
            self._due_ns = 0
        self.stats.spins += 1
        self.stats.windows += 1
        slice_ns, spin = self._first_slice_ns, self._spin_natively
        apart = not slice_ns
        hit = False
        try:
            while not (hit := bool(ready())) and now < until_ns:
                if slice_ns and (hit := spin(min(slice_ns, until_ns - now))):
                    break
                turned = monotonic_ns()
                os.sched_yield()
                now = monotonic_ns()
                if not apart and now - turned > self._costs.shared_cpu_ns:
                    apart = True
                    move_away()
        finally:
            if hit:
                self._unpaid = (began, began, max(began, now) + slice_ns, True)
                self.stats.hits += 1
                self.stats.window_hits += 1
            else:
                self._pay(True, now >= until_ns, now - began)
                self._missed = self._count
        return hit

    async def _between_slices(self, now_ns: int) -> int:
        if now_ns - self._turned_ns > TURN_NS:
            await self._turn()
            self._turned_ns = monotonic_ns()
        return self._first_slice_ns

    async def _nap(self, wait: Waiting, nap_ns: int) -> bool:
        for _ in range(NAPS):
            self.stats.naps += 1
            await asyncio.sleep(0)  # first of all what the loop has been asked to do
            time.sleep(nap_ns / 1e9)  # noqa: ASYNC251 - nobody else is on this loop
            if wait.look():
                return True
            wait.check(monotonic())
            nap_ns *= 2
        return False

    async def _sleep(self, wait: Waiting, until_ns: int = 0) -> bool:
        await asyncio.sleep(0)
        alarm = self._alarm
        if until_ns:
            alarm.arm(until_ns)
        bell = self._bell
        slept = 0.0
        try:
            while True:
                if until_ns and monotonic_ns() >= until_ns:
                    return False
                self._parked[0] = 1
                memory_fence()
                if wait.look():
                    if slept:
                        self._slept = int(slept * 1e9), monotonic_ns()
                    return True
                now = monotonic()
                wait.check(now)
                if self._private.busy:  # what was due has led to more that is
                    await asyncio.sleep(0)
                    continue
                self.stats.parks += 1
                slept = now
                ready = self._private.sleep(self._timeout(wait, now))
                others = not ready  # a timer
                for fd in ready:
                    if bell is not None and fd == bell.fd:
                        bell.drain()
                    elif fd == alarm.fd:
                        alarm.look()
                    else:
                        others = True
                if others:
                    await self._turn()
        finally:
            self._parked[0] = 0

    def _timeout(self, wait: Waiting, now: float) -> float | None:
        """Return for how long the loop may be slept for."""
        dues = [due for due in (wait.due(now), self._private.due(now)) if due is not None]
        return max(0.0, min(dues) - now) if dues else None

    async def _turn(self) -> None:
        """Let the loop do whatever there is to do."""
        self._yielded = True
        await asyncio.sleep(0)  # it finds what has come only after this task's next step
        await asyncio.sleep(0)
