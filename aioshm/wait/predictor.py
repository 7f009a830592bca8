"""Predicts the next message and chooses the cheapest way to wait. No clock, no loop.

A sleep costs a kernel wake-up; a spin costs the core for as long as it lasts. So, wait by wait:

* Messages less than about two wake-ups apart (hot): spin. The first waits always try a spin, since
  two parked ends that answer each other stay two wake-ups apart; only spins that keep failing
  switch it off, and a few continue.
* A steady rhythm: sleep until shortly before the next message, then spin.
* A stream, and more ends than CPUs: nap, so that one wake-up finds many messages.
* Early answers, and more ends than CPUs: spin, and yield the CPU after each look.
* Otherwise: park.

The predictor learns from the times at which messages were published.
"""

from __future__ import annotations

from math import inf

from msgspec.structs import replace

from aioshm.wait.costs import TYPICAL, Costs
from aioshm.wait.rhythm import PARK, Plan, Rhythm

STREAM_GAP_NS = 20_000
"""Messages closer than this are a stream that fills or empties the ring as fast as its ends can: Python's own speed."""

STREAM_SPIN_NS = 2_000_000
"""One spin at most in a stream.

Linux tends to wake a task on its waker's CPU, and two ends that sleep by turns then share it for ever, at half the
speed, beside an idle one. While both stay runnable, the next scheduler tick or two (1 to 4 ms each) move one of them.
"""

FAILURES = 3
"""After so many spins in vain in a row, waits park."""

ANSWER_SHARE = 4
"""A wait for an answer longer than one spin that yields is worth one where questions are so many times as far apart."""

PROBE = 64
"""Every so many waits one spins whatever is expected, or two ends that park would never find out how close they are."""

NAPS = 4
"""So many naps in vain end in parking."""

_WEIGHT = 0.25  # of the newest gap in the running mean
_STREAM = Plan(spin_ns=STREAM_SPIN_NS)


class Predictor:
    """Decides for one end, wait by wait, how it waits."""

    def __init__(
        self,
        *,
        may_spin: bool,
        crowded: bool = False,
        yields: bool = False,
        crowd: int = 0,
        max_spin_cpu: float = 0.10,
        costs: Costs = TYPICAL,
    ) -> None:
        # How many ends share the CPUs, if spins yield; 0: nothing spins there.
        self._crowd = crowd if crowded else 0
        self._spins = may_spin and (yields or not crowded or crowd > 0)
        # A spin yields its CPU after each look, as where calls block; it may last longer.
        self._yields = yields or self._crowd > 0
        self.crowded: bool = crowded
        self._rhythm = Rhythm(max_spin_cpu, costs) if self._spins and not self._crowd and max_spin_cpu > 0 else None
        self._gap_ns = 0.0
        self._period_ns = 0.0  # gap between messages, pauses included: believed slowly, doubted at once
        self._began_ns = 0  # when the first wait for the next message did
        self._waited_ns = inf  # running mean of such waits
        self._count = 0
        self._at_ns = 0
        self._failures = 0
        self._waits = 0
        # Whether the latest wait was worth a spin.
        self.hot: bool = False
        # Where nothing may spin or nap, every wait parks, whatever waking costs.
        self.weighs: bool = self._spins or self.crowded
        self.adjust(costs)

    def adjust(self, costs: Costs) -> None:
        """Use other costs from now on; keep what was learned from messages."""
        self.costs = costs
        yields = self._yields
        self._beat_gap_ns = costs.hot_gap_ns
        self._hot_gap_ns = costs.yielding_spin_ns if yields else costs.hot_gap_ns
        self._nap_gap_ns = STREAM_GAP_NS if yields else costs.nap_gap_ns
        self._spin = Plan(spin_ns=costs.yielding_spin_ns if yields else costs.spin_ns)
        self._nap = Plan(nap_ns=costs.nap_ns)
        self._least_patience_ns = costs.crowd_spin_ns(self._crowd) if self._crowd else costs.yielding_spin_ns
        self._longest_period_ns = ANSWER_SHARE * costs.answer_ns
        if self._rhythm is not None:
            self._rhythm.adjust(costs)

    def plan(self, count: int, at_ns: int, now_ns: int) -> Plan:
        """Plan the wait that begins now; the times are of CLOCK_MONOTONIC."""
        rhythm = self._rhythm
        passed = count - self._count
        if passed > 0:
            if self._count:
                since = at_ns - self._at_ns
                gap = since / passed
                if self._yields:
                    self._see_period(gap)
                # Clipped: one pause says no more than that this one message was late.
                gap = min(gap, 2 * self._hot_gap_ns)
                self._gap_ns += _WEIGHT * (gap - self._gap_ns)
                if gap < self._beat_gap_ns / 4:  # a burst has begun: follow at once, a stale mean would park through it
                    self._gap_ns = min(self._gap_ns, gap)
                    self._failures = 0
                if rhythm is not None and since > self._beat_gap_ns:
                    rhythm.beat(passed, count, self._at_ns, at_ns)
                if self._yields and passed == 1:
                    self._see_wait(at_ns - self._began_ns)
            self._count, self._at_ns, self._began_ns = count, at_ns, now_ns
        if self.crowded and 0 < self._gap_ns < self._nap_gap_ns and self._failures < FAILURES:
            return self._nap
        if not self._spins:
            return PARK
        self._waits += 1
        if self._yields and self._waited_ns <= self.patience_ns:
            self.hot = self._failures < FAILURES
            if self.hot or self._waits % PROBE == 0:
                return Plan(spin_ns=int(self.patience_ns))
        if self._crowd:
            self.hot = False
            return PARK if self._waits % PROBE else Plan(spin_ns=int(self.patience_ns))
        window = PARK
        if rhythm is not None and rhythm.best is not None:
            of_beat = count - rhythm.begun
            if of_beat <= 2 * rhythm.size:  # more is a stream that began meanwhile
                window = rhythm.window(now_ns)
                if of_beat == rhythm.size and window is not PARK:
                    self.hot = False
                    return window
        self.hot = self._gap_ns <= self._hot_gap_ns and self._failures < FAILURES
        if self.hot:
            if window is not PARK:
                return replace(window, spin_ns=self._spin.spin_ns)
            return _STREAM if self._gap_ns < STREAM_GAP_NS else self._spin
        if window is PARK and self._waits % PROBE == 0:
            return self._spin
        return window

    def _see_period(self, gap: float) -> None:
        longer = min(gap, self._longest_period_ns) - self._period_ns
        self._period_ns += _WEIGHT * longer if longer > 0 else longer

    def _see_wait(self, waited_ns: int) -> None:
        most = 2 * self.patience_ns
        mean = min(self._waited_ns, most)
        self._waited_ns = mean + _WEIGHT * (min(max(0, waited_ns), most) - mean)

    @property
    def patience_ns(self) -> float:
        """How long a wait for an answer may be, on average, to be worth a spin that hands its CPU on."""
        least = self._least_patience_ns
        return least if self._crowd else max(least, self._period_ns / ANSWER_SHARE)

    def spun(self, hit: bool) -> None:
        """Learn whether the spin or the naps that `plan` asked for ended with a message."""
        self._failures = 0 if hit else self._failures + 1
        if hit and self._crowd:  # both were parked before, which is what took so long
            self._waited_ns = min(self._waited_ns, self.patience_ns)

    def woke(self, late_ns: int) -> None:
        """Learn how much later than ``wake_at_ns`` this end woke, by its timer or before that by a message."""
        if self._rhythm is not None:
            self._rhythm.woke(late_ns)

    def watched(self, hit: bool, spent_ns: int) -> None:
        """Learn whether the message came within the window, and how long this end spun for it."""
        if self._rhythm is not None:
            self._rhythm.watched(hit, spent_ns)

    def after_miss(self, now_ns: int) -> Plan:
        """Return the next step of a wait after an empty window: another window, or `PARK`."""
        return PARK if self._rhythm is None else self._rhythm.after_miss(now_ns)
