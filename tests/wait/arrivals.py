"""Series of arrivals, and an end without a loop that waits for them as its policy decides."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import pytest

from aioshm.wait.policy import TYPICAL_WAKE_UP_NS, Policy, WaitMode, WakeUpCost

US = 1_000
MS = 1_000_000
START = 1_000_000_000
HANDLING_NS = 3 * US
"""What one message keeps the end from waiting for the next."""


@dataclass(frozen=True)
class Machine:
    """What waking costs on a machine, in nanoseconds."""

    wake_up_ns: int
    timer_late_ns: int

    @property
    def cost(self) -> WakeUpCost:
        return WakeUpCost(lambda: self.wake_up_ns)

    def policy(self, *, may_spin: bool = True, **options: Any) -> Policy:
        return Policy(may_spin=may_spin, cost=self.cost, **options)


QUICK_MACHINES = {
    "bare metal": Machine(wake_up_ns=5_000, timer_late_ns=46_000),
    "virtual machine": Machine(wake_up_ns=TYPICAL_WAKE_UP_NS, timer_late_ns=100_000),
}
"""Their timers are of use for periods of a millisecond."""

MACHINES = QUICK_MACHINES | {"crowded container": Machine(wake_up_ns=200_000, timer_late_ns=340_000)}
TYPICAL = MACHINES["virtual machine"]


def times(gaps: Iterable[float]) -> list[int]:
    """Return when messages come that are so far apart."""
    return [START + int(at) for at in accumulate(gaps)]


def jittered(period_ns: float, jitter: float, amount: int) -> list[float]:
    """Return gaps of a sender that waits for about as long after each message."""
    rng = random.Random(1)
    return [max(1.0, rng.gauss(period_ns, jitter * period_ns)) for _ in range(amount)]


def timers(machine: Machine) -> Iterator[int]:
    """Yield how late timers fire on a machine: on a virtual one 60 to 150 microseconds, now and then much more."""
    rng = random.Random(2)
    unit = machine.timer_late_ns / 100
    while True:
        yield int(rng.uniform(60 * unit, 110 * unit) + rng.expovariate(1 / (15 * unit)))


@dataclass
class Record:
    """What became of the messages, in order, and what waiting for them cost."""

    latency: list[int] = field(default_factory=list)
    caught: list[bool] = field(default_factory=list)
    windows: list[bool] = field(default_factory=list)
    spent: list[tuple[int, int]] = field(default_factory=list)  # (when a spin ended, how long it was)
    watched: list[tuple[int, int]] = field(default_factory=list)  # of these, the windows
    naps: int = 0
    wake_ups: int = 0
    elapsed: int = 1

    @property
    def spin_share(self) -> float:
        return sum(ns for _, ns in self.spent) / self.elapsed

    def hit_ratio(self, first: int = 0, last: int | None = None) -> float:
        """Return the share of messages that came while the end was looking."""
        part = self.caught[first:last]
        return sum(part) / len(part)

    def windows_tried(self, first: int = 0, last: int | None = None) -> int:
        return sum(self.windows[first:last])

    def highest_share(self, over_ns: int) -> float:
        """Return the share of the core that windows took in the worst stretch of so many nanoseconds."""
        highest = total = oldest = 0
        for at, ns in self.watched:
            total += ns
            while self.watched[oldest][0] <= at - over_ns:
                total -= self.watched[oldest][1]
                oldest += 1
            highest = max(highest, total)
        return highest / over_ns


def follow(machine: Machine, policy: Policy, arrivals: list[int]) -> Record:
    """Let one end wait for every message in turn."""
    late = timers(machine)
    record = Record(elapsed=arrivals[-1] - arrivals[0])
    now, taken, total = arrivals[0], 0, len(arrivals)
    while taken < total:
        if arrivals[taken] > now:
            tried = len(record.spent)
            now, caught = _wait(machine, policy, record, late, arrivals, taken, now)
            record.windows.append(len(record.spent) > tried)
            record.caught.append(caught)
        else:
            record.windows.append(False)
            record.caught.append(record.caught[-1] if record.caught else False)
        record.latency.append(now - arrivals[taken])
        taken += 1
        now += HANDLING_NS if taken == total or arrivals[taken] > now else US
    return record


def _wait(
    machine: Machine, policy: Policy, record: Record, late: Iterator[int], arrivals: list[int], taken: int, now: int
) -> tuple[int, bool]:
    """Return when the end has the next message, and whether it was looking when it came."""
    at = arrivals[taken]
    step = policy.begin(taken, arrivals[taken - 1] if taken else 0, now)
    while True:
        if step.mode in (WaitMode.SPIN, WaitMode.WINDOW):
            hit = at <= step.until_ns
            spent = max(0, min(at, step.until_ns) - now)
            now += spent
            record.spent.append((now, spent))
            if step.mode is WaitMode.WINDOW:
                record.watched.append((now, spent))
            if hit:
                policy.hit(now, woken=False)
                return now + US, True
        elif step.mode is WaitMode.NAP:
            now = step.until_ns + next(late)
            record.naps += 1
            record.wake_ups += 1
            if at <= now:
                policy.hit(now, woken=False)
                return now, False
        elif step.mode is WaitMode.SLEEP:
            fired = step.until_ns + next(late)
            record.wake_ups += 1
            woken_at = max(now, at) + machine.wake_up_ns
            now = min(fired, woken_at)
            if woken_at <= step.until_ns:
                policy.hit(now, woken=True)
                return now, False
            if at < fired:  # too late for the window, which the step then begins with the message there
                policy.missed(now)
                policy.hit(now, woken=True)
                return now, False
        else:
            record.wake_ups += 1
            now = max(now, at) + machine.wake_up_ns
            policy.hit(now, woken=True)
            return now, False
        step = policy.missed(now)


@pytest.fixture(params=MACHINES)
def machine(request: pytest.FixtureRequest) -> Machine:
    return MACHINES[request.param]


@pytest.fixture(params=QUICK_MACHINES)
def quick_machine(request: pytest.FixtureRequest) -> Machine:
    return MACHINES[request.param]
