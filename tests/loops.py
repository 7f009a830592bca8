"""Waiting in tests without losing the loop, and a loop whose timers can be counted."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any


async def turns(amount: int) -> None:
    """Let every other task have so many turns."""
    for _ in range(amount):
        await asyncio.sleep(0)


def open_fds() -> dict[str, str]:
    """Return this process' descriptors and what each of them is."""
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            found[fd] = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:  # the one that lists the directory
            continue
    return found


class WatchedLoop:
    """The running loop; what is asked of it goes on, and its timers are remembered."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.timers: list[asyncio.TimerHandle] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)

    def call_later(self, delay: float, callback: Callable[..., object], *args: Any) -> asyncio.TimerHandle:
        timer = self._loop.call_later(delay, callback, *args)
        self.timers.append(timer)
        return timer

    def pending(self) -> list[asyncio.TimerHandle]:
        """Return the timers that have neither been cancelled nor come due."""
        return [timer for timer in self.timers if not timer.cancelled() and timer.when() > self._loop.time()]
