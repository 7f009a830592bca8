"""What strikes: kills, stops, limits and full disks, one after the other at random."""

from __future__ import annotations

import os
import random
import resource
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from tools.campaign.sandbox import Sandbox
from tools.campaign.stage import Actor, Stage

PERIOD_S = 0.25
LONGEST_STOP_S, LONGEST_LIMIT_S, LONGEST_FULL_S = 2.5, 3.0, 1.5
WEIGHTS = {"kill": 50, "stop": 20, "descriptors": 10, "memory": 8, "disk": 4}
DESCENDANT, GROWN_S = 0.15, 6.0
"""How often it is a process that the service has started, of all strikes at processes, once it has had time to start:
what dies before everything is ready ends the startup, by name."""


class Faults:
    """Strikes when it is time, and takes back what has lasted long enough."""

    def __init__(self, stage: Stage, sandbox: Sandbox, chance: random.Random) -> None:
        self.done: Counter[str] = Counter()
        self.limited: set[int] = set()
        self._stage, self._sandbox, self._chance = stage, sandbox, chance
        self._next = time.monotonic() + PERIOD_S
        self._back: list[tuple[float, Callable[[], object]]] = []
        self._busy: set[int] = set()

    def work(self) -> None:
        """Do what is due."""
        now = time.monotonic()
        self._take_back(now)
        if now >= self._next:
            self._next = now + self._chance.expovariate(1 / PERIOD_S)
            what = self._chance.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
            getattr(self, f"_{what}")()

    def calm(self) -> None:
        """Take everything back now."""
        self._take_back(float("inf"))

    def _take_back(self, now: float) -> None:
        due = [entry for entry in self._back if entry[0] <= now]
        self._back = [entry for entry in self._back if entry[0] > now]
        for _, back in due:
            with suppress(OSError):
                back()

    def _later(self, longest: float, back: Callable[[], object]) -> None:
        self._back.append((time.monotonic() + self._chance.uniform(0.05, longest), back))

    def _victim(self) -> int | None:
        """Return a process, and note that it is struck."""
        living = [actor for actor in self._stage.actors if actor.pid and actor.weight]
        services = [actor for actor in living if actor.name == "service"]
        if services and services[0].since < time.monotonic() - GROWN_S and self._chance.random() < DESCENDANT:
            with suppress(psutil.Error, IndexError):
                found = psutil.Process(services[0].pid).children(recursive=True)
                return self._chance.choice([each.pid for each in found if _serves(each)])
            return None
        actor: Actor | None = self._chance.choices(living, [each.weight for each in living])[0] if living else None
        return actor.pid if actor else None

    def _kill(self) -> None:
        for _ in range(2 if self._chance.random() < 0.1 else 1):
            if (pid := self._victim()) is not None:
                self._send(pid, signal.SIGKILL, "killed")

    def _stop(self) -> None:
        if (pid := self._victim()) is not None:
            self._send(pid, signal.SIGSTOP, "stopped")
            self._later(LONGEST_STOP_S, lambda: os.kill(pid, signal.SIGCONT))

    def _send(self, pid: int, number: int, what: str) -> None:
        with suppress(OSError):
            os.kill(pid, number)
            self.done[what] += 1
            for actor in self._stage.actors:
                if actor.pid == pid and number == signal.SIGKILL:
                    actor.killed = True

    def _descriptors(self) -> None:
        if (pid := self._victim()) is not None:
            with suppress(OSError):
                self._limit(pid, resource.RLIMIT_NOFILE, len(os.listdir(f"/proc/{pid}/fd")) + self._chance.randrange(6))
                self.done["short of descriptors"] += 1

    def _memory(self) -> None:
        if (pid := self._victim()) is not None:
            with suppress(OSError):
                pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
                room = self._chance.choice((0, 1 << 20, 1 << 24, 1 << 26))
                self._limit(pid, resource.RLIMIT_AS, pages * resource.getpagesize() + room)
                self.done["short of memory"] += 1

    def _limit(self, pid: int, kind: int, most: int) -> None:
        if pid in self._busy:
            return
        _, hard = resource.prlimit(pid, kind)
        before = resource.prlimit(pid, kind, (most, hard))
        self._note_limited(pid)
        self._busy.add(pid)

        def lift() -> None:
            self._busy.discard(pid)
            resource.prlimit(pid, kind, before)

        self._later(LONGEST_LIMIT_S, lift)

    def _note_limited(self, pid: int) -> None:
        """Note a process, and the service whose descendant it is: they share a log."""
        self.limited.add(pid)
        with suppress(psutil.Error):
            self.limited.update(parent.pid for parent in psutil.Process(pid).parents())

    def _disk(self) -> None:
        if self._sandbox.whole:
            self._sandbox.fill()
            self.done["disks full"] += 1
            self._later(LONGEST_FULL_S, self._sandbox.clear)


def _serves(process: psutil.Process) -> bool:
    """Return whether this is an engine or a worker, and not what multiprocessing itself has started."""
    return "resource_tracker import main" not in " ".join(process.cmdline())
