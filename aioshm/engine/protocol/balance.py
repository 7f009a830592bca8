"""Chooses the engine for the next request. No I/O."""

from __future__ import annotations

from collections.abc import Sequence

WAITING_WEIGHT = 4.0
"""A request that waits counts as much as so many that run: its engine has no room for more."""

PRESSURE_FROM, PRESSURE_WEIGHT = 0.5, 6.0
"""Where the use of KV caches is known, one that waits counts as one that runs until half of the cache is in use: the
queue is a burst that is about to be taken. From there on it counts more, up to `WAITING_WEIGHT` for a full cache."""

_USAGE_STEPS = 10


class LoadBalancer:
    """Sends each request to the least busy engine, in turn among equals.

    The load of an engine is the coordinator's publication, a tenth of a second late, plus the requests of this client
    since then. It is at least the number of this client's requests in flight. Among engines of equal load, the one with
    the emptier KV cache, by tenths, is chosen: finer steps would send the requests of all clients to one engine until
    the next publication.
    """

    def __init__(self, n_engines: int, first: int = 0, n_clients: int = 1) -> None:
        self.in_flight: list[int] = [0] * n_engines
        self.choices: list[int] = list(range(n_engines))  # the positions of the engines that get requests
        self._n_clients = n_clients
        self._published: list[float] | None = None
        self._usage = [0] * n_engines  # in tenths
        self._weights = [1.0] * n_engines  # of a request that is sent now
        self._turn = first % n_engines

    def choose(self, among: Sequence[int] | None = None) -> int:
        """Return the position of the engine for the next request; call `sent` afterwards."""
        loads = self.in_flight
        usage = self._usage
        turn = self._turn
        n_clients = self._n_clients
        published = self._published
        if published is None:
            return min(among or self.choices, key=lambda at: (loads[at], (at - turn) % len(loads)))
        # The distance from whose turn it is breaks ties.
        return min(
            among or self.choices,
            key=lambda at: (max(published[at], n_clients * loads[at]), usage[at], (at - turn) % len(loads)),
        )

    def sent(self, position: int) -> None:
        """Note that an engine was sent a request."""
        self.in_flight[position] += 1
        if self._published is not None:
            self._published[position] += self._n_clients * self._weights[position]
        self._turn = (position + 1) % len(self.in_flight)

    def done(self, position: int) -> None:
        """Note that a request has ended there."""
        self.in_flight[position] -= 1

    def leave_out(self, position: int) -> None:
        """Stop choosing an engine. Idempotent."""
        if position in self.choices:
            self.choices.remove(position)

    def take_in(self, position: int) -> None:
        """Choose an engine from now on. Idempotent."""
        if position not in self.choices:
            self.choices.append(position)
            self.choices.sort()

    def resize(self, n_engines: int) -> None:
        """Add engines, which `take_in` admits, or remove the last ones.

        Published loads are void until the next publication.
        """
        more = n_engines - len(self.in_flight)
        self.in_flight = self.in_flight[:n_engines] + [0] * more
        self._published = None
        self._usage = [0] * n_engines
        self._weights = [1.0] * n_engines
        self.choices = [position for position in self.choices if position < n_engines]
        self._turn %= n_engines

    def update(self, counts: Sequence[Sequence[float]]) -> None:
        """Apply a publication: for each engine its waiting and running requests, and the usage of its KV cache.

        The usage is missing in publications of older releases of vLLM.
        """
        loads: list[float] = []
        usages: list[int] = []
        weights: list[float] = []
        for waiting, running, *more in counts:
            if more:
                usage = min(max(more[0], 0.0), 1.0)
                weight = 1 + PRESSURE_WEIGHT * max(0.0, usage - PRESSURE_FROM)
                loads.append(weight * waiting + running)
            else:
                usage = 0.0
                weight = 1.0
                loads.append(WAITING_WEIGHT * waiting + running)
            usages.append(int(_USAGE_STEPS * usage))
            weights.append(weight)
        self._published = loads
        self._usage = usages
        self._weights = weights
