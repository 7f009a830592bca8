"""The rhythm of an end's messages, learned from their times. Arithmetic only.

A beat is a message or a burst. A rhythm is a gap, or a repeating pattern of gaps, that predicts
the window of the next beat; spinning through windows is accounted for.
"""

from __future__ import annotations

from math import hypot

import msgspec

from aioshm.wait.costs import TYPICAL, Costs

MAX_PERIOD_NS = 2_000_000_000
"""A longer gap is a silence, not a period."""

MAX_LEAD_SPIN_NS = 2_000_000
"""No window begins earlier than this before the likeliest arrival: what it saves is one wake-up."""

MISSES = 2
"""After so many windows in vain in one wait, it parks."""

_LAGS = (1, 2, 3, 4)
_NEWEST = 0.0625  # weight of the newest beat in what gaps are expected, and in their deviations, at least
_TRUST = 0.35  # a share of surprises below which a rhythm is believed
_SURPRISED = 0.25  # weight of the newest beat in that share
_CHANCE = 0.25  # a correlation of errors below this may be chance, and acting on it would only add to them
_SETTLED, _SETTLED_SURPRISES = 64, 0.05  # beats as expected after which no other pattern is looked for
_FAR = 5.0  # mean deviations from the expectation that make a surprise, and `Costs.jitter_ns` at least
_UNSURE_NS = 1_000_000.0  # mean deviation of what has been seen once, at most
# A microsecond earlier costs a microsecond of spinning for every message; one later only for those that are late.
_EARLY, _LATE = 1.5, 3.5  # mean deviations before and after the likeliest arrival, and the jitter, make the window
_CORE = 0.525  # of its width: a window shrunk further would miss half of the messages
_ACCOUNT = 4.0  # periods whose share of spinning can be saved up
_MAX_LATE_NS = 1_000_000.0  # of one timer; more is a busy loop


class Plan(msgspec.Struct, frozen=True, gc=False):
    """The steps of one wait, in this order; zero: skipped."""

    spin_ns: int = 0
    # Sleep until then, unless woken, before the window.
    wake_at_ns: int = 0
    # The window's end.
    until_ns: int = 0
    nap_ns: int = 0


PARK = Plan()


class Lag:
    """Expects a gap to equal the gap some beats ago: a repeating pattern of that length."""

    __slots__ = (
        "_carry",
        "_deviations",
        "_error",
        "_gaps",
        "_index",
        "_odd",
        "_product",
        "_seen",
        "_square",
        "surprises",
    )

    def __init__(self, length: int) -> None:
        self._gaps = [0.0] * length
        self._deviations = [0.0] * length  # mean absolute errors, without surprises
        self._odd = [False] * length
        self._index = 0
        self._seen = 0
        self._error = self._product = self._square = 0.0
        self._carry = 0.0  # how much of the newest error the next gap is expected to have
        self.surprises: float = 1.0  # recent share of them

    @property
    def deviation(self) -> float:
        return self._deviations[self._index]

    def cost(self, gap: float) -> float:
        """Return about how far off it is on average; a surprise is off by about the mean gap."""
        return sum(self._deviations) / len(self._gaps) + self.surprises * gap

    @property
    def settled(self) -> bool:
        return self._seen >= _SETTLED and self.surprises < _SETTLED_SURPRISES

    def see(self, gap: float, jitter_ns: float) -> None:
        """Learn the newest gap."""
        index, length = self._index, len(self._gaps)
        self._index = index + 1 if index + 1 < length else 0
        expected, deviation = self._gaps[index], self._deviations[index]
        if not expected:
            self._gaps[index], self._deviations[index] = gap, min(gap / 8, _UNSURE_NS)
            return
        error = gap - expected
        off = abs(error - self._carry)
        if off > _FAR * deviation + jitter_ns:
            self.surprises += _SURPRISED * (1 - self.surprises)
            self._error = self._carry = 0.0
            if self._odd[index]:  # twice is a change, once may be a hiccup
                self._gaps[index] = gap
                self._deviations[index] = max(deviation, off / 16)
                self._seen = min(self._seen, 2 * length)
            self._odd[index] = not self._odd[index]
            return
        self._odd[index] = False
        self.surprises -= _SURPRISED * self.surprises
        if length == 1:
            self._product += (error * self._error - self._product) / 32
            self._square += (error * error - self._square) / 32
            self._error, self._carry = error, self._share_of_errors() * error
        self._seen += 1
        newest = max(_NEWEST, length / (self._seen + length))
        self._gaps[index] = expected + error * newest
        self._deviations[index] = deviation + (off - deviation) * newest

    def expected(self, ahead: int = 0) -> float:
        """Return the next gap, or a later one."""
        gap = self._gaps[(self._index + ahead) % len(self._gaps)]
        return gap if ahead else gap + self._carry

    def _share_of_errors(self) -> float:
        # A sender that keeps to a schedule is early after it was late, a drifting one is late again.
        if not self._square:
            return 0.0
        share = self._product / self._square
        return min(0.6, max(-0.6, share)) if abs(share) >= _CHANCE else 0.0


class Rhythm:
    """The beats of a stream, and the account of the CPU time that spinning for them costs."""

    def __init__(self, share: float, costs: Costs = TYPICAL) -> None:
        self._share = share
        self._lags = [Lag(length) for length in _LAGS]
        # None while messages are not steady.
        self.best: Lag | None = None
        self._gap = 0.0  # running mean
        self._beat_ns = 0  # when the latest one began
        self._saved = 0.0
        self._counted_ns = 0
        self._misses = 0
        self._woken = False  # so that it knows how late timers wake it
        self.size: int = 0
        self.begun: int = 0
        self.adjust(costs)

    def adjust(self, costs: Costs) -> None:
        """Use other costs from now on; a timer's, until one has woken this end."""
        self._jitter_ns = costs.jitter_ns
        if not self._woken:
            self._late, self._late_deviation = float(costs.timer_late_ns), 0.3 * costs.timer_late_ns

    def beat(self, passed: int, count: int, since_ns: int, at_ns: int) -> None:
        """Learn that a beat began ``passed`` messages after the last known one."""
        gap = float(at_ns - self._beat_ns)
        best = self.best
        if passed > 1 and best is not None:
            # This end was away, and several beats have passed; or they came as one burst.
            each = (at_ns - since_ns) / passed
            if abs(each - best.expected()) < _FAR * best.deviation + self._jitter_ns:
                gap, passed = each, 1
                self.begun = count - 2
        self.size = max(1, count - passed - self.begun)
        self.begun = count - passed
        began, self._beat_ns = self._beat_ns, at_ns
        self._misses = 0
        if not began:
            return
        if gap > MAX_PERIOD_NS:
            for lag in self._lags:
                lag.surprises = max(lag.surprises, 0.5)
            self.best = None
            return
        self._gap += (gap - self._gap) * (0.125 if self._gap else 1.0)
        plainest = self._lags[0]
        if best is plainest and plainest.settled:
            plainest.see(gap, self._jitter_ns)  # the others have had their chance
            return
        self.best, least = None, 0.0
        for lag in self._lags:
            lag.see(gap, self._jitter_ns)
            if lag.surprises < _TRUST:
                cost = lag.cost(self._gap)
                if self.best is None or cost < 0.7 * least:
                    self.best, least = lag, cost

    def window(self, now_ns: int) -> Plan:
        """Return when to wake and how long to spin for the next beat; `PARK` if that is not worth it."""
        best = self.best
        if best is None:
            return PARK
        afford = self._share * self._gap
        self._saved = min(_ACCOUNT * afford, self._saved + self._share * (now_ns - self._counted_ns))
        self._counted_ns = now_ns
        likeliest = self._beat_ns + best.expected()
        if self._misses:
            likeliest += sum(best.expected(ahead) for ahead in range(1, self._misses + 1))
        deviation = best.deviation * (1 + self._misses)
        wanted = hypot(_EARLY * deviation, 2 * self._late_deviation)
        early = min(wanted, afford, MAX_LEAD_SPIN_NS)
        if early < _CORE * wanted or self._saved < early:
            return PARK
        begin = likeliest - early - self._late
        end = likeliest + max(_LATE * deviation * early / wanted, self._jitter_ns)
        end = min(end, max(begin, now_ns) + self._saved)
        return Plan(0, max(1, int(begin)), int(end)) if end > now_ns else PARK

    def watched(self, hit: bool, spent_ns: int) -> None:
        self._saved -= spent_ns
        if not hit:
            self._misses += 1

    def after_miss(self, now_ns: int) -> Plan:
        if self._misses < MISSES:
            return self.window(now_ns)
        if self.best is not None:
            self.best.surprises = max(self.best.surprises, 0.5)
        self.best = None  # until messages are steady again
        return PARK

    def woke(self, late_ns: int) -> None:
        self._woken = True
        late = min(max(0.0, late_ns), _MAX_LATE_NS)
        self._late_deviation += (abs(late - self._late) - self._late_deviation) / 16
        self._late += (late - self._late) / 16
