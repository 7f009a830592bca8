"""One end that waits, stripped of everything but what a poller needs."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from loops import WatchedLoop, until

from aioshm.config import Wait
from aioshm.ring import memory_fence
from aioshm.wait.poller import Poller
from aioshm.wait.predictor import Predictor

MODES: list[Wait] = ["adaptive", "spin", "park"]


class End:
    """One end: a flag for what is waited for, a parked flag, a poller and the loop that it sees."""

    def __init__(self, mode: Wait = "park", *, may_spin: bool = True) -> None:
        self.ready = False
        self.looks = 0
        self.parked = bytearray(1)
        self.loop = WatchedLoop()
        self.predictor = Predictor(may_spin=may_spin)
        self.poller = Poller(self.loop, memoryview(self.parked), self.predictor, mode)  # type: ignore[arg-type]

    def look(self) -> bool:
        self.looks += 1
        return self.ready

    def wait(self, **kwargs: Any) -> Coroutine[Any, Any, bool]:
        return self.poller.wait(kwargs.pop("look", self.look), 0, 0, **kwargs)

    async def asleep(self, **kwargs: Any) -> asyncio.Task[bool]:
        """Start a wait and return it once it has parked."""
        parks = self.poller.stats.parks
        task = asyncio.ensure_future(self.wait(**kwargs))
        await until(lambda: self.poller.stats.parks > parks or task.done(), "parking")
        assert self.parked[0] == 1
        return task

    def publish(self) -> None:
        """Do what the other end does: publish, fence, and wake this one if it is parked."""
        self.ready = True
        memory_fence()
        if self.parked[0]:
            self.poller.wake()
