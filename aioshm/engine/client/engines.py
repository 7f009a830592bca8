"""The engines of a client, one record each, and the engine for the next request. No I/O."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

import msgspec

from aioshm.engine.protocol.addresses import identity
from aioshm.engine.protocol.messages import decode_single
from aioshm.errors import CallFailed, EngineDead, copy_error
from aioshm.process.progress import Sample
from aioshm.process.restart import Health
from aioshm.process.stalls import Judge

if TYPE_CHECKING:
    from aioshm.engine.client.requests import PendingCall

MAX_REGISTRATION_BYTES = 1 << 20

WAITING_WEIGHT = 4.0
"""The load of a waiting request, in running requests: its engine has no room for more."""
PRESSURE_FROM = 0.5
"""The usage of a KV cache above which waiting requests weigh more than running ones."""
PRESSURE_WEIGHT = 6.0
"""How fast their weight grows from 1 there, to `WAITING_WEIGHT` at a full cache: below, a queue is a short burst."""

_USAGE_STEPS = 10
_map: msgspec.msgpack.Decoder[dict[str, Any]] = msgspec.msgpack.Decoder(dict[str, Any])


@dataclass(slots=True, eq=False)
class Engine:
    """Everything that a client knows about one engine.

    An engine gets requests from its registration on, until it is leaving, or its connection has ended. Then its death
    is settled, and a later engine of its rank registers with the same record.
    """

    rank: int
    name: bytes  # the ZeroMQ identity
    # The process that has registered
    registration: dict[str, Any] | None = None  # the fields; None: not registered, or dead
    connection: int | None = None
    sender: str = ""  # describes the connection, such as ``pid 12``
    incarnation: int | None = None  # by its keys
    marks: bool = False  # it has sent generations
    # Stalls
    stall: str = ""  # how it makes no progress, for people
    heartbeat: Sample | None = None  # the last one over the present connection
    judge: Judge | None = None  # of an engine that sends heartbeats
    is_late: bool = False  # by its heartbeats
    # The end
    leaving: bool = False
    timer: asyncio.TimerHandle | None = None  # runs from the first report of a death until the death is settled
    said_dead: bool = False
    death: EngineDead | None = None  # until it is back, while others continue
    exit_is_due: bool = False  # the death was reported before the exit of the process
    # The pause
    order: PendingCall | None = None  # the newest order, without an answer yet
    refusal: CallFailed | None = None
    # The load
    in_flight: int = 0  # requests of this client
    turn: int = 0  # grows with each request: among equals, the engine that is idle for longest is chosen
    load: float = 0.0  # as published, plus the requests of this client since then
    usage: int = 0  # of the KV cache, as published, in tenths
    weight: float = 1.0  # of a request that is sent now

    @property
    def serves(self) -> bool:
        """Whether it gets requests."""
        return self.registration is not None and not self.leaving and self.timer is None

    @property
    def of_vllm(self) -> bool:
        """Whether it is an engine of vLLM, which gets no generations."""
        return self.registration is not None and "vllm_version" in self.registration

    @property
    def pid(self) -> int | None:
        """The process id of an engine on this host."""
        return int(self.sender.removeprefix("pid ")) if self.sender.startswith("pid ") else None

    def register(self, fields: dict[str, Any], connection: int, sender: str, incarnation: int | None) -> None:
        """Begin to serve with a process that has registered, and makes progress so far."""
        self.registration = fields
        self.connection = connection
        self.sender = sender
        self.incarnation = incarnation
        self.marks = False
        self.stall = ""
        self.said_dead = False
        self.death = None
        self.exit_is_due = False


class Engines:
    """The table of engines; chooses the least busy engine for each request, in turn among equals.

    The load of an engine is the coordinator's publication, which is 100 ms old, plus the requests of this client since
    then. It is at least the number of this client's requests in flight. Among engines of equal load, the engine with
    the emptier KV cache, by tenths, is chosen: finer steps would send the requests of all clients to one engine until
    the next publication.
    """

    def __init__(self, ranks: Iterable[int], client_index: int = 0, n_clients: int = 1) -> None:
        given = list(ranks)
        if not given or len(set(given)) != len(given):
            raise ValueError(f"engines must be some, each with a rank of its own, not {given}")
        self._table: dict[int, Engine] = {rank: Engine(rank, identity(rank)) for rank in given}
        self.died: int = 0  # deaths in total
        self.removed: set[int] = set()  # the ranks of removed engines, until others register there
        self._n_clients = n_clients
        self.published: bool = False  # whether loads are known
        self._turns = count(1)
        # Clients begin with different engines: otherwise all would choose the same engine.
        first = len(given) * client_index // n_clients
        for place, engine in enumerate(self):
            engine.turn = (place - first) % len(given) - len(given)

    def __iter__(self) -> Iterator[Engine]:
        return iter(list(self._table.values()))  # a copy: other threads read statistics

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, rank: int) -> Engine:
        return self._table[rank]

    def get(self, rank: int | None) -> Engine | None:
        return None if rank is None else self._table.get(rank)

    @property
    def ranks(self) -> list[int]:
        return list(self._table)

    @property
    def missing(self) -> list[int]:
        """The ranks of engines that have not registered."""
        return [engine.rank for engine in self if engine.registration is None]

    @property
    def stats_address(self) -> str | None:
        """The address at which the coordinator publishes its counts, if an engine has reported one."""
        said = ((engine.registration or {}).get("dp_stats_address") for engine in self)
        return next((address for address in said if isinstance(address, str)), None)

    def named(self, name: bytes) -> Engine | None:
        """Return the engine with a ZeroMQ identity."""
        return next((engine for engine in self if engine.name == name), None)

    def at(self, connection: int) -> Engine | None:
        """Return the engine with a connection; the numbers are those of `Engine.connection`."""
        return next((engine for engine in self if engine.connection == connection), None)

    def read_registration(self, name: bytes, frames: Sequence[bytes]) -> tuple[Engine, dict[str, Any]]:
        """Return the engine and the fields of a registration: a map, or (vLLM before 0.10) an empty frame."""
        engine = self.named(name)
        if engine is None:
            raise ValueError(f"an unknown engine; expected one of {self.ranks}")
        fields: dict[str, Any] = {}
        if list(frames) != [b""]:
            fields = decode_single(_map, frames, MAX_REGISTRATION_BYTES)
        return engine, fields

    def note_health(self, rank: int, health: Health, where: str) -> None:
        """Note that an engine has stalled, was stopped, or makes progress again; ignore an unknown or dead engine.

        While another engine is there, an engine without progress gets only requests that are for this engine.
        """
        engine = self.get(rank)
        if engine is None or engine.death is not None:
            return
        engine.stall = ""
        if health != "running":
            engine.stall = f"engine {rank} is {health}"
            if where:
                engine.stall += f": {where}"

    def add(self, rank: int, name: bytes) -> None:
        """Expect one more engine; published loads are void until the next publication."""
        if rank in self._table:
            raise ValueError(f"rank must be that of no engine, not {rank}")
        self._table[rank] = Engine(rank, name)
        self.published = False

    def remove_last(self) -> Engine:
        rank, engine = self._table.popitem()
        self.removed.add(rank)
        return engine

    # The engine for a request

    def choose(self, rank: int | None = None) -> Engine:
        """Return the engine for the next request: the wanted one, or the least busy."""
        if rank is None:
            return self.least_busy(self.in_service())
        engine = self._table.get(rank)
        if engine is None:
            raise ValueError(f"engine must be the rank of one of {self.ranks}, not {rank!r}")
        if engine.death is not None:
            raise copy_error(engine.death)
        if engine.leaving:
            raise EngineDead(f"engine {rank} is being taken out of service", engine=rank)
        return engine

    def in_service(self) -> list[Engine]:
        """Return the engines that get requests."""
        serving = [engine for engine in self if engine.serves]
        if not serving:
            raise self._none_left()
        return serving

    def least_busy(self, engines: list[Engine]) -> Engine:
        moving = [engine for engine in engines if not engine.stall]
        return min(moving or engines, key=self._busyness)

    def _busyness(self, engine: Engine) -> tuple[float, int, int]:
        if not self.published:
            return engine.in_flight, 0, engine.turn
        return max(engine.load, self._n_clients * engine.in_flight), engine.usage, engine.turn

    def _none_left(self) -> EngineDead:
        deaths = [engine.death for engine in self if engine.death is not None]
        if len(deaths) == 1:
            return copy_error(deaths[0])
        if deaths:
            said = "; ".join(map(str, deaths))
            return EngineDead(f"no engine is left: {said}", engine=deaths[-1].engine, pid=deaths[-1].pid)
        text = f"no engine is left: engines {', '.join(map(str, self.ranks))} cannot be reached, or are leaving"
        return EngineDead(text, engine=self.ranks[0])

    def sent(self, engine: Engine) -> None:
        """Count a request that was sent to an engine."""
        engine.in_flight += 1
        engine.load += self._n_clients * engine.weight
        engine.turn = next(self._turns)

    def update(self, counts: Sequence[Sequence[float]]) -> None:
        """Apply a publication: for each rank the waiting and running requests, and the usage of the KV cache.

        Older releases of vLLM publish no usage. An engine that was just added has no counts yet.
        """
        loads = [_load_of(counts[engine.rank]) if engine.rank < len(counts) else (0.0, 0, 1.0) for engine in self]
        for engine, (load, usage, weight) in zip(self, loads, strict=True):
            engine.load = load
            engine.usage = usage
            engine.weight = weight
        self.published = True


def _load_of(counts: Sequence[float]) -> tuple[float, int, float]:
    """Return the load of an engine, the usage of its KV cache in steps, and the weight of one more request."""
    waiting, running, *more = counts
    if not more:
        return WAITING_WEIGHT * waiting + running, 0, 1.0
    usage = min(max(more[0], 0.0), 1.0)
    weight = 1 + PRESSURE_WEIGHT * max(0.0, usage - PRESSURE_FROM)
    return weight * waiting + running, int(_USAGE_STEPS * usage), weight
