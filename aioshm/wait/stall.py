"""Reports of waits that last."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

MIN_PAUSE_S = 0.1
"""Between two calls of a report, however impatient the options are."""


class Stall:
    """Reports long waits, again and again; consecutive waits for one thing count as one."""

    def __init__(self, after_s: float, report: Callable[[float], float | None]) -> None:
        self._after_s = after_s
        # Gets the seconds waited; returns the seconds until the next report, None: `after_s`.
        self._report = report
        self._began = self._paused = monotonic()
        self.at: float = self._began + after_s
        self.reported: bool = False

    def restart(self) -> None:
        """Count from now, for a wait for another thing."""
        self._began = monotonic()
        self.at = self._began + self._after_s

    def pause(self) -> None:
        """Note that nothing waits any more, for now."""
        self._paused = monotonic()

    def resume(self) -> None:
        """Continue counting where the pause began."""
        gap = monotonic() - self._paused
        self._began += gap
        self.at += gap

    def check(self, now: float) -> None:
        """Report, if it is due."""
        if now >= self.at:
            self.reported = True
            again_s = self._report(now - self._began)
            self.at = now + max(MIN_PAUSE_S, self._after_s if again_s is None else again_s)


def seconds(duration_s: float) -> str:
    """Return a duration for people: with a decimal only where it matters."""
    return f"{duration_s:.0f} s" if duration_s >= 10 else f"{duration_s:.1f} s"
