"""Series of arrivals, and an end without a loop that waits for them as its predictor says."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate, cycle, islice
from typing import Any

import pytest

from aioshm.wait.costs import TYPICAL, Costs
from aioshm.wait.predictor import NAPS, Predictor
from aioshm.wait.rhythm import PARK

US = 1_000
MS = 1_000_000
START = 1_000_000_000
HANDLING_NS = 3 * US
"""What one message keeps the end from waiting for the next."""


CROWDED = "crowded container"
BETWEEN = "quick virtual machine"
"""What is true of the machines on either side of it is tried for this one in the slow lane."""

MACHINES = {
    "bare metal": Costs(wake_up_ns=5_000, timer_ns=3_000, yield_ns=300),
    BETWEEN: Costs(wake_up_ns=30_000, timer_ns=20_000, yield_ns=800),
    "virtual machine": TYPICAL,
    CROWDED: Costs(wake_up_ns=200_000, timer_ns=150_000, yield_ns=5_000),
}


def times(gaps: Iterable[float]) -> list[int]:
    """Return when messages come that are so far apart."""
    return [START + int(at) for at in accumulate(gaps)]


def jittered(period_ns: float, jitter: float, amount: int, seed: int = 1) -> list[float]:
    """Return gaps of a sender that waits for about as long after each message."""
    rng = random.Random(seed)
    return [max(1.0, rng.gauss(period_ns, jitter * period_ns)) for _ in range(amount)]


def repeated(pattern_ns: Iterable[float], jitter: float, amount: int, seed: int = 1) -> list[float]:
    """Return gaps that repeat a pattern, each of them jittered."""
    rng = random.Random(seed)
    return [max(1.0, gap * rng.gauss(1, jitter)) for gap in islice(cycle(pattern_ns), amount)]


def scheduled(period_ns: float, jitter_ns: float, amount: int, seed: int = 1) -> list[int]:
    """Return the times of a sender that keeps to a schedule: its delays do not add up."""
    rng = random.Random(seed)
    return sorted(START + int(number * period_ns + rng.gauss(0, jitter_ns)) for number in range(1, amount + 1))


def timers(costs: Costs = TYPICAL, seed: int = 2) -> Iterator[int]:
    """Yield how late timers fire on a machine: on a virtual one 60 to 150 microseconds, now and then much more."""
    rng = random.Random(seed)
    unit = costs.timer_late_ns / 100
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


def follow(predictor: Predictor, arrivals: list[int], late: Iterator[int] | None = None) -> Record:
    """Let one end wait for every message in turn; a wake-up by the other end takes as long as the predictor thinks."""
    late = late or timers(predictor.costs)
    record = Record(elapsed=arrivals[-1] - arrivals[0])
    now, taken, total = arrivals[0], 0, len(arrivals)
    while taken < total:
        if arrivals[taken] > now:
            tried = len(record.spent)
            now, caught = _wait(predictor, record, late, arrivals, taken, now)
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
    predictor: Predictor, record: Record, late: Iterator[int], arrivals: list[int], taken: int, now: int
) -> tuple[int, bool]:
    """Return when the end has the next message, and whether it was looking when it came."""
    at = arrivals[taken]
    plan = predictor.plan(taken, arrivals[taken - 1] if taken else 0, now)
    if plan.spin_ns:
        hit = at <= now + plan.spin_ns
        spent = min(plan.spin_ns, at - now)
        now += spent
        record.spent.append((now, spent))
        predictor.spun(hit)
        if hit:
            return now + US, True
    nap_ns = plan.nap_ns
    for _ in range(NAPS if nap_ns else 0):
        now += nap_ns + next(late)
        record.naps += 1
        record.wake_ups += 1
        if at <= now:
            predictor.spun(True)
            return now, False
        nap_ns *= 2
    if plan.nap_ns:
        predictor.spun(False)
    while plan is not PARK and plan.wake_at_ns:
        if plan.wake_at_ns > now:
            fired = plan.wake_at_ns + next(late)
            now = min(fired, at + predictor.costs.wake_up_ns)
            record.wake_ups += 1
            if now > plan.wake_at_ns:
                predictor.woke(now - plan.wake_at_ns)
            if at < fired:
                return now, False
        hit = at <= plan.until_ns
        spent = max(0, min(at, plan.until_ns) - now)
        now += spent
        record.spent.append((now, spent))
        record.watched.append((now, spent))
        predictor.watched(hit, spent)
        if hit:
            return now + US, True
        plan = predictor.after_miss(now)
    record.wake_ups += 1
    return max(now, at) + predictor.costs.wake_up_ns, False


def _each(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.slow) if name == BETWEEN else name for name in names]


@pytest.fixture(params=_each(MACHINES))
def machine(request: pytest.FixtureRequest) -> Costs:
    """Give each machine to the test in turn."""
    return MACHINES[request.param]


@pytest.fixture(params=_each(name for name in MACHINES if name != CROWDED))
def quick_machine(request: pytest.FixtureRequest) -> Costs:
    """Give each machine to the test in turn whose timers are of use for periods of a millisecond."""
    return MACHINES[request.param]
