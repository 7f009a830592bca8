"""One end that waits, stripped of everything but what a poller needs."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine, Iterator
from time import monotonic_ns
from typing import Any

import pytest
from loops import WatchedLoop, open_fds
from support import until

from aioshm.config import Wait
from aioshm.ring import memory_fence
from aioshm.wait.policy import PARK, Policy, Step, WaitMode
from aioshm.wait.poller import Poller


class NotingPoller(Poller):
    """Counts the steps of its waits by their modes."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.modes: Counter[WaitMode] = Counter()

    async def _do(self, step: Step, *args: Any) -> bool:
        self.modes[step.mode] += 1
        return await super()._do(step, *args)


class End:
    """One end: a flag for what is waited for, a parked flag, a poller and the loop that it sees."""

    def __init__(self, mode: Wait = "park") -> None:
        self.ready = False
        self.looks = 0
        self.parked = bytearray(1)
        self.loop = WatchedLoop()
        self.policy = Policy(may_spin=True, mode=mode)
        self.poller = NotingPoller(self.loop, memoryview(self.parked), self.policy, self.spin)  # type: ignore[arg-type]

    def look(self) -> bool:
        self.looks += 1
        return self.ready

    def spin(self, ns: int) -> bool:
        """Do what a ring's core does: look for at most so long, holding the loop."""
        assert 0 < ns <= 20_000
        end = monotonic_ns() + ns
        while not self.ready:
            if monotonic_ns() >= end:
                return False
        return True

    def wait(self, **kwargs: Any) -> Coroutine[Any, Any, bool]:
        return self.poller.wait(kwargs.pop("look", self.look), 0, 0, **kwargs)

    async def asleep(self, **kwargs: Any) -> asyncio.Task[bool]:
        """Start a wait and return it once it has parked."""
        parks = self.poller.stats.parks
        task = asyncio.ensure_future(self.wait(**kwargs))
        await until(lambda: self.poller.stats.parks > parks or task.done(), "parking")
        await asyncio.sleep(0)  # whatever it has started for that runs, too
        assert self.parked[0] == 1
        return task

    def publish(self) -> None:
        """Do what the other end does: publish, fence, and wake this one if it is parked."""
        self.ready = True
        memory_fence()
        if self.parked[0]:
            self.poller.wake()


@pytest.fixture(autouse=True)
def pollers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Close the pollers that a test makes; what they held must be gone then."""
    made: list[Poller] = []
    init = Poller.__init__

    def noted(self: Poller, *args: Any) -> None:
        made.append(self)
        init(self, *args)

    monkeypatch.setattr(Poller, "__init__", noted)
    before = _timers()
    yield
    for poller in made:
        poller.close()
    assert not _timers() - before


def _timers() -> set[str]:
    """Return the descriptors of this process' timers; other libraries may have some, too."""
    return {fd for fd, what in open_fds().items() if "timerfd" in what}


class Told(Policy):
    """Answers each wait with its list of steps, then parks; notes in ``learnt`` the outcomes that it is told."""

    def __init__(self, *waits: list[Step]) -> None:
        super().__init__(may_spin=True)
        self.waits = list(waits)
        self.steps: list[Step] = []
        self.learnt: list[tuple[Any, ...]] = []

    def begin(self, count: int, at_ns: int, now_ns: int) -> Step:
        assert abs(now_ns - monotonic_ns()) < 10**9
        self.learnt.append(("begin", count, at_ns))
        self.steps = self.waits.pop(0) if self.waits else []
        return self.steps.pop(0) if self.steps else PARK

    def missed(self, now_ns: int) -> Step:
        self.learnt.append(("missed",))
        return self.steps.pop(0) if self.steps else PARK

    def hit(self, now_ns: int, woken: bool) -> None:
        self.learnt.append(("hit", woken))

    def stopped(self, now_ns: int) -> None:
        self.learnt.append(("stopped",))
