"""Waits for a byte in shared memory to change, on an event loop or in a thread, step by step as the policy decides.

Parking cannot lose a wake-up: the end raises its parked flag, fences, and polls once more before it sleeps; the peer
publishes, fences, and then reads the flag. A wake-up is only a hint to poll again, as is the timer of an earlier
wait.
"""

from __future__ import annotations

import asyncio
import os
import select
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import get_ident
from time import monotonic, monotonic_ns
from typing import Any, Protocol

from aioshm.config import Options
from aioshm.lifeline.sockets import Doorbell
from aioshm.process.limits import naming_limits
from aioshm.process.loop_thread import process_lock
from aioshm.process.placement import usable_cpus
from aioshm.ring.cores import memory_fence
from aioshm.wait.limits import Limits, Stall
from aioshm.wait.policy import Policy, Step, WaitMode
from aioshm.wait.timer import Timer, open_timer, timerfd_settime, wake_up_cost

INLINE_SPIN_NS = 20_000
"""How long a spin holds the event loop before other tasks run."""

SHARED_SPIN_NS = 5_000
"""The same while other tasks have something to do."""

IDLE_LOOP_NS = 40_000
"""An iteration of the loop that was shorter found little to do but to poll its descriptors."""

CANCEL_POLL_S = 0.02
"""How often a thread polls a ``cancel`` event: setting the event wakes no descriptor."""


@dataclass(slots=True)
class WaitStats:
    """Counts of the naps and parks of an end so far."""

    naps: int = 0
    parks: int = 0


class Flag(Protocol):
    """A byte in memory."""

    def __setitem__(self, index: int, value: int, /) -> None: ...


class Poller:
    """Waits for one end of a ring, or for several that share a parked flag.

    With ``doorbells`` the end belongs to the background loop, and threads may wait, too: a thread without a running
    loop sleeps in poll(2). The loop holds `process_lock` while it runs callbacks; a waiting thread acquires that lock
    each time it polls the ring.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        parked: Flag,
        policy: Policy,
        spin: Callable[[int], bool],
        doorbells: Sequence[Doorbell] | None = None,
    ) -> None:
        self.policy: Policy = policy
        self.stats: WaitStats = WaitStats()
        self._loop = loop
        self.parked: Flag = parked
        self._spin_natively = spin
        self._doorbells = doorbells
        self._timer = Timer(loop, self.wake)
        self._sleeper: asyncio.Future[None] | None = None
        self._yielded = False
        self._slept = False
        # Of a waiting thread
        self._in_thread = False
        self._asleep = False
        self._poll: select.poll | None = None
        self._wake_pipe = (-1, -1)  # `wake` writes to it
        self._timer_fd = -1

    @property
    def inline_spin_ns(self) -> int:
        """How long a call should spin before it comes to `wait`."""
        if not self.policy.hot or (self._doorbells is not None and self.policy.crowded):
            return 0
        return INLINE_SPIN_NS

    def wake(self) -> None:
        """Make the sleeping wait poll again. Call this on the loop's thread, any number of times."""
        if self._asleep and self._wake_pipe[1] >= 0:
            with suppress(BlockingIOError):  # the pipe is full: the thread wakes anyway
                os.write(self._wake_pipe[1], b"\0")
        sleeper = self._sleeper
        if sleeper is not None and not sleeper.done():
            sleeper.set_result(None)

    def close(self) -> None:
        """Close the descriptors. Idempotent; no wait may be in progress, but on a loop that is closed."""
        self._timer.close()
        self.parked = bytearray(1)  # written to when such a wait is collected as garbage
        if self._loop.is_closed():
            self._sleeper = None
        self._poll = None
        for fd in (*self._wake_pipe, self._timer_fd):
            if fd >= 0:
                os.close(fd)
        self._wake_pipe = (-1, -1)
        self._timer_fd = -1

    async def wait(
        self,
        ready: Callable[[], object],
        count: int,
        at_ns: int,
        *,
        deadline: float | None = None,
        cancel: Any = None,
        stall: Stall | None = None,
    ) -> bool:
        """Wait until ``ready()`` is true; return whether other tasks have run meanwhile.

        So far there were ``count`` messages, the latest of ``at_ns``. Raises as `Limits.check`. In a thread without a
        running loop the coroutine never suspends.
        """
        limits = Limits(deadline, cancel, stall)
        if self._doorbells is None:
            return await self._wait(ready, count, at_ns, limits)
        if asyncio._get_running_loop() is not None:
            for doorbell in self._doorbells:
                doorbell.watch(self._loop, self.wake)
            try:
                return await self._wait(ready, count, at_ns, limits)
            finally:
                for doorbell in self._doorbells:
                    doorbell.unwatch(self._loop)
        me = get_ident()
        self._in_thread = True
        try:
            return await self._wait(lambda: _locked(ready), count, at_ns, limits)
        finally:
            self._in_thread = False
            process_lock.acquire(me)

    async def _wait(self, ready: Callable[[], object], count: int, at_ns: int, limits: Limits) -> bool:
        self._yielded = False
        if ready():
            return False
        policy = self.policy
        step = policy.begin(count, at_ns, monotonic_ns())
        try:
            while not await self._do(step, ready, limits):
                step = policy.missed(monotonic_ns())
        except BaseException:
            policy.stopped(monotonic_ns())
            raise
        finally:
            limits.close()
        policy.hit(monotonic_ns(), self._slept)
        return self._yielded

    async def _do(self, step: Step, ready: Callable[[], object], limits: Limits) -> bool:
        """Wait as a step says; return whether ``ready()`` was true before its end."""
        self._slept = False
        if step.mode is WaitMode.SPIN or step.mode is WaitMode.WINDOW:
            return await self._spin(ready, limits, step.until_ns)
        if step.mode is not WaitMode.NAP:
            return await self._sleep(ready, limits, step.until_ns)
        await self._nap(step.until_ns)
        if ready():
            return True
        limits.check(monotonic())
        return False

    async def _spin(self, ready: Callable[[], object], limits: Limits, until_ns: int) -> bool:
        spin = self._spin_natively
        slice_ns = INLINE_SPIN_NS
        if self._in_thread and self.policy.crowded:
            slice_ns = 0
        now_ns = monotonic_ns()
        while True:
            if ready() or (slice_ns and now_ns < until_ns and spin(min(slice_ns, until_ns - now_ns))):
                return True
            now_ns = monotonic_ns()
            limits.check(now_ns / 1e9)
            if now_ns >= until_ns:
                return False
            if not self._in_thread:
                self._yielded = True
                await asyncio.sleep(0)
                slice_ns = INLINE_SPIN_NS
                if monotonic_ns() - now_ns >= IDLE_LOOP_NS:
                    slice_ns = SHARED_SPIN_NS
            os.sched_yield()  # the peer may be waiting for this very CPU
            now_ns = monotonic_ns()

    async def _nap(self, until_ns: int) -> None:
        self.stats.naps += 1
        if self._in_thread:
            time.sleep(max(0, until_ns - monotonic_ns()) / 1e9)  # noqa: ASYNC251 -- no loop runs in this thread
            return
        self._timer.arm(until_ns)
        self._sleeper = self._loop.create_future()
        self._yielded = True
        try:
            await self._sleeper
        finally:
            self._sleeper = None

    async def _sleep(self, ready: Callable[[], object], limits: Limits, until_ns: int) -> bool:
        """Sleep until a wake-up, or until a time unless the time is 0."""
        if self._in_thread:
            self._open_poll()
        else:
            limits.watch(self._loop, self.wake)
        self._arm(until_ns)
        try:
            while not until_ns or monotonic_ns() < until_ns:
                if self._in_thread:
                    self._asleep = True
                else:
                    self._sleeper = self._loop.create_future()  # before the poll, after which a wake-up may come
                self.parked[0] = 1
                memory_fence()
                if ready():
                    return True
                now = monotonic()
                limits.check(now)
                self.stats.parks += 1
                self._slept = True
                if self._in_thread:
                    self._block(limits, now, until_ns)
                else:
                    await self._suspend(limits, now, until_ns)
            return False
        finally:
            self.parked[0] = 0
            self._asleep = False
            self._sleeper = None

    def _arm(self, until_ns: int) -> None:
        if not until_ns:
            return
        if not self._in_thread:
            self._timer.arm(until_ns)
        elif self._timer_fd >= 0:
            timerfd_settime(self._timer_fd, until_ns)

    async def _suspend(self, limits: Limits, now: float, until_ns: int) -> None:
        assert self._sleeper is not None
        at = limits.due_asleep(now)
        handle = None
        if at is not None and not (until_ns and at * 1e9 >= until_ns):  # else the timer comes first
            handle = self._loop.call_later(max(0.0, at - now), self.wake)
        self._yielded = True
        try:
            await self._sleeper
        finally:
            if handle is not None:
                handle.cancel()

    def _block(self, limits: Limits, now: float, until_ns: int) -> None:
        times = []
        due = limits.due_asleep(now)
        if due is not None:
            times.append(due)
        if limits.cancel is not None:
            times.append(now + CANCEL_POLL_S)
        if until_ns and self._timer_fd < 0:
            times.append(until_ns / 1e9)
        timeout_ms = None
        if times:
            timeout_ms = max(0.0, min(times) - now) * 1000
        assert self._poll is not None
        for fd, _ in self._poll.poll(timeout_ms):
            self._drain(fd)

    def _open_poll(self) -> None:
        if self._poll is not None:
            return
        assert self._doorbells is not None
        with naming_limits("a call that blocks"):
            if self._wake_pipe[0] < 0:
                self._wake_pipe = os.pipe()
                for fd in self._wake_pipe:
                    os.set_blocking(fd, False)
            if self._timer_fd < 0:
                self._timer_fd = open_timer()  # else poll's own timeout, precise to a millisecond
        poll = select.poll()
        for fd in (self._wake_pipe[0], self._timer_fd, *(doorbell.fd for doorbell in self._doorbells)):
            if fd >= 0:
                poll.register(fd, select.POLLIN)
        self._poll = poll

    def _drain(self, fd: int) -> None:
        assert self._doorbells is not None
        if fd == self._wake_pipe[0]:
            with suppress(BlockingIOError):
                os.read(fd, 64)
        elif fd == self._timer_fd:
            timerfd_settime(fd, 0)
        else:
            for doorbell in self._doorbells:
                if doorbell.fd == fd:
                    doorbell.drain()


def _locked(ready: Callable[[], object]) -> object:
    """Return ``ready()``, called with the process lock, which is free afterwards: also if this thread had the lock."""
    process_lock.acquire(get_ident())
    try:
        return ready()
    finally:
        process_lock.owner = process_lock.next_owner
        if process_lock.waiting:
            process_lock.wake()


def _apart(peers: Sequence[int]) -> bool:
    """Return whether no peer is in this process, where a spin would keep the loop, or the GIL, from the peer."""
    return os.getpid() not in peers


def policy_for(peers: Sequence[int], options: Options, *, in_threads: bool = False) -> Policy:
    """Return the policy of an end on the loop, or of threads; ``peers``: the pids of the peers, 0 where unknown."""
    apart = _apart(peers)
    own = os.getpid() if in_threads else 0  # the program's threads wait, not this thread, which is the loop's
    cpus = usable_cpus(own=own, pids=[pid for pid in peers if pid > 0])
    return Policy(
        may_spin=apart and cpus > 1,
        crowded=apart and 1 + len(peers) > cpus,
        in_threads=in_threads,
        max_spin_cpu=options.max_spin_cpu,
        mode=options.wait,
        cost=wake_up_cost,
    )
