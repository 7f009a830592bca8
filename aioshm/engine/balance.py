"""Which engine gets the next request. No I/O."""

from __future__ import annotations

from collections.abc import Sequence

WAITING_WEIGHT = 4
"""A request that waits counts as much as so many that run: its engine has no room for more."""


class LoadBalancer:
    """Sends each request to the engine with the least to do; the next one in turn among equals.

    What an engine has to do is what the coordinator publishes, a tenth of a second late, plus what this client has sent
    since. It is at least what this client has in flight there, which nothing published can contradict.

    Args:
        n_engines: How many engines there are.
        first: Which one to begin with; clients that begin with different ones do not all choose the same.
    """

    def __init__(self, n_engines: int, first: int = 0) -> None:
        self.in_flight = [0] * n_engines
        self._published: list[int] | None = None
        self._turn = first % n_engines

    def choose(self) -> int:
        """Return the position of the engine that gets the next request; say `sent` once it has got it."""
        loads = self.in_flight
        if self._published is not None:
            loads = list(map(max, self._published, loads))
        turn = self._turn
        # The distance from whose turn it is breaks ties.
        return min(range(len(loads)), key=lambda at: (loads[at], (at - turn) % len(loads)))

    def sent(self, position: int) -> None:
        """Note that an engine was sent a request."""
        self.in_flight[position] += 1
        if self._published is not None:
            self._published[position] += 1
        self._turn = (position + 1) % len(self.in_flight)

    def done(self, position: int) -> None:
        """Note that a request has come to an end there."""
        self.in_flight[position] -= 1

    def update(self, counts: Sequence[Sequence[float]]) -> None:
        """Take what was published: for each engine how many requests wait and how many run."""
        self._published = [int(WAITING_WEIGHT * waiting + running) for waiting, running, *_ in counts]
