"""What queues, workers, engines and events tell of themselves, as figures with names and labels; no metrics library."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from aioshm.ring.header import Latency

if TYPE_CHECKING:  # who observes queues needs no engines
    from aioshm.engine.stats import EngineClientStats, EngineSupervisorStats, WorkerGroupStats
    from aioshm.process.restart import RankInfo
    from aioshm.queue.stats import QueueStats

Kind = Literal["counter", "gauge", "histogram"]


class Family(NamedTuple):
    """Figures of one name.

    Attributes:
        name: After Prometheus' conventions, without ``aioshm_`` in front and ``_total`` behind.
        kind: What it is.
        unit: After OpenTelemetry's conventions, for what the name says in Prometheus' way.
        help: What it says, in a sentence.
        labels: The names of its labels.
    """

    name: str
    kind: Kind
    unit: str
    help: str
    labels: tuple[str, ...]


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


_END, _READER = ("queue", "side", "rank"), ("queue", "rank")
_GROUP, _WORKER = ("group",), ("group", "rank")
_CLIENT, _SUPERVISOR, _ENGINE = ("client",), ("supervisor",), ("supervisor", "rank")
_PUBLISHER, _SUBSCRIBER = ("publisher",), ("subscriber",)


def _counters(prefix: str, labels: tuple[str, ...], told: Mapping[str, tuple[str, str, str]]) -> dict[str, Family]:
    return {field: Family(prefix + name, "counter", unit, text, labels) for field, (name, unit, text) in told.items()}


def _gauges(prefix: str, labels: tuple[str, ...], told: Mapping[str, tuple[str, str, str]]) -> dict[str, Family]:
    return {field: Family(prefix + name, "gauge", unit, text, labels) for field, (name, unit, text) in told.items()}


QUEUE: dict[str, Family] = {
    **_counters(
        "queue_",
        _END,
        {
            "messages": ("messages", "{message}", "Messages sent by a writer, or received by a reader."),
            "bytes": ("bytes", "By", "Bytes in the bodies of these messages."),
            "overflows": ("overflows", "{message}", "Messages that did not fit a chunk of the ring."),
            "copied_bytes": ("copied_bytes", "By", "Bytes copied into messages, or out of leased ones."),
            "spins": ("spins", "{spin}", "Times that an end span for a message, or for room."),
            "spin_hits": ("spin_hits", "{spin}", "Spins that ended with what was waited for."),
            "spin_s": ("spin_seconds", "s", "Time spent spinning."),
            "naps": ("naps", "{nap}", "Short sleeps on a timer."),
            "parks": ("parks", "{park}", "Times that an end went to sleep until it is woken."),
            "resent": ("resent_messages", "{message}", "Messages sent again to remote readers, or received twice."),
            "reconnects": ("reconnects", "{connection}", "Connections to the writer that were lost and came back."),
            "restarts": ("restarts", "{writer}", "Times that a reader went on with another writer."),
            "garbled_traces": ("garbled_traces", "{message}", "Messages whose trace context was none."),
        },
    ),
    **_gauges(
        "queue_",
        _END,
        {
            "backlog": (
                "backlog_messages",
                "{message}",
                "Messages that the end, or the slowest reader, has to read.",
            ),
            "slots": ("slots", "{message}", "Messages that the ring holds."),
            "kept": ("kept_messages", "{message}", "Messages that are kept for remote readers."),
            "kept_bytes": ("kept_bytes", "By", "Bytes that are kept for remote readers."),
        },
    ),
}
ATTACHED = Family("queue_attached_readers", "gauge", "{reader}", "Readers that are attached and alive.", ("queue",))
READER: dict[str, Family] = {
    **_counters(
        "queue_reader_",
        _READER,
        {
            "read": ("messages", "{message}", "Messages that a writer's reader has finished with, from number 0 on."),
            "bytes": ("bytes", "By", "Bytes in the bodies of the messages that a local reader has finished with."),
        },
    ),
    **_gauges(
        "queue_reader_",
        _READER,
        {"lag": ("lag_messages", "{message}", "Messages that a writer's reader has still to read.")},
    ),
}
READER_UP = Family("queue_reader_up", "gauge", "1", "Whether a writer's reader is attached.", _READER)
LATENCY = Family(
    "queue_latency_seconds",
    "histogram",
    "s",
    "Time from publishing until a local reader had taken the message, of a sample of the messages.",
    _READER,
)
CALLS = _counters(
    "worker_",
    _GROUP,
    {
        "calls": ("calls", "{call}", "Calls of the workers of a group."),
        "failed": ("failed_calls", "{call}", "Calls that ended with an error."),
        "cancelled": ("cancelled_calls", "{call}", "Calls that were cancelled, or out of time."),
    },
) | _gauges("worker_", _GROUP, {"in_flight": ("calls_in_flight", "{call}", "Calls that have not ended.")})
CALL_DURATION = Family(
    "worker_call_duration_seconds",
    "histogram",
    "s",
    "How long calls took that ended well, the wait included.",
    _GROUP,
)
WORKERS = _gauges(
    "worker_",
    _GROUP,
    {
        "n_workers": ("processes", "{process}", "Workers that a group is to have."),
        "standbys": ("standbys", "{process}", "Processes that can take a rank at once."),
    },
)
_RESTARTS = "Times that the process was started again."
WORKER_RESTARTS = Family("worker_restarts", "counter", "{restart}", _RESTARTS, _WORKER)
WORKER_UP = Family("worker_up", "gauge", "1", "Whether a supervised worker serves.", _WORKER)
CLIENT = _counters(
    "engine_",
    _CLIENT,
    {
        "requests": ("requests", "{request}", "Requests sent to engines."),
        "failed": ("failed_requests", "{request}", "Requests that ended with an error."),
        "late_outputs": ("late_outputs", "{output}", "Outputs that came for requests that had ended."),
        "deaths": ("deaths", "{engine}", "Engines that have died."),
    },
) | _gauges(
    "engine_",
    _CLIENT,
    {
        "in_flight": ("requests_in_flight", "{request}", "Requests that have not ended."),
        "engines": ("engines", "{engine}", "Engines that a client is to have."),
        "missing": ("missing_engines", "{engine}", "Engines that do not serve: not registered yet, or dead."),
    },
)
ENGINE_RESTARTS = Family("engine_restarts", "counter", "{restart}", _RESTARTS, _ENGINE)
ENGINE_UP = Family("engine_up", "gauge", "1", "Whether a supervised engine serves.", _ENGINE)
PUBLISHER = _counters(
    "events_publisher_",
    _PUBLISHER,
    {
        "published": ("published_batches", "{batch}", "Batches of events that were given a number."),
        "sent": ("sent_batches", "{batch}", "Batches that were handed to ZeroMQ."),
        "dropped": (
            "dropped_batches",
            "{batch}",
            "Batches that found the queue full, or were left at the end.",
        ),
        "unencodable": ("unencodable_batches", "{batch}", "Batches that could not be encoded."),
        "replay_requests": ("replay_requests", "{request}", "Requests for a replay."),
        "replayed": ("replayed_batches", "{batch}", "Batches that were sent in answer to them."),
        "malformed_requests": ("malformed_requests", "{request}", "Requests for a replay that were none."),
        "abandoned_replays": ("abandoned_replays", "{replay}", "Replays whose client has left, or stalled."),
        "handshake_failures": ("handshake_failures", "{connection}", "Connections without ZeroMQ, or the right keys."),
        "cut_off": ("cut_off_connections", "{connection}", "Connections that sent more than they may."),
    },
) | _gauges("events_publisher_", _PUBLISHER, {"queued": ("queued_batches", "{batch}", "Batches that wait to be sent.")})
SUBSCRIBER = _counters(
    "events_subscriber_",
    _SUBSCRIBER,
    {
        "delivered": ("delivered_batches", "{batch}", "Batches of events that were delivered."),
        "replayed": ("replayed_batches", "{batch}", "Batches of these that came from a replay."),
        "duplicates": ("duplicate_batches", "{batch}", "Batches that came again and were dropped."),
        "gaps": ("gaps", "{gap}", "Times that numbers were missing."),
        "lost": ("lost_batches", "{batch}", "Batches that were reported as lost."),
        "restarts": ("publisher_restarts", "{publisher}", "Times that a publisher's numbers went back."),
        "reconnects": ("reconnects", "{connection}", "Connections that broke and came back."),
        "garbage": ("garbage_messages", "{message}", "Messages that could not be understood."),
        "replay_failures": ("replay_failures", "{replay}", "Replays that were not answered to the end in time."),
        "handshake_failures": ("handshake_failures", "{connection}", "Connections without ZeroMQ, or the right keys."),
        "cut_off": ("cut_off_connections", "{connection}", "Connections that sent more than they may."),
    },
)

FAMILIES: tuple[Family, ...] = (
    *QUEUE.values(), ATTACHED, *READER.values(), READER_UP, LATENCY,
    *CALLS.values(), CALL_DURATION, *WORKERS.values(), WORKER_RESTARTS, WORKER_UP,
    *CLIENT.values(), ENGINE_RESTARTS, ENGINE_UP, *PUBLISHER.values(), *SUBSCRIBER.values(),
)  # fmt: skip
"""All that there are."""


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
        """Observe an object, as long as it lives.

        Args:
            told: A `MessageQueue` of either face, a `WorkerGroup`, an `EngineClient` of either face, an
                `EngineSupervisor`, a publisher or an `EventSubscriber`.
            name: What it is called in labels; empty: what it is called anyway. Two that have the same name are told
                apart by ``#2`` behind it.

        Raises:
            TypeError: It is nothing of the kind.
        """
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
        """Observe an object no more; does nothing if it was not observed."""
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
