"""One seed: its chance, its clock, its processes, and what must hold."""

from __future__ import annotations

import asyncio
import copy
import selectors
from collections.abc import Callable
from random import Random
from typing import Any

MAX_S = 600.0
"""Of virtual time in one seed: who waits longer, waits for ever."""


class Violation(Exception):
    """Something does not hold that must."""


class _Selector(selectors.SelectSelector):
    """Waits for nothing but time, which passes at once."""

    now = 1000.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Violation("nothing will ever happen any more, and somebody waits")
        self.now += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to what is due next."""

    def __init__(self) -> None:
        self.clock = _Selector()
        super().__init__(self.clock)

    def time(self) -> float:
        return self.clock.now


class World:
    """One seed."""

    def __init__(self, seed: int, *, traced: bool = False) -> None:
        self.seed = seed
        self.chance = Random(seed)
        self.loop = VirtualLoop()
        self.trace: list[str] = []
        self._traced = traced
        self._began = self.now
        self._violations: list[Violation] = []  # of all parts
        self.loop.set_exception_handler(self._failed)

    def part(self, name: str) -> World:
        """Return this world with a chance of its own: what one part draws changes nothing for the others."""
        part = copy.copy(self)
        part.chance = Random(f"{self.seed}/{name}")
        return part

    @property
    def now(self) -> float:
        """The time, in seconds."""
        return self.loop.clock.now

    @property
    def violation(self) -> Violation | None:
        """What was found first that does not hold, also where the code under test has caught it."""
        return self._violations[0] if self._violations else None

    def note(self, text: str) -> None:
        """Note what happens."""
        if self._traced:
            self.trace.append(f"{self.now - self._began:9.4f} {text}")

    def check(self, holds: object, text: str) -> None:
        """Raise unless something holds."""
        if not holds:
            self.note(f"VIOLATION: {text}")
            self._violations.append(Violation(text))
            raise self._violations[-1]

    def between(self, low: float, high: float) -> float:
        """Return a time between two."""
        return self.chance.uniform(low, high)

    def likely(self, share: float) -> bool:
        """Return True in this share of the cases."""
        return self.chance.random() < share

    async def until(self, holds: Callable[[], object], seconds: float, what: str) -> None:
        """Wait until something holds, which must be within so many seconds."""
        end = self.now + seconds
        while not holds():
            self.check(self.now < end, f"{what}: not within {seconds:g} s")
            await asyncio.sleep(0.05)

    def _failed(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Note what a callback has raised: the parts themselves have failed, or a check in them."""
        error = context.get("exception")
        if self.violation is None:
            text = f"{type(error).__name__}: {error}" if error is not None else str(context.get("message"))
            violation = Violation(f"a callback raised {text}")
            violation.__cause__ = error
            self._violations.append(violation)
            self.note(f"VIOLATION: {violation}")
        for task in asyncio.all_tasks(self.loop):
            task.cancel()


class Process:
    """A process that can be stopped, and can die.

    It has a loop of its own, which is the world's as long as it runs.
    """

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.alive, self.stopped = True, False
        self.loop: Any = ProcessLoop(self)
        self._later: list[Callable[[], object]] = []

    def does(self, what: Callable[[], object]) -> None:
        """Let it do something now, or when it goes on; nothing if it is dead."""
        if not self.alive:
            return
        if self.stopped:
            self._later.append(what)
        else:
            what()

    def stop(self) -> None:
        """Do nothing for now."""
        self.stopped = True

    def go_on(self) -> None:
        """Do what was to be done meanwhile, and go on."""
        self.stopped = False
        later, self._later = self._later, []
        for what in later:
            self.does(what)

    def die(self) -> None:
        """Do nothing any more."""
        self.alive = False


class ProcessLoop:
    """What a process' code has for its event loop."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self._loop = process.world.loop

    def time(self) -> float:
        return self._loop.time()

    def call_soon(self, callback: Callable[..., object], *args: Any) -> asyncio.Handle:
        return self._loop.call_soon(self.process.does, lambda: callback(*args))

    def call_later(self, delay: float, callback: Callable[..., object], *args: Any) -> asyncio.TimerHandle:
        def due() -> None:
            if not handle.cancelled():  # while the process was stopped
                callback(*args)

        handle: asyncio.TimerHandle = self._loop.call_later(delay, self.process.does, due)
        return handle

    def call_at(self, when: float, callback: Callable[..., object], *args: Any) -> asyncio.TimerHandle:
        return self.call_later(when - self.time(), callback, *args)

    def create_future(self) -> asyncio.Future[Any]:
        return self._loop.create_future()

    def is_closed(self) -> bool:
        return False
