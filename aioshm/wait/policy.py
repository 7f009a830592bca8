"""Decides how an end waits: spin, spin through a window before an expected message, nap, or park. No I/O, no clock.

A sleep costs a wake-up by the kernel; a spin costs the CPU for as long as it lasts. The policy learns from the times
at which messages were published, and chooses wait by wait:

* Messages less than about two wake-ups apart: spin. The first waits spin in any case: two ends that both park see
  messages two wake-ups apart, and would never learn how fast the peer is. After three failed spins in a row, waits
  park; one wait in 64 still spins.
* A steady period: sleep until shortly before the next message, then spin.
* A stream, and more ends than CPUs: nap, so that one wake-up finds many messages.
* Replies that arrive soon after a request: spin, and yield the CPU after each poll. Only threads do this, and ends that
  outnumber the CPUs.
* Otherwise: park.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from math import hypot, inf
from typing import Literal, TypeAlias

import msgspec

Mode: TypeAlias = Literal["adaptive", "spin", "park"]


TYPICAL_WAKE_UP_NS = 80_000
"""The cost of a wake-up on a virtual machine."""

WAKE_UP_BOUNDS_NS = (3_000, 200_000)
"""Bounds of the cost: below, ends would hardly ever spin; above, spins in vain would last too long."""

SHORT_SLEEP_NS = 2_000_000
"""After a longer sleep, caches and CPU are cold, so the wake-up is not used to learn the cost."""

LEAST_JITTER_NS = 15_000
"""The smallest usual delay of a process, on any machine."""

ANSWERING_NS = 40_000
"""About how long a peer that has been woken takes to receive, to work and to send."""

HOT_GAP_NS = 500_000
"""For messages further apart, an end never spins without yielding its CPU, whatever a wake-up costs."""

YIELDING_SPIN_NS = 1_000_000
"""The longest spin that yields the CPU after each poll, whatever a wake-up costs."""

STREAM_GAP_NS = 20_000
"""Messages closer than this are a stream that fills or drains the ring at full speed."""

STREAM_SPIN_NS = 2_000_000
"""The longest spin in a stream.

Linux tends to wake a task on its waker's CPU, and two ends that sleep by turns then share that CPU, at half the speed.
While both stay runnable, the next scheduler tick or two (1 to 4 ms each) move one of them.
"""

FAILURES = 3
"""After this many failed spins in a row, waits park."""

PROBE = 64
"""One wait in this many spins even after failures. Otherwise two parked ends never learn how fast both answer."""

NAPS = 4
"""After this many empty naps in a row, the end parks. Each nap is twice as long as the nap before."""

ANSWER_SHARE = 4
"""A reply that takes longer than one yielding spin is worth a spin if requests are this many times further apart."""

MAX_PERIOD_NS = 2_000_000_000
"""A longer gap is a silence, not a period."""

MAX_LEAD_NS = 2_000_000
"""No window begins earlier than this before the likeliest arrival: the window saves no more than one wake-up."""

MISSES = 2
"""After this many empty windows in one wait, the end parks."""

_NEWEST_GAP = 0.25  # weight of the newest gap in the running mean
_NEWEST_BEAT = 0.0625  # weight of the newest beat in the period and its deviation, at least
_NEWEST_SURPRISE = 0.25  # weight of the newest beat in the share of surprises
_STEADY = 0.35  # a period with fewer surprises is trusted
_FAR = 5.0  # a gap is a surprise if it is off by more than this many mean deviations plus the jitter
_UNSURE_NS = 1_000_000.0  # upper bound of the first estimate of the deviation
# Opening a window a microsecond earlier costs a microsecond of spinning for every message; closing it later costs only
# for late messages.
_EARLY, _LATE = 1.5, 3.5  # the window, in mean deviations before and after the likeliest arrival
_LEAST_SHARE = 0.525  # of the wanted lead (window start to likeliest arrival); less would miss half of the messages
_ACCOUNT = 4.0  # unused spinning time can be saved up for this many periods
_MAX_LATE_NS = 1_000_000.0  # a timer that is later shows only that the event loop was busy
_FOREVER_NS = 1 << 62


class WaitMode(Enum):
    """The ways to wait."""

    SPIN = "spin"
    WINDOW = "window"
    """Spin, around the time of an expected message."""
    NAP = "nap"
    """Sleep until a time, without wake-ups by the peer."""
    SLEEP = "sleep"
    """Sleep until a time, or until the peer wakes this end."""
    PARK = "park"
    """Sleep until the peer wakes this end."""


class Step(msgspec.Struct, frozen=True, gc=False):
    """One step of a wait."""

    mode: WaitMode
    until_ns: int = 0


PARK = Step(WaitMode.PARK)


class WakeUpCost:
    """The time from a publication until a parked end polls. Measured at first use, then learned from messages."""

    def __init__(self, measure: Callable[[], int] = lambda: TYPICAL_WAKE_UP_NS) -> None:
        self._measure = measure
        self._ns = 0.0

    @property
    def ns(self) -> float:
        """The cost in nanoseconds."""
        if not self._ns:
            self._ns = float(bounded(self._measure()))
        return self._ns

    def learn(self, late_ns: int) -> None:
        """Learn from one wake-up. The cost follows the median, so that no single wake-up moves it far."""
        if self._ns:
            self._ns = bounded(self._ns * (33 / 32 if late_ns > self._ns else 31 / 32))

    @property
    def spin_ns(self) -> float:
        """The longest spin that keeps its CPU: it outlasts a parked peer that wakes and answers."""
        return 2 * self.ns + ANSWERING_NS

    @property
    def hot_gap_ns(self) -> float:
        """The greatest gap between messages that is worth a spin: two wake-ups and two answers."""
        return min(HOT_GAP_NS, max(4 * self.ns, 2 * (self.ns + ANSWERING_NS)))

    @property
    def yielding_spin_ns(self) -> float:
        """The longest spin that yields its CPU: others can run meanwhile, so it may outlast a reply."""
        return min(YIELDING_SPIN_NS, 12.5 * self.ns)

    @property
    def jitter_ns(self) -> float:
        """The usual scheduling delay of a process; smaller deviations are no surprises."""
        return max(LEAST_JITTER_NS, self.ns / 4)


def bounded(wake_up_ns: float) -> float:
    """Clamp a measured cost to `WAKE_UP_BOUNDS_NS`; costs outside were measured on a busy machine."""
    least, most = WAKE_UP_BOUNDS_NS
    return min(max(wake_up_ns, least), most)


class Period:
    """The mean gap between beats and its mean deviation, without surprises (`_FAR`). A beat is a message or a burst."""

    def __init__(self) -> None:
        self.mean_ns: float = 0.0
        self.deviation_ns: float = 0.0
        # The recent share of surprises.
        self.surprises: float = 1.0
        self._seen = 0
        self._was_far = False

    @property
    def steady(self) -> bool:
        """Whether the recent share of surprises is below `_STEADY`."""
        return self.surprises < _STEADY

    def learn(self, gap_ns: float, jitter_ns: float) -> None:
        """Learn the newest gap."""
        if not self.mean_ns:
            self.mean_ns = gap_ns
            self.deviation_ns = min(gap_ns / 8, _UNSURE_NS)
            return
        error = gap_ns - self.mean_ns
        if abs(error) > _FAR * self.deviation_ns + jitter_ns:
            self.surprises += _NEWEST_SURPRISE * (1 - self.surprises)
            if self._was_far:  # twice is a change, once may be a hiccup
                self.mean_ns = gap_ns
                self.deviation_ns = max(self.deviation_ns, abs(error) / 16)
                self._seen = 0
            self._was_far = not self._was_far
            return
        self._was_far = False
        self.surprises -= _NEWEST_SURPRISE * self.surprises
        self._seen += 1
        weight = max(_NEWEST_BEAT, 1 / (self._seen + 1))
        self.mean_ns += error * weight
        self.deviation_ns += (abs(error) - self.deviation_ns) * weight

    def doubt(self) -> None:
        """Distrust the period until another beat confirms it."""
        self.surprises = max(self.surprises, 0.5)


class Policy:
    """Decides for one end, step by step; ``may_spin``: no peer needs the CPU or thread of this end.

    ``crowded``: there are more ends than CPUs. ``in_threads``: a thread waits, so a spin blocks no
    event loop. ``max_spin_cpu``: the share of a CPU that windows may use.
    """

    def __init__(
        self,
        *,
        may_spin: bool,
        crowded: bool = False,
        in_threads: bool = False,
        max_spin_cpu: float = 0.10,
        mode: Mode = "adaptive",
        cost: WakeUpCost | None = None,
    ) -> None:
        self.cost: WakeUpCost = cost or WakeUpCost()
        self.crowded: bool = crowded
        self._may_spin = may_spin
        # Whether spins yield the CPU after each look.
        self._yields = in_threads or crowded
        self._in_threads = in_threads
        self._share = max_spin_cpu if in_threads or not crowded else 0.0
        self._mode = mode
        # Whether the latest wait was worth a spin.
        self.hot: bool = mode == "spin"
        self._step = PARK
        self._step_began_ns = 0
        self._hit: tuple[Step, int, int, bool] | None = None
        # Messages
        self._count = 0
        self._at_ns = 0
        self._gap_ns = 0.0
        # Spins and naps
        self._failures = 0
        self._waits = 0
        self._nap_ns = 0.0
        # Answers
        self._began_ns = 0  # when the first wait for the next message began
        self._waited_ns = inf  # running mean of the time from there to the message
        self._between_ns = 0.0  # gap between messages, pauses included: rises slowly, falls immediately
        # Beats
        self._period = Period()
        self._beat_ns = 0
        self._beat_count = 0  # messages before the latest beat
        self._beat_size = 0
        self._misses = 0
        self._window_ends_ns = 0
        self._saved_ns = 0.0
        self._saved_at_ns = 0
        self._timers = 0  # number of timers that have woken this end
        self._late_ns = 0.0  # of timers, on average
        self._late_deviation_ns = 0.0

    # One wait

    def begin(self, count: int, at_ns: int, now_ns: int) -> Step:
        """Return the first step of a wait, after ``count`` messages, the latest of ``at_ns``."""
        if self._mode == "spin":
            return self._start(Step(WaitMode.SPIN, _FOREVER_NS), now_ns)
        if self._mode == "park" or not (self._may_spin or self.crowded):
            return PARK
        self._settle_hit(count, at_ns)
        if count > self._count:
            if self._count:
                self._learn(count, at_ns)
            self._count = count
            self._at_ns = at_ns
            self._began_ns = now_ns
        return self._start(self._choose(count, now_ns), now_ns)

    def missed(self, now_ns: int) -> Step:
        """Return the next step; the latest one ended without a message."""
        step = self._step
        if step.mode is WaitMode.NAP:
            self._nap_ns *= 2
            if self._nap_ns < self._first_nap_ns * 2**NAPS:
                return self._start(Step(WaitMode.NAP, now_ns + int(self._nap_ns)), now_ns)
            self._failures += 1
            return self._start(PARK, now_ns)
        if step.mode is WaitMode.SLEEP:
            self._learn_lateness(now_ns - step.until_ns)
            return self._start(Step(WaitMode.WINDOW, self._window_ends_ns), now_ns)
        if step.mode is WaitMode.WINDOW:
            self._saved_ns -= now_ns - self._step_began_ns
            self._misses += 1
            if self._misses >= MISSES:
                self._period.doubt()
                return self._start(PARK, now_ns)
        elif step.mode is WaitMode.SPIN:
            self._failures += 1
        return self._start(self._window(now_ns), now_ns)

    def hit(self, now_ns: int, woken: bool) -> None:
        """Note that the latest step ended with a message; ``woken``: the peer has woken this end for it."""
        self._hit = self._step, self._step_began_ns, now_ns, woken

    def stopped(self, now_ns: int) -> None:
        """Note the end of the wait without a message."""
        if self._step.mode is WaitMode.WINDOW:
            self._saved_ns -= now_ns - self._step_began_ns
        self._step = PARK

    def _start(self, step: Step, now_ns: int) -> Step:
        self._step = step
        self._step_began_ns = now_ns
        return step

    def _settle_hit(self, count: int, at_ns: int) -> None:
        """Learn from the step that ended with the latest message."""
        if self._hit is None:
            return
        step, began_ns, looked_ns, woken = self._hit
        self._hit = None
        if step.mode in (WaitMode.SPIN, WaitMode.NAP):
            self._failures = 0
            if step.mode is WaitMode.SPIN and self._yields:
                self._waited_ns = min(self._waited_ns, self._patience_ns)
        elif step.mode is WaitMode.WINDOW:
            self._saved_ns -= min(max(at_ns, began_ns), looked_ns) - began_ns
        elif woken and count == self._count + 1 and began_ns <= at_ns <= min(looked_ns, began_ns + SHORT_SLEEP_NS):
            self.cost.learn(looked_ns - at_ns)

    # Choosing

    def _choose(self, count: int, now_ns: int) -> Step:
        cost = self.cost
        nap_gap_ns = STREAM_GAP_NS if self._yields else cost.ns
        if self.crowded and 0 < self._gap_ns < nap_gap_ns and self._failures < FAILURES:
            self._nap_ns = self._first_nap_ns
            return Step(WaitMode.NAP, now_ns + int(self._nap_ns))
        self._waits += 1
        if not self._may_spin:
            return PARK
        probe = self._waits % PROBE == 0
        confident = self._failures < FAILURES
        if self._yields and self._waited_ns <= self._patience_ns:
            self.hot = confident
            if confident or probe:
                return Step(WaitMode.SPIN, now_ns + int(self._patience_ns))
        of_beat = count - self._beat_count
        if of_beat == self._beat_size and (window := self._window(now_ns)) is not PARK:
            self.hot = False
            return window
        self.hot = self._gap_ns <= self._hot_gap_ns and confident
        if self.hot or probe:
            spin_ns = self._yielding_spin_ns if self._yields else cost.spin_ns
            if self.hot and not self._yields and self._gap_ns < STREAM_GAP_NS:
                spin_ns = STREAM_SPIN_NS
            return Step(WaitMode.SPIN, now_ns + int(spin_ns))
        return self._window(now_ns)

    @property
    def _first_nap_ns(self) -> float:
        return self.cost.ns * 5 / 8

    @property
    def _hot_gap_ns(self) -> float:
        return self._yielding_spin_ns if self._yields else self.cost.hot_gap_ns

    @property
    def _yielding_spin_ns(self) -> float:
        return self.cost.yielding_spin_ns if self._in_threads else self.cost.hot_gap_ns

    @property
    def _patience_ns(self) -> float:
        """The longest mean wait for a reply that is worth a yielding spin."""
        if not self._in_threads:
            return self._yielding_spin_ns
        return max(self._yielding_spin_ns, self._between_ns / ANSWER_SHARE)

    def _window(self, now_ns: int) -> Step:
        """Return the sleep before the next window, or the window if it has begun; `PARK` if neither is worth it."""
        period = self._period
        if not period.steady or self._share <= 0 or self._count - self._beat_count > 2 * self._beat_size:
            return PARK
        afford_ns = self._share * period.mean_ns
        self._saved_ns += self._share * (now_ns - self._saved_at_ns)
        self._saved_ns = min(self._saved_ns, _ACCOUNT * afford_ns)
        self._saved_at_ns = now_ns
        late_ns = self._late_ns if self._timers else self.cost.ns
        late_deviation_ns = self._late_deviation_ns if self._timers else 0.3 * late_ns
        missed = 1 + self._misses
        likeliest_ns = self._beat_ns + missed * period.mean_ns
        wanted_ns = hypot(_EARLY * missed * period.deviation_ns, 2 * late_deviation_ns)
        lead_ns = min(wanted_ns, afford_ns, MAX_LEAD_NS)
        if lead_ns < _LEAST_SHARE * wanted_ns or self._saved_ns < lead_ns:
            return PARK
        begins_ns = max(1, int(likeliest_ns - lead_ns - late_ns))
        shrunk = lead_ns / wanted_ns if wanted_ns else 1.0
        ends_ns = likeliest_ns + max(_LATE * missed * period.deviation_ns * shrunk, self.cost.jitter_ns)
        ends_ns = min(ends_ns, max(begins_ns, now_ns) + self._saved_ns)
        if ends_ns <= now_ns:
            return PARK
        self._window_ends_ns = int(ends_ns)
        if begins_ns > now_ns:
            return Step(WaitMode.SLEEP, begins_ns)
        return Step(WaitMode.WINDOW, self._window_ends_ns)

    # Learning

    def _learn(self, count: int, at_ns: int) -> None:
        """Learn the times of the messages since the latest wait."""
        passed = count - self._count
        since_ns = at_ns - self._at_ns
        gap_ns = since_ns / passed
        beat_gap_ns = self.cost.hot_gap_ns
        if self._yields:
            self._learn_answer(gap_ns, at_ns - self._began_ns, passed)
        # Clipped: a single pause shows no more than one late message.
        clipped_ns = min(gap_ns, 2 * self._hot_gap_ns)
        self._gap_ns += _NEWEST_GAP * (clipped_ns - self._gap_ns)
        if gap_ns < beat_gap_ns / 4:  # a burst has begun; with the old mean the end would park during the burst
            self._gap_ns = min(self._gap_ns, gap_ns)
            self._failures = 0
        if since_ns > beat_gap_ns:
            self._learn_beat(passed, count, at_ns)

    def _learn_answer(self, gap_ns: float, waited_ns: int, passed: int) -> None:
        longest_ns = 4 * ANSWER_SHARE * self._yielding_spin_ns
        longer_ns = min(gap_ns, longest_ns) - self._between_ns
        self._between_ns += _NEWEST_GAP * longer_ns if longer_ns > 0 else longer_ns
        if passed == 1:
            most_ns = 2 * self._patience_ns
            mean_ns = min(self._waited_ns, most_ns)
            self._waited_ns = mean_ns + _NEWEST_GAP * (min(max(0, waited_ns), most_ns) - mean_ns)

    def _learn_beat(self, passed: int, count: int, at_ns: int) -> None:
        """Learn that a beat began after the latest message that this end knew."""
        gap_ns = float(at_ns - self._beat_ns)
        each_ns = (at_ns - self._at_ns) / passed
        far_ns = _FAR * self._period.deviation_ns + self.cost.jitter_ns
        if passed > 1 and self._period.steady and abs(each_ns - self._period.mean_ns) < far_ns:
            gap_ns = each_ns  # this end was not waiting, and several beats have passed
            passed = 1
            self._beat_count = count - 2
        self._beat_size = max(1, count - passed - self._beat_count)
        self._beat_count = count - passed
        began_ns = self._beat_ns
        self._beat_ns = at_ns
        self._misses = 0
        if not began_ns:
            return
        if gap_ns > MAX_PERIOD_NS:
            self._period.doubt()
        else:
            self._period.learn(gap_ns, self.cost.jitter_ns)

    def _learn_lateness(self, late_ns: float) -> None:
        """Learn how late a timer wakes this end."""
        late_ns = min(max(0.0, late_ns), _MAX_LATE_NS)
        if not self._timers:
            self._late_ns = late_ns
            self._late_deviation_ns = 0.3 * late_ns
        self._timers += 1
        weight = max(_NEWEST_BEAT, 1 / (1 + self._timers))
        self._late_deviation_ns += (abs(late_ns - self._late_ns) - self._late_deviation_ns) * weight
        self._late_ns += (late_ns - self._late_ns) * weight
