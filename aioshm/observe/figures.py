"""What queues, workers, engines and events tell of themselves, as figures with names and labels; no metrics library."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from aioshm.observe.families import (
    ATTACHED,
    CALL_DURATION,
    CALLS,
    CLIENT,
    ENGINE_RESTARTS,
    ENGINE_UP,
    FIRST_ITEM,
    LATENCY,
    PUBLISHER,
    QUEUE,
    READER,
    READER_UP,
    STREAMS,
    SUBSCRIBER,
    WORKER_RESTARTS,
    WORKER_UP,
    WORKERS,
    Family,
)
from aioshm.ring.header import Latency

if TYPE_CHECKING:  # who observes queues needs no engines
    from aioshm.engine.stats import EngineClientStats, EngineSupervisorStats, WorkerGroupStats
    from aioshm.process.restart import RankInfo
    from aioshm.queue.stats import QueueStats


class Figure(NamedTuple):
    """One figure.

    Attributes:
        family: What it is one of.
        labels: The values of the family's labels.
        value: A number; a `Latency` of a histogram.
    """

    family: Family
    labels: tuple[str, ...]
    value: float | Latency


class Told(Protocol):
    """What has figures."""

    def stats(self) -> Any:
        """Return them; in any thread."""


def _plain(families: Mapping[str, Family], stats: object, *labels: str) -> Iterator[Figure]:
    return (Figure(family, labels, getattr(stats, field)) for field, family in families.items())


def _of_queue(stats: QueueStats, name: str) -> Iterator[Figure]:
    queue, writes = name or stats.queue, stats.side == "writer"
    yield from _plain(QUEUE, stats, queue, stats.side, "" if writes else str(stats.rank))
    if writes:
        yield Figure(ATTACHED, (queue,), stats.readers)
    elif stats.latency is not None:
        yield Figure(LATENCY, (queue, str(stats.rank)), stats.latency)
    for row in stats.per_reader:
        rank = str(row.rank)
        told = _plain(READER, row, queue, rank)
        yield from (figure for figure in told if figure.value is not None)
        yield Figure(READER_UP, (queue, rank), row.state == "attached")
        if row.latency is not None:
            yield Figure(LATENCY, (queue, rank), row.latency)


def _of_ranks(restarts: Family, up: Family, name: str, infos: Iterable[RankInfo]) -> Iterator[Figure]:
    for info in infos:
        yield Figure(restarts, (name, str(info.rank)), info.restarts)
        yield Figure(up, (name, str(info.rank)), info.state == "running")


def _of_group(stats: WorkerGroupStats, name: str) -> Iterator[Figure]:
    name = name or stats.name
    yield from _plain(CALLS, stats.calls, name)
    yield Figure(CALL_DURATION, (name,), stats.calls.latency)
    yield from _plain(STREAMS, stats.streams, name)
    yield Figure(FIRST_ITEM, (name,), stats.streams.first_item)
    yield from _plain(WORKERS, stats, name)
    yield from _of_ranks(WORKER_RESTARTS, WORKER_UP, name, stats.workers)


def _of_client(stats: EngineClientStats, name: str) -> Iterator[Figure]:
    return _plain(CLIENT, stats, name or str(stats.index))


def _of_supervisor(stats: EngineSupervisorStats, name: str) -> Iterator[Figure]:
    yield from _of_ranks(ENGINE_RESTARTS, ENGINE_UP, name or "engines", stats.engines)
    if stats.client is not None:
        yield from _of_client(stats.client, name)


READERS: dict[str, Callable[[Any, str], Iterator[Figure]]] = {
    "aioshm.queue.stats.QueueStats": _of_queue,
    "aioshm.engine.stats.WorkerGroupStats": _of_group,
    "aioshm.engine.stats.EngineClientStats": _of_client,
    "aioshm.engine.stats.EngineSupervisorStats": _of_supervisor,
    "aioshm.events.stats.PublisherStats": lambda stats, name: _plain(PUBLISHER, stats, name),
    "aioshm.events.stats.SubscriberStats": lambda stats, name: _plain(SUBSCRIBER, stats, name),
}
"""What makes figures of each kind of statistics, by where its class is."""

_ATTEMPTS = 5


class Sources:
    """What is observed: objects that were registered, and that somebody else keeps alive."""

    def __init__(self) -> None:
        self._known: list[tuple[weakref.ref[Told], str]] = []
        self._changing = threading.Lock()

    def add(self, told: Told, name: str = "") -> None:
        """Observe an object; see `Observer.add`."""
        if not isinstance(name, str):
            raise TypeError(f"name must be a str, not {name!r}")
        try:
            known = _reader_of(told.stats()) is not None
        except (AttributeError, TypeError):
            known = False
        if not known:
            raise TypeError(
                "what is observed must be a MessageQueue, WorkerGroup, EngineClient, EngineSupervisor, or a publisher "
                f"or subscriber of events, not {told!r}"
            )
        with self._changing:
            self._known = [*self._alive(), (weakref.ref(told), name)]

    def remove(self, told: Told) -> None:
        """Observe an object no more; see `Observer.remove`."""
        with self._changing:
            self._known = [(ref, name) for ref, name in self._alive() if ref() is not told]

    def figures(self) -> list[Figure]:
        """Return the figures of all that live; called in any thread."""
        found: list[Figure] = []
        told: set[tuple[Family, tuple[str, ...]]] = set()
        taken: Counter[tuple[tuple[str, ...], tuple[str, ...]]] = Counter()
        for ref, given in self._known:
            source = ref()
            stats = None if source is None else _stats_of(source)
            if stats is None:
                continue
            name = given or _own_name(source)
            read = _reader_of(stats)
            assert read is not None
            figures = list(read(stats, name))
            if not figures:
                continue
            called = figures[0].labels[0]
            identity = figures[0].family.labels, figures[0].labels
            taken[identity] += 1
            if taken[identity] > 1:
                figures = list(read(stats, f"{called}#{taken[identity]}"))
            for figure in figures:
                key = figure.family, figure.labels
                if key not in told:  # both ends of a queue tell how long messages took
                    told.add(key)
                    found.append(figure)
        return found

    def _alive(self) -> list[tuple[weakref.ref[Told], str]]:
        return [(ref, name) for ref, name in self._known if ref() is not None]


def _reader_of(stats: object) -> Callable[[Any, str], Iterator[Figure]] | None:
    return READERS.get(f"{type(stats).__module__}.{type(stats).__qualname__}")


def _own_name(told: object) -> str:
    """Return what an object is called that has no name in its statistics: a publisher, a subscriber."""
    endpoints = getattr(told, "endpoints", None) or getattr(told, "endpoint", "")
    return ",".join(endpoints) if isinstance(endpoints, list) else str(endpoints)


def _stats_of(told: Told) -> Any:
    """Return the statistics of an object that another thread may be changing, or closing, just now."""
    for _ in range(_ATTEMPTS):
        try:
            return told.stats()
        except (RuntimeError, ValueError):  # a dict has changed; the memory of a queue was given back
            continue
    return None


class Observer:
    """Tells a metrics library of objects of this process; what each of them has in common.

    Args:
        told: What to observe; see `add`.

    Raises:
        TypeError: Something cannot be observed.
    """

    def __init__(self, *told: Told) -> None:
        self._sources = Sources()
        for each in told:
            self.add(each)

    def add(self, told: Told, name: str = "") -> None:
        """Observe an object, as long as it lives.

        Args:
            told: A `MessageQueue` of either face, a `WorkerGroup`, an `EngineClient` of either face, an
                `EngineSupervisor`, a publisher or an `EventSubscriber`.
            name: What it is called in labels; empty: what it is called anyway. Two that have the same name are told
                apart by ``#2`` behind it.

        Raises:
            TypeError: It is nothing of the kind.
        """
        self._sources.add(told, name)

    def remove(self, told: Told) -> None:
        """Observe an object no more; does nothing if it was not observed."""
        self._sources.remove(told)
