"""Chooses the engine for the next request. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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

    def __init__(self, ranks: Iterable[int], first: int = 0, n_clients: int = 1) -> None:
        self.in_flight: dict[int, int] = dict.fromkeys(ranks, 0)  # of this client, by rank
        self.choices: list[int] = [*self.in_flight]  # the engines that get requests; of equals the first is chosen
        for _ in range(first % len(self.choices)):
            self.choices.append(self.choices.pop(0))
        self._n_clients = n_clients
        self._published: dict[int, float] = {}  # the loads; empty: not known
        self._usage: dict[int, int] = {}  # in tenths
        self._weights: dict[int, float] = {}  # of a request that is sent now

    def choose(self, among: Sequence[int] | None = None) -> int:
        """Return the rank of the engine for the next request; call `sent` afterwards."""
        choices = among or self.choices
        in_flight = self.in_flight
        published = self._published
        if not published:
            return min(choices, key=in_flight.__getitem__)
        usage = self._usage
        n_clients = self._n_clients
        return min(choices, key=lambda rank: (max(published[rank], n_clients * in_flight[rank]), usage[rank]))

    def sent(self, rank: int) -> None:
        """Note that an engine was sent a request."""
        self.in_flight[rank] += 1
        if self._published:
            self._published[rank] += self._n_clients * self._weights[rank]
        if rank in self.choices:
            self.choices.remove(rank)
            self.choices.append(rank)

    def done(self, rank: int) -> None:
        """Note that a request has ended there."""
        self.in_flight[rank] -= 1

    def leave_out(self, rank: int) -> None:
        """Stop choosing an engine. Idempotent."""
        if rank in self.choices:
            self.choices.remove(rank)

    def take_in(self, rank: int) -> None:
        """Choose an engine from now on. Idempotent."""
        if rank not in self.choices:
            self.choices.append(rank)

    def add(self, rank: int) -> None:
        """Add an engine, which `take_in` admits; published loads are void until the next publication."""
        self.in_flight[rank] = 0
        self._published = {}

    def remove(self, rank: int) -> None:
        """Remove an engine."""
        self.leave_out(rank)
        del self.in_flight[rank]

    def update(self, counts: Sequence[Sequence[float]]) -> None:
        """Apply a publication: for each rank the waiting and running requests, and the usage of the KV cache.

        The usage is missing in publications of older releases of vLLM, and so is an engine that was just added.
        """
        loads: dict[int, float] = {}
        usages: dict[int, int] = {}
        weights: dict[int, float] = {}
        for rank in self.in_flight:
            waiting, running, *more = counts[rank] if rank < len(counts) else (0, 0)
            usage = min(max(more[0], 0.0), 1.0) if more else 0.0
            weights[rank] = 1 + PRESSURE_WEIGHT * max(0.0, usage - PRESSURE_FROM)
            loads[rank] = (weights[rank] if more else WAITING_WEIGHT) * waiting + running
            usages[rank] = int(_USAGE_STEPS * usage)
        self._published = loads
        self._usage = usages
        self._weights = weights
