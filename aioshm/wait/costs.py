"""The costs of waking on a machine, and the lengths of spins, naps and windows. Arithmetic only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields

LOOP_NS = 40_000
"""About what an event loop takes from the kernel's wake-up to the end's look, caches gone cold included."""

ANSWERING_NS = 40_000
"""About what a peer that has been woken takes to receive, to work and to send."""

HOT_GAP_NS = 500_000
"""Messages further apart are not worth a spin that keeps its CPU, however dear a wake-up is."""

YIELDING_SPIN_NS = 1_000_000
"""A spin that hands its CPU on after each look lasts no longer, however dear a wake-up is."""

WAKE_UP_BOUNDS_NS = (3_000, 200_000)
"""No wake-up counts as cheaper, or ends might hardly ever spin, nor as dearer, or spins in vain would last too long.

What goes beyond was measured while the machine was busy, or its clock is not to be trusted.
"""

TIMER_BOUNDS_NS = (1_000, 300_000)
YIELD_BOUNDS_NS = (100, 10_000)


@dataclass(frozen=True, slots=True)
class Costs:
    """A machine's figures, each in nanoseconds."""

    # From a message until the parked end looks, the event loop's turn included.
    wake_up_ns: int
    # How late a timer wakes a thread, without the loop.
    timer_ns: int
    # A `sched_yield` with nobody else to run.
    yield_ns: int

    def within_bounds(self) -> Costs:
        """Return these figures, or the bounds that they are beyond of."""
        return Costs(
            _between(self.wake_up_ns, WAKE_UP_BOUNDS_NS),
            _between(self.timer_ns, TIMER_BOUNDS_NS),
            _between(self.yield_ns, YIELD_BOUNDS_NS),
        )

    @classmethod
    def told(cls, figures: Sequence[int]) -> Costs | None:
        """Return another process' figures, in the order of the fields; None if unusable."""
        if len(figures) != len(fields(cls)):
            return None
        costs = cls(*figures)
        return costs if costs == costs.within_bounds() else None

    def to_tell(self) -> tuple[int, ...]:
        """Return the figures for `told`."""
        return astuple(self)

    @property
    def spin_ns(self) -> int:
        """One spin at most: long enough to outlast a parked peer that wakes and answers at once."""
        return 2 * self.wake_up_ns + ANSWERING_NS

    @property
    def hot_gap_ns(self) -> int:
        """The greatest gap between messages that is worth a spin: two wake-ups and two answers."""
        return min(HOT_GAP_NS, max(4 * self.wake_up_ns, 2 * (self.wake_up_ns + ANSWERING_NS)))

    @property
    def nap_gap_ns(self) -> int:
        """Where CPUs are short, messages closer than this are worth a nap."""
        return self.wake_up_ns

    @property
    def nap_ns(self) -> int:
        """The first nap; each empty nap doubles the next."""
        return self.wake_up_ns * 5 // 8

    @property
    def yielding_spin_ns(self) -> int:
        """One spin at most that hands its CPU on: it keeps nobody waiting, so it may outlast a whole answer."""
        return min(YIELDING_SPIN_NS, self.wake_up_ns * 25 // 2)

    @property
    def answer_ns(self) -> int:
        """The longest wait for an answer that is worth such a spin."""
        return 4 * self.yielding_spin_ns

    def crowd_spin_ns(self, ends: int) -> int:
        """The longest spin of ends that share fewer CPUs: each has a turn and answers."""
        return min(HOT_GAP_NS, 2 * self.wake_up_ns + ends * ANSWERING_NS)

    @property
    def jitter_ns(self) -> int:
        """The usual lateness of processes: no surprise in a rhythm, and a window's margin."""
        return self.wake_up_ns // 4

    @property
    def timer_late_ns(self) -> int:
        """How late a timer wakes an end that has not learned that yet: later after long sleeps than short ones."""
        return 2 * self.timer_ns + LOOP_NS

    @property
    def shared_cpu_ns(self) -> int:
        """A longer `sched_yield` has let another thread run here, probably the peer."""
        return 10_000 + 12 * self.yield_ns


TYPICAL = Costs(wake_up_ns=80_000, timer_ns=30_000, yield_ns=850)
"""A virtual machine's: what an end goes by that has nothing to go by."""


def _between(value: int, bounds: tuple[int, int]) -> int:
    least, most = bounds
    return min(max(value, least), most)
