"""Is the next message so close that spinning for it is cheaper than sleeping? Arithmetic only: no clock, no loop.

A sleep costs a kernel wake-up, tens of microseconds on virtual machines; a spin costs the core for as long as it
lasts. So an end spins while messages come faster than about two wake-ups apart, and parks otherwise. Two ends that
answer each other and both park see each other two wake-ups apart for ever, although spinning they would be far
closer: so the first waits always try a spin, only spins that keep failing switch it off, and even then a few go on.
"""

from __future__ import annotations

WAKE_UP_NS = 80_000
"""About what one kernel wake-up of another process costs."""

SPIN_NS = 2 * WAKE_UP_NS + 40_000
"""One spin at most: long enough to outlast a parked peer that wakes and answers at once."""

STREAM_GAP_NS = 20_000
"""Messages closer than this are a stream that fills or empties the ring as fast as its ends can."""

STREAM_SPIN_NS = 2_000_000
"""One spin at most in a stream.

Linux tends to wake a task on its waker's CPU, and two ends that sleep by turns then share it for ever, at half the
speed, beside an idle one. While both stay runnable, the next scheduler tick or two (1 to 4 ms each) move one of them.
"""

HOT_GAP_NS = 4 * WAKE_UP_NS
"""Messages further apart than this are not worth a spin."""

FAILURES = 3
"""After so many spins in vain in a row, waits park."""

PROBE = 64
"""Every so many waits one spins whatever is expected, or two ends that park would never find out how close they are."""

_WEIGHT = 0.25  # of the newest gap in the running mean


class Predictor:
    """Decides for one end, wait by wait, how long to spin before parking.

    Args:
        may_spin: False where spinning would take the core from the other end: a single CPU, or more ends than CPUs.
    """

    def __init__(self, *, may_spin: bool) -> None:
        self._may_spin = may_spin
        self._gap_ns = 0.0
        self._count = 0
        self._at_ns = 0
        self._failures = 0
        self._waits = 0

    def budget_ns(self, count: int, at_ns: int) -> int:
        """Return how long this wait should spin, in nanoseconds; 0 parks at once.

        Args:
            count: Messages that have passed so far.
            at_ns: When the latest of them was published (CLOCK_MONOTONIC, from its slot).
        """
        if not self._may_spin:
            return 0
        passed = count - self._count
        if passed > 0:
            if self._count:
                # Clipped: one pause says no more than that this one message was late.
                gap = min((at_ns - self._at_ns) / passed, 2 * HOT_GAP_NS)
                self._gap_ns += _WEIGHT * (gap - self._gap_ns)
                if gap < HOT_GAP_NS / 4:  # a burst has begun: follow at once, a stale mean would park through it
                    self._gap_ns = min(self._gap_ns, gap)
                    self._failures = 0
            self._count, self._at_ns = count, at_ns
        self._waits += 1
        promising = self._gap_ns <= HOT_GAP_NS and self._failures < FAILURES
        if promising:
            return STREAM_SPIN_NS if self._gap_ns < STREAM_GAP_NS else SPIN_NS
        return SPIN_NS if self._waits % PROBE == 0 else 0

    def spun(self, hit: bool) -> None:
        """Learn whether the spin that `budget_ns` granted ended with a message."""
        self._failures = 0 if hit else self._failures + 1
