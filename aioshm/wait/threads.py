"""Waiting for a ring in the calling thread: the policy of `Poller`, with poll(2) to sleep.

A coroutine that awaits only a `ThreadPoller` never suspends: one ``send(None)`` runs it until it
returns. The queue end belongs to the background loop, which holds `process_lock` while it
runs callbacks; a waiting thread acquires that lock each time it polls the ring.
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

from aioshm.config import Wait
from aioshm.lifeline.bell import Bell
from aioshm.process.limits import naming_limits
from aioshm.process.loop_thread import process_lock
from aioshm.ring.cores import memory_fence
from aioshm.wait.poller import Flags, Poller, Waiting
from aioshm.wait.predictor import NAPS, Predictor
from aioshm.wait.stall import Stall
from aioshm.wait.timerfd import HAVE_TIMERFD, timerfd_create, timerfd_settime

CANCEL_POLL_S = 0.02
"""How often a wait polls a ``cancel`` event: setting the event wakes no descriptor."""


class ThreadPoller(Poller):
    """Waits for one ring end, or for several, in the calling thread or on the loop."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        parked: Flags,
        predictor: Predictor,
        mode: Wait,
        spin: Callable[[int], bool],
        bells: Sequence[Bell],
        wake_peers: Callable[[], object],
        told: Callable[[], Sequence[int]] | None = None,
        tell: Callable[[Sequence[int]], None] | None = None,
    ) -> None:
        super().__init__(loop, parked, predictor, mode, spin, told, tell, crowded=predictor.crowded)
        self._bells = bells
        self._wake_peers = wake_peers
        self._here = False  # whether the wait is in a calling thread, not on the loop
        self._asleep = False
        self._poll: select.poll | None = None
        self._stop = (-1, -1)  # a pipe: `wake` writes to it to wake the sleeping thread
        self._timer = -1
        if self.crowded:
            self._first_slice_ns = 0
            self.inline_spin_ns = 0

    def wake(self) -> None:
        if self._asleep and self._stop[1] >= 0:
            with suppress(BlockingIOError):  # the pipe is full: the thread wakes anyway
                os.write(self._stop[1], b"\0")
        super().wake()

    def close(self) -> None:
        super().close()
        self._poll = None
        for fd in (*self._stop, self._timer):
            if fd >= 0:
                os.close(fd)
        self._stop, self._timer = (-1, -1), -1

    async def wait(
        self,
        look: Callable[[], object],
        count: int,
        at_ns: int,
        *,
        deadline: float | None = None,
        cancel: asyncio.Event | None = None,
        stall: Stall | None = None,
    ) -> bool:
        self._wake_peers()
        me = get_ident()
        if asyncio._get_running_loop() is not None:
            return await self._wait_on_loop(look, count, at_ns, deadline, cancel, stall)
        self._here = True
        try:
            process_lock.owner = process_lock.next_owner
            if process_lock.waiting:
                process_lock.wake()
            return await super().wait(
                lambda: _looked(look, me), count, at_ns, deadline=deadline, cancel=cancel, stall=stall
            )
        finally:
            self._here = False
            process_lock.acquire(me)

    async def _wait_on_loop(
        self,
        look: Callable[[], object],
        count: int,
        at_ns: int,
        deadline: float | None,
        cancel: asyncio.Event | None,
        stall: Stall | None,
    ) -> bool:
        for bell in self._bells:
            self._loop.add_reader(bell.fd, self._rung, bell)
        try:
            return await super().wait(look, count, at_ns, deadline=deadline, cancel=cancel, stall=stall)
        finally:
            for bell in self._bells:
                self._loop.remove_reader(bell.fd)

    def _rung(self, bell: Bell) -> None:
        bell.drain()
        self.wake()

    async def _between_slices(self, now_ns: int) -> int:
        return self._first_slice_ns if self._here else await super()._between_slices(now_ns)

    async def _nap(self, wait: Waiting, nap_ns: int) -> bool:
        if not self._here:
            return await super()._nap(wait, nap_ns)
        for _ in range(NAPS):
            self.stats.naps += 1
            time.sleep(nap_ns / 1e9)  # noqa: ASYNC251 - there is no loop in this thread
            if wait.look():
                return True
            wait.check(monotonic())
            nap_ns *= 2
        return False

    async def _sleep(self, wait: Waiting, until_ns: int = 0) -> bool:
        if not self._here:
            return await super()._sleep(wait, until_ns)
        poll = self._poll or self._new_poll()
        if until_ns and self._timer >= 0:
            timerfd_settime(self._timer, until_ns)
        slept = 0.0
        try:
            while True:
                if until_ns and monotonic_ns() >= until_ns:
                    return False
                self._asleep = True
                self._parked[0] = 1
                memory_fence()
                if wait.look():
                    if slept:
                        self._slept = int(slept * 1e9), monotonic_ns()
                    return True
                now = monotonic()
                wait.check(now)
                self.stats.parks += 1
                slept = now
                for fd, _ in poll.poll(self._timeout_ms(wait, now, until_ns)):
                    self._drain(fd)
        finally:
            self._parked[0] = 0
            self._asleep = False

    def _new_poll(self) -> select.poll:
        with naming_limits("a call that blocks"):
            if self._stop[0] < 0:
                self._stop = os.pipe()
                for fd in self._stop:
                    os.set_blocking(fd, False)
            if self._timer < 0 and HAVE_TIMERFD:
                with suppress(OSError):  # poll's own timeout replaces it, precise to a millisecond
                    self._timer = timerfd_create()
        poll = select.poll()
        for fd in (self._stop[0], self._timer, *(bell.fd for bell in self._bells)):
            if fd >= 0:
                poll.register(fd, select.POLLIN)
        self._poll = poll
        return poll

    def _timeout_ms(self, wait: Waiting, now: float, until_ns: int) -> float | None:
        due = wait.due(now)
        if wait.cancel is not None:
            due = now + CANCEL_POLL_S if due is None else min(due, now + CANCEL_POLL_S)
        if until_ns and self._timer < 0:
            due = until_ns / 1e9 if due is None else min(due, until_ns / 1e9)
        return None if due is None else max(0.0, due - now) * 1000

    def _drain(self, fd: int) -> None:
        if fd == self._stop[0]:
            with suppress(BlockingIOError):
                os.read(fd, 64)
        elif fd == self._timer:
            timerfd_settime(fd, 0)
        else:
            for bell in self._bells:
                if bell.fd == fd:
                    bell.drain()


def _looked(look: Callable[[], object], me: int) -> object:
    process_lock.acquire(me)
    try:
        return look()
    finally:
        process_lock.owner = process_lock.next_owner
        if process_lock.waiting:
            process_lock.wake()
