"""Waits in the calling thread, with the policy of `Poller` and poll(2) to sleep.

The queue end belongs to the background loop, which holds `process_lock` while it runs callbacks. A waiting
thread acquires that lock each time it looks at the ring.
"""

from __future__ import annotations

import asyncio
import os
import select
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import get_ident
from time import monotonic, monotonic_ns
from typing import Any

from aioshm.lifeline.doorbell import Doorbell
from aioshm.process.limits import naming_limits
from aioshm.process.loop_thread import process_lock
from aioshm.ring.cores import memory_fence
from aioshm.wait.limits import Limits, Stall
from aioshm.wait.policy import Policy, Step, WaitMode
from aioshm.wait.poller import INLINE_SPIN_NS, Flag, Poller, WaitStats
from aioshm.wait.timer import open_timer, timerfd_settime

CANCEL_POLL_S = 0.02
"""How often a wait polls a ``cancel`` event: setting the event wakes no descriptor."""


class ThreadPoller:
    """Waits for one end of a ring, or for several, in the calling thread, or else on the loop.

    Args:
        loop, parked, policy, spin: As for `Poller`.
        doorbells: The doorbells of the ends.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        parked: Flag,
        policy: Policy,
        spin: Callable[[int], bool],
        doorbells: Sequence[Doorbell],
    ) -> None:
        self.policy: Policy = policy
        self._on_loop = Poller(loop, parked, policy, spin)
        self.stats: WaitStats = self._on_loop.stats
        self._loop = loop
        self._parked = parked
        self._spin_natively = spin
        self._doorbells = doorbells
        self._asleep = False
        self._slept = False
        self._poll: select.poll | None = None
        self._stop = (-1, -1)  # a pipe: `wake` writes to it to wake the sleeping thread
        self._timer = -1

    @property
    def inline_spin_ns(self) -> int:
        """How long a call should spin before it comes to `wait`."""
        return INLINE_SPIN_NS if self.policy.hot and not self.policy.crowded else 0

    def wake(self) -> None:
        """Make the sleeping wait look again. Call this on the loop's thread, any number of times."""
        if self._asleep and self._stop[1] >= 0:
            with suppress(BlockingIOError):  # the pipe is full: the thread wakes anyway
                os.write(self._stop[1], b"\0")
        self._on_loop.wake()

    def close(self) -> None:
        """Close the descriptors. Idempotent; no wait may be in progress."""
        self._on_loop.close()
        self._parked = bytearray(1)
        self._poll = None
        for fd in (*self._stop, self._timer):
            if fd >= 0:
                os.close(fd)
        self._stop = (-1, -1)
        self._timer = -1

    async def wait(
        self,
        look: Callable[[], object],
        count: int,
        at_ns: int,
        *,
        deadline: float | None = None,
        cancel: Any = None,
        stall: Stall | None = None,
    ) -> bool:
        """Wait as `Poller.wait`; in a thread without a running loop the coroutine never suspends."""
        if asyncio._get_running_loop() is None:
            self._wait_in_thread(look, count, at_ns, Limits(deadline, cancel, stall))
            return False
        for doorbell in self._doorbells:
            doorbell.watch(self._loop, self.wake)
        try:
            return await self._on_loop.wait(look, count, at_ns, deadline=deadline, cancel=cancel, stall=stall)
        finally:
            for doorbell in self._doorbells:
                doorbell.unwatch(self._loop)

    def _wait_in_thread(self, look: Callable[[], object], count: int, at_ns: int, limits: Limits) -> None:
        me = get_ident()
        policy = self.policy
        try:
            if look():
                return
            process_lock.owner = process_lock.next_owner
            if process_lock.waiting:
                process_lock.wake()
            step = policy.begin(count, at_ns, monotonic_ns())
            try:
                while not self._do(step, look, limits):
                    step = policy.missed(monotonic_ns())
            except BaseException:
                policy.stopped(monotonic_ns())
                raise
            policy.hit(monotonic_ns(), self._slept)
        finally:
            process_lock.acquire(me)

    def _do(self, step: Step, look: Callable[[], object], limits: Limits) -> bool:
        """Wait as a step says; return whether ``look()`` was true before its end."""
        self._slept = False
        if step.mode is WaitMode.SPIN or step.mode is WaitMode.WINDOW:
            return self._spin(look, limits, step.until_ns)
        if step.mode is WaitMode.NAP:
            self.stats.naps += 1
            time.sleep(max(0, step.until_ns - monotonic_ns()) / 1e9)
            if _looked(look):
                return True
            limits.check(monotonic())
            return False
        return self._sleep(look, limits, step.until_ns)

    def _spin(self, look: Callable[[], object], limits: Limits, until_ns: int) -> bool:
        spin = self._spin_natively
        slice_ns = 0 if self.policy.crowded else INLINE_SPIN_NS
        now_ns = monotonic_ns()
        while True:
            if _looked(look) or (slice_ns and now_ns < until_ns and spin(min(slice_ns, until_ns - now_ns))):
                return True
            now_ns = monotonic_ns()
            limits.check(now_ns / 1e9)
            if now_ns >= until_ns:
                return False
            os.sched_yield()  # the other end may be waiting for this very CPU
            now_ns = monotonic_ns()

    def _sleep(self, look: Callable[[], object], limits: Limits, until_ns: int) -> bool:
        """Sleep until a wake-up, or until a time if that is not 0."""
        poll = self._poll or self._new_poll()
        if until_ns and self._timer >= 0:
            timerfd_settime(self._timer, until_ns)
        try:
            while not until_ns or monotonic_ns() < until_ns:
                self._asleep = True
                self._parked[0] = 1
                memory_fence()
                if _looked(look):
                    return True
                now = monotonic()
                limits.check(now)
                self.stats.parks += 1
                self._slept = True
                for fd, _ in poll.poll(self._timeout_ms(limits, now, until_ns)):
                    self._drain(fd)
            return False
        finally:
            self._parked[0] = 0
            self._asleep = False

    def _new_poll(self) -> select.poll:
        with naming_limits("a call that blocks"):
            if self._stop[0] < 0:
                self._stop = os.pipe()
                for fd in self._stop:
                    os.set_blocking(fd, False)
            if self._timer < 0:
                self._timer = open_timer()  # else poll's own timeout, precise to a millisecond
        poll = select.poll()
        for fd in (self._stop[0], self._timer, *(doorbell.fd for doorbell in self._doorbells)):
            if fd >= 0:
                poll.register(fd, select.POLLIN)
        self._poll = poll
        return poll

    def _timeout_ms(self, limits: Limits, now: float, until_ns: int) -> float | None:
        at = limits.due_asleep(now)
        if limits.cancel is not None:
            at = now + CANCEL_POLL_S if at is None else min(at, now + CANCEL_POLL_S)
        if until_ns and self._timer < 0:
            at = until_ns / 1e9 if at is None else min(at, until_ns / 1e9)
        return None if at is None else max(0.0, at - now) * 1000

    def _drain(self, fd: int) -> None:
        if fd == self._stop[0]:
            with suppress(BlockingIOError):
                os.read(fd, 64)
        elif fd == self._timer:
            timerfd_settime(fd, 0)
        else:
            for doorbell in self._doorbells:
                if doorbell.fd == fd:
                    doorbell.drain()


def _looked(look: Callable[[], object]) -> object:
    """Look while this thread holds the process lock."""
    process_lock.acquire(get_ident())
    try:
        return look()
    finally:
        process_lock.owner = process_lock.next_owner
        if process_lock.waiting:
            process_lock.wake()
