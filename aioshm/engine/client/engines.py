"""The engines of a client: registered, serving, leaving or dead; and the engine for the next request. No I/O."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from aioshm.engine.client.requests import Inbox, Pending
from aioshm.engine.protocol.addresses import identity
from aioshm.engine.protocol.messages import EngineCoreRequestType, EnvelopeDecoder, decode_single
from aioshm.engine.protocol.payloads import Frame
from aioshm.errors import EngineDead
from aioshm.process.restart import Health

MAX_REGISTRATION_BYTES = 1 << 20

WAITING_WEIGHT = 4.0
"""The load of a waiting request, in running requests: its engine has no room for more."""
PRESSURE_FROM = 0.5
"""The usage of a KV cache above which waiting requests weigh more than running ones."""
PRESSURE_WEIGHT = 6.0
"""How fast their weight grows from 1 there, to `WAITING_WEIGHT` at a full cache: below, a queue is a short burst."""

_USAGE_STEPS = 10
_ADD = EngineCoreRequestType.ADD.value
_map: msgspec.msgpack.Decoder[dict[str, Any]] = msgspec.msgpack.Decoder(dict[str, Any])

Send = Callable[[int, bytes, list[Frame]], None]


class LoadBalancer:
    """Chooses the least busy engine for each request, in turn among equals.

    The load of an engine is the coordinator's publication, which is 100 ms old, plus the requests of this client since
    then. It is at least the number of this client's requests in flight. Among engines of equal load, the engine with
    the emptier KV cache, by tenths, is chosen: finer steps would send the requests of all clients to one engine until
    the next publication.
    """

    def __init__(self, ranks: Iterable[int], first: int = 0, n_clients: int = 1) -> None:
        self.in_flight: dict[int, int] = dict.fromkeys(ranks, 0)  # requests of this client, by rank
        ordered = list(self.in_flight)
        start = first % len(ordered)
        self.choices: list[int] = ordered[start:] + ordered[:start]  # engines that get requests, longest idle first
        self.stalled: dict[int, str] = {}  # passed over while there are others: how each makes no progress, by rank
        self._n_clients = n_clients
        self._published: dict[int, float] = {}  # loads by rank; empty: unknown
        self._usage: dict[int, int] = {}  # usage of KV caches by rank, in tenths
        self._weights: dict[int, float] = {}  # of a request sent now, by rank

    def choose(self, among: Sequence[int] | None = None) -> int:
        """Return the rank of the engine for the next request; call `sent` afterwards."""
        choices = among or self.choices
        if self.stalled:
            choices = [rank for rank in choices if rank not in self.stalled] or choices
        in_flight = self.in_flight
        published = self._published
        if not published:
            return min(choices, key=in_flight.__getitem__)
        usage = self._usage
        n_clients = self._n_clients
        return min(choices, key=lambda rank: (max(published[rank], n_clients * in_flight[rank]), usage[rank]))

    def sent(self, rank: int) -> None:
        self.in_flight[rank] += 1
        if self._published:
            self._published[rank] += self._n_clients * self._weights[rank]
        if rank in self.choices:
            self.choices.remove(rank)
            self.choices.append(rank)

    def done(self, rank: int) -> None:
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
        self.leave_out(rank)
        self.stalled.pop(rank, None)
        del self.in_flight[rank]

    def update(self, counts: Sequence[Sequence[float]]) -> None:
        """Apply a publication: for each rank the waiting and running requests, and the usage of the KV cache.

        Older releases of vLLM publish no usage, and no publication has an engine that was just added.
        """
        loads: dict[int, float] = {}
        usages: dict[int, int] = {}
        weights: dict[int, float] = {}
        for rank in self.in_flight:
            waiting: float = 0
            running: float = 0
            usage: float | None = None
            if rank < len(counts):
                waiting, running, *more = counts[rank]
                if more:
                    usage = min(max(more[0], 0.0), 1.0)
            weights[rank] = 1 + PRESSURE_WEIGHT * max(0.0, (usage or 0.0) - PRESSURE_FROM)
            waiting_weight = WAITING_WEIGHT if usage is None else weights[rank]
            loads[rank] = waiting_weight * waiting + running
            usages[rank] = int(_USAGE_STEPS * (usage or 0.0))
        self._published = loads
        self._usage = usages
        self._weights = weights


class Engines:
    """Chooses the engine for each request, and fails or resubmits the requests of dead engines."""

    def __init__(
        self, ranks: Iterable[int], client_index: int = 0, n_clients: int = 1, output_type: Any = None
    ) -> None:
        self.ranks: list[int] = list(ranks)
        if not self.ranks or len(set(self.ranks)) != len(self.ranks):
            raise ValueError(f"engines must be some, each with a rank of its own, not {self.ranks}")
        self.names: dict[int, bytes] = {rank: identity(rank) for rank in self.ranks}  # the ZeroMQ identities
        self.ready: dict[int, dict[str, Any]] = {}  # registrations, by rank
        self.deaths: dict[int, EngineDead] = {}  # by rank: dead engines, while others continue
        self.died: int = 0  # deaths in total
        self.leaving: set[int] = set()  # the ranks of engines that get no more requests
        # Clients begin with different engines: otherwise all would choose the same engine.
        first = len(self.ranks) * client_index // n_clients
        self.balance: LoadBalancer = LoadBalancer(self.ranks, first, n_clients)
        self.stalled: dict[int, str] = self.balance.stalled
        self.pending: Pending = Pending(EnvelopeDecoder(output_type), self.balance)

    @property
    def missing(self) -> list[int]:
        """The ranks of engines that have not registered."""
        return [rank for rank in self.ranks if rank not in self.ready]

    @property
    def busy(self) -> list[int]:
        """The ranks of leaving engines that have requests or calls."""
        return [rank for rank in sorted(self.leaving) if self.pending.is_busy(rank)]

    @property
    def stats_address(self) -> str | None:
        """The address at which the coordinator publishes its counts, if an engine has reported one."""
        said = (fields.get("dp_stats_address") for fields in self.ready.values())
        return next((address for address in said if isinstance(address, str)), None)

    def register(self, sender: bytes, frames: Sequence[bytes]) -> int:
        """Accept a registration: a map, or (vLLM before 0.10) an empty frame; return the engine's rank."""
        rank = next((rank for rank, name in self.names.items() if name == sender), None)
        if rank is None:
            raise ValueError(f"an unknown engine; expected one of {self.ranks}")
        fields: dict[str, Any] = {}
        if frames != [b""]:
            fields = decode_single(_map, frames, MAX_REGISTRATION_BYTES)
        self.ready[rank] = fields
        self.stalled.pop(rank, None)
        self.pending.registered(rank, fields)
        return rank

    # The engine for a request

    def choose(self, rank: int | None) -> int:
        """Return the rank of the engine for the next request: the wanted one, or the least busy."""
        if rank is None:
            if not self.balance.choices:
                raise self._none_left()
            return self.balance.choose()
        if rank in self.deaths:
            raise again(self.deaths[rank])
        if rank in self.leaving:
            raise EngineDead(f"engine {rank} is being taken out of service", engine=rank)
        if rank not in self.names:
            raise ValueError(f"engine must be the rank of one of {self.ranks}, not {rank!r}")
        return rank

    def in_service(self) -> list[int]:
        """Return the ranks of the engines that get requests: alive and not leaving."""
        if not self.balance.choices:
            raise self._none_left()
        return [rank for rank in self.ranks if rank in self.balance.choices]

    def _none_left(self) -> EngineDead:
        deaths = list(self.deaths.values())
        if len(deaths) == 1:
            return again(deaths[0])
        if deaths:
            said = "; ".join(map(str, deaths))
            return EngineDead(f"no engine is left: {said}", engine=deaths[-1].engine, pid=deaths[-1].pid)
        text = f"no engine is left: engines {', '.join(map(str, self.ranks))} cannot be reached, or are leaving"
        return EngineDead(text, engine=self.ranks[0])

    def take_in(self, rank: int) -> None:
        """Start to send requests to an engine that has registered, unless the engine is leaving."""
        if rank not in self.leaving:
            self.balance.take_in(rank)

    # Engines that stall, or die

    def note_health(self, rank: int, health: Health, where: str) -> None:
        """Note that an engine has stalled, was stopped, or makes progress again; ignore an unknown or dead engine.

        While another engine is there, an engine without progress gets only requests that are for this engine.
        """
        if health == "running":
            self.stalled.pop(rank, None)
        elif rank in self.names and rank not in self.deaths:
            self.stalled[rank] = f"engine {rank} is {health}"
            if where:
                self.stalled[rank] += f": {where}"

    def go_on_without(self, rank: int, error: EngineDead, send: Send) -> tuple[int, int]:
        """Resubmit a dead engine's requests that brought no output yet to other engines, and fail all others.

        Returns how many requests failed, and how many were resubmitted.
        """
        self.ready.pop(rank, None)
        self.balance.leave_out(rank)
        self.stalled.pop(rank, None)
        self.deaths[rank] = error
        self.died += 1
        moved = 0
        inboxes = self.pending.of_engine(rank)
        for inbox in inboxes:
            moved += self._resubmit(inbox, send)
        self.pending.fail_engine(rank, lambda: again(error))
        return len(inboxes) - moved, moved

    def _resubmit(self, inbox: Inbox, send: Send) -> bool:
        """Resubmit a dead engine's request if it has brought no output yet; return whether it was sent."""
        if inbox.request is None:
            return False
        # Skip engines that had this request before: late output of the dead process must not pass for its successor's.
        tried = {inbox.engine, *inbox.tried}
        while choices := [rank for rank in self.balance.choices if rank not in tried]:
            rank = self.balance.choose(choices)
            tried.add(rank)
            generation, frames = self.pending.new_generation(rank, inbox.request)
            try:
                send(rank, _ADD, frames)
            except EngineDead:
                continue  # the death of this engine will be reported soon
            self.pending.move(inbox, rank, generation)
            return True
        return False

    # More engines, or fewer

    def add(self, rank: int, name: bytes) -> None:
        """Expect one more engine; ``name`` is its ZeroMQ identity."""
        if rank in self.names:
            raise ValueError(f"rank must be that of no engine, not {rank}")
        self.ranks.append(rank)
        self.names[rank] = name
        self.balance.add(rank)

    def begin_to_leave(self, rank: int) -> None:
        """Mark an engine as leaving: it gets no more requests."""
        self.leaving.add(rank)
        self.balance.leave_out(rank)

    def stay(self, rank: int) -> None:
        """Cancel the leaving of an engine: it gets requests again."""
        self.leaving.discard(rank)
        if rank in self.ready:
            self.take_in(rank)

    async def drain(self, rank: int) -> None:
        """Mark an engine as leaving, and wait until its requests and calls are done. Cancelling undoes the mark."""
        self.begin_to_leave(rank)
        changed = asyncio.Event()
        self.pending.on_idle = lambda _rank: changed.set()
        try:
            while self.pending.is_busy(rank):
                changed.clear()
                await changed.wait()
        except BaseException:
            self.stay(rank)
            raise
        finally:
            self.pending.on_idle = None

    def remove_last(self) -> int:
        """Remove the last engine, and fail its remaining requests and calls; return its rank."""
        rank = self.ranks.pop()
        text = f"engine {rank} was taken out of service"
        if rank in self.stalled:
            text += f"; {self.stalled[rank]}"
        gone = EngineDead(text, engine=rank)
        self.pending.fail_engine(rank, lambda: again(gone))
        del self.names[rank]
        self.ready.pop(rank, None)
        self.deaths.pop(rank, None)
        self.leaving.discard(rank)
        self.balance.remove(rank)
        return rank


def again(error: EngineDead) -> EngineDead:
    """Return a copy of an error: each call raises an error with a traceback of its own."""
    return EngineDead(*error.args, engine=error.engine, pid=error.pid)
