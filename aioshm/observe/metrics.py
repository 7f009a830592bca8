"""The metrics of queues, workers, engines and events: one table, and the exporters for Prometheus."""

from __future__ import annotations

import functools
import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import accumulate
from operator import attrgetter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from aioshm.deferred import import_extra
from aioshm.observe.processes import StartedProcesses
from aioshm.observe.queues import QueueSnapshot, Watch
from aioshm.process.proc import check_proc
from aioshm.ring.header import Latency

if TYPE_CHECKING:
    from prometheus_client.core import Metric as PrometheusMetric
    from prometheus_client.registry import CollectorRegistry

_ATTEMPTS = 5
_BOUNDS_NS = tuple(bound for bound in Latency.BOUNDS_NS if bound.bit_length() % 2)
"""Every second bound, so that a reader is 19 series instead of 34: from 256 ns to 275 s, by a factor of four."""

# A section names its labels. A row has: kind, name (Prometheus adds `aioshm_` and `_total`), unit (OpenTelemetry's),
# attribute of the statistics, and help. "state=attached": whether the attribute has this value; "workers#stalled": how
# many of the items are in this state.
_TABLE = """
end: queue side rank
counter queue_messages {message} messages Messages sent by a writer, or received by a reader.
counter queue_bytes By bytes Bytes in the bodies of these messages.
counter queue_overflows {message} overflows Messages that did not fit a chunk of the ring.
counter queue_copied_bytes By copied_bytes Bytes copied into messages, or out of leased ones.
counter queue_spins {spin} spins Busy-waits of an end for a message, or for room.
counter queue_spin_hits {spin} spin_hits Busy-waits that ended with the message, or with room.
counter queue_spin_seconds s spin_s Time spent in busy-waits.
counter queue_naps {nap} naps Short sleeps on a timer.
counter queue_parks {park} parks Times that an end slept until its peer woke it.
counter queue_resent_messages {message} resent Messages sent again to remote readers, or dropped there behind a gap.
counter queue_reconnects {connection} reconnects Connections to the writer that were lost and came back.
counter queue_restarts {writer} restarts Times that a reader continued with another writer.
counter queue_garbled_traces {message} garbled_traces Messages with an invalid trace context.
gauge queue_backlog_messages {message} backlog Messages that the end, or the slowest reader, has to read.
gauge queue_slots {message} slots Messages that the ring holds.
gauge queue_kept_messages {message} kept Messages that are kept for remote readers.
gauge queue_kept_bytes By kept_bytes Bytes that are kept for remote readers.

queue: queue
gauge queue_attached_readers {reader} readers Readers that are attached and alive.

reader: queue rank
counter queue_reader_messages {message} read Messages that a writer's reader has finished with, from number 0 on.
counter queue_reader_bytes By bytes Bytes in the bodies of the messages that a local reader has finished with.
gauge queue_reader_lag_messages {message} lag Messages that a writer's reader has still to read.
gauge queue_reader_up 1 state=attached Whether a writer's reader is attached.
histogram queue_latency_seconds s latency Time from publishing until a local reader had taken the message, of a sample.

group: group
counter worker_calls {call} calls.calls Calls of the workers of a group.
counter worker_failed_calls {call} calls.failed Calls that ended with an error.
counter worker_cancelled_calls {call} calls.cancelled Calls that were cancelled, or out of time.
gauge worker_calls_in_flight {call} calls.in_flight Calls that have not ended.
histogram worker_call_duration_seconds s calls.latency How long calls took that ended well, the wait included.
counter worker_streams {stream} streams.streams Streams from workers of a group.
counter worker_failed_streams {stream} streams.failed Streams that ended with an error.
counter worker_cancelled_streams {stream} streams.cancelled Streams that were left early, cancelled, or out of time.
counter worker_stream_items {item} streams.items Items of streams that were delivered.
gauge worker_streams_in_flight {stream} streams.in_flight Streams that have not ended.
histogram worker_stream_first_item_seconds s streams.first_item How long the first items of streams took to come.
gauge worker_processes {process} n_workers Workers that a group shall have.
gauge worker_standbys {process} standbys Processes that can take a rank immediately.
gauge worker_stalled_processes {process} workers#stalled Workers without progress.
gauge worker_stopped_processes {process} workers#stopped Workers that somebody has stopped.

worker: group rank
counter worker_restarts {restart} restarts Times that the process was started again.
gauge worker_up 1 state=running Whether a supervised worker serves.

client: client
counter engine_requests {request} requests Requests sent to engines.
counter engine_failed_requests {request} failed Requests that ended with an error.
counter engine_late_outputs {output} late_outputs Outputs that came for requests that had ended.
counter engine_deaths {engine} deaths Engines that have died.
gauge engine_requests_in_flight {request} in_flight Requests that have not ended.
gauge engine_engines {engine} engines Engines that a client shall have.
gauge engine_missing_engines {engine} missing Engines that do not serve: not registered yet, or dead.
gauge engine_stalled_engines {engine} stalled Engines that are passed over: without progress, or stopped.

supervisor: supervisor
gauge engine_stalled_processes {process} engines#stalled Engines without progress.
gauge engine_stopped_processes {process} engines#stopped Engines that somebody has stopped.

engine: supervisor rank
counter engine_restarts {restart} restarts Times that the process was started again.
gauge engine_up 1 state=running Whether a supervised engine serves.

publisher: publisher
counter events_publisher_published_batches {batch} published Batches of events that were given a number.
counter events_publisher_sent_batches {batch} sent Batches that were handed to ZeroMQ.
counter events_publisher_dropped_batches {batch} dropped Batches that found the queue full, or were left at the end.
counter events_publisher_unencodable_batches {batch} unencodable Batches that could not be encoded.
counter events_publisher_replay_requests {request} replay_requests Requests for a replay.
counter events_publisher_replayed_batches {batch} replayed Batches that were sent in answer to them.
counter events_publisher_malformed_requests {request} malformed_requests Requests for a replay that were malformed.
counter events_publisher_abandoned_replays {replay} abandoned_replays Replays whose client has left, or stalled.
counter events_publisher_handshake_failures {connection} handshake_failures Connections without ZeroMQ or right keys.
counter events_publisher_cut_off_connections {connection} cut_off Connections with too many subscriptions.
gauge events_publisher_queued_batches {batch} queued Batches that wait to be sent.

subscriber: subscriber
counter events_subscriber_delivered_batches {batch} delivered Batches of events that were delivered.
counter events_subscriber_replayed_batches {batch} replayed Batches of these that came from a replay.
counter events_subscriber_duplicate_batches {batch} duplicates Batches that came again and were dropped.
counter events_subscriber_gaps {gap} gaps Times that numbers were missing.
counter events_subscriber_lost_batches {batch} lost Batches that were reported as lost.
counter events_subscriber_publisher_restarts {publisher} restarts Times that a publisher's numbers went back.
counter events_subscriber_reconnects {connection} reconnects Connections that broke and came back.
counter events_subscriber_garbage_messages {message} garbage Messages that could not be understood.
counter events_subscriber_unknown_events {event} unknown_events Events of unknown types and malformed ones.
counter events_subscriber_replay_failures {replay} replay_failures Replays that were not answered to the end in time.
counter events_subscriber_handshake_failures {connection} handshake_failures Connections without ZeroMQ or right keys.
counter events_subscriber_dropped_messages {message} dropped Messages that were dropped because decoding is too slow.

host: -
gauge host_queues {queue} queues Queues of this user on this host.
gauge host_skipped_processes {process} skipped Processes of other users, which cannot be read.
gauge host_started_processes {process} started Engines, workers and other processes that aioshm has started.
gauge host_stalled_processes {process} processes#stalled Processes of these without progress.
gauge host_stopped_processes {process} processes#stopped Processes of these that somebody has stopped.

host queue: queue
gauge queue_memory_bytes By memory_bytes Memory that the ring occupies.
gauge queue_overflow_segments {segment} overflow_segments Overflow segments beside the ring.
gauge queue_overflow_segment_bytes By overflow_bytes Memory that these occupy.
gauge queue_age_seconds s header.writer.age_s Time since the queue was made.

host end: queue side rank
counter queue_end_cpu_seconds s cpu_s CPU time that the process of an end has used.
gauge queue_end_stopped 1 hangs Whether the process of an end is stopped, or is gone.
gauge queue_end_parked 1 waits=parked Whether an end sleeps until its peer wakes it.
"""


class Metric(NamedTuple):
    """A row of the table."""

    name: str
    kind: str
    unit: str
    help: str
    labels: tuple[str, ...]
    attribute: str

    def value_of(self, stats: object) -> Any:
        """Return the value of this metric in some statistics; None: they have none."""
        items, _, state = self.attribute.partition("#")
        path, _, wanted = items.partition("=")
        try:
            value = attrgetter(path)(stats)
        except AttributeError:
            return None
        if state:
            return sum(item.state == state for item in value)
        if wanted:
            return value == wanted
        return value


Sample: TypeAlias = tuple[Metric, tuple[str, ...], Any]
"""A metric, the values of its labels, and a number or a `Latency`."""


def _parse(table: str) -> dict[str, tuple[Metric, ...]]:
    sections = {}
    for section in table.strip().split("\n\n"):
        head, *rows = section.splitlines()
        title, names = head.split(": ")
        labels = tuple(names.replace("-", "").split())
        metrics = []
        for row in rows:
            kind, name, unit, attribute, text = row.split(maxsplit=4)
            metrics.append(Metric(name, kind, unit, text, labels, attribute))
        sections[title] = tuple(metrics)
    return sections


SECTIONS: dict[str, tuple[Metric, ...]] = _parse(_TABLE)
METRICS: dict[str, Metric] = {metric.name: metric for section in SECTIONS.values() for metric in section}


def _rows(section: str, stats: object, *labels: str) -> Iterator[Sample]:
    """Yield a sample of every metric of a section that ``stats`` has a value of."""
    for metric in SECTIONS[section]:
        if (value := metric.value_of(stats)) is not None:
            yield metric, labels, value


def _of_queue(stats: Any, name: str) -> Iterator[Sample]:
    queue = name or stats.queue
    rank = ""
    if stats.side == "writer":
        yield from _rows("queue", stats, queue)
    else:
        rank = str(stats.rank)
        if stats.latency is not None:
            yield METRICS["queue_latency_seconds"], (queue, rank), stats.latency
    yield from _rows("end", stats, queue, stats.side, rank)
    for row in stats.per_reader:
        yield from _rows("reader", row, queue, str(row.rank))


def _of_group(stats: Any, name: str) -> Iterator[Sample]:
    group = name or stats.name
    yield from _rows("group", stats, group)
    for info in stats.workers:
        yield from _rows("worker", info, group, str(info.rank))


def _of_supervisor(stats: Any, name: str) -> Iterator[Sample]:
    supervisor = name or "engines"
    yield from _rows("supervisor", stats, supervisor)
    for info in stats.engines:
        yield from _rows("engine", info, supervisor, str(info.rank))
    if stats.client is not None:
        yield from _rows("client", stats.client, name or str(stats.client.index))


_READERS: dict[str, Any] = {
    "QueueStats": _of_queue,
    "WorkerGroupStats": _of_group,
    "EngineClientStats": lambda stats, name: _rows("client", stats, name or str(stats.index)),
    "EngineSupervisorStats": _of_supervisor,
    "PublisherStats": functools.partial(_rows, "publisher"),
    "SubscriberStats": functools.partial(_rows, "subscriber"),
}
"""Functions that yield samples, by the class name of the statistics: importing the classes would import engines."""


class Observer:
    """Reads the statistics of objects of this process; the base of the exporters."""

    def __init__(self, *observed: Any) -> None:
        self._known: list[tuple[weakref.ref[Any], str]] = []
        self._lock = threading.Lock()
        for each in observed:
            self.add(each)

    def add(self, observed: Any, name: str = "") -> None:
        """Observe an object, as long as it lives.

        Args:
            observed: A `MessageQueue` of either API, a `WorkerGroup`, an `EngineClient` of either API, an
                `EngineSupervisor`, a publisher or an `EventSubscriber`.
            name: Its name in labels; empty: its own name. The second object of a name gets ``#2``.

        Raises:
            TypeError: The object is of another kind.
        """
        if not isinstance(name, str):
            raise TypeError(f"name must be a str, not {name!r}")
        try:
            known = type(observed.stats()).__name__ in _READERS
        except (AttributeError, TypeError):
            known = False
        if not known:
            raise TypeError(
                "observed must be a MessageQueue, WorkerGroup, EngineClient, EngineSupervisor, or a publisher "
                f"or subscriber of events, not {observed!r}"
            )
        with self._lock:
            self._known = [*self._alive(), (weakref.ref(observed), name)]

    def remove(self, observed: Any) -> None:
        """Stop observing an object; does nothing if it was not observed."""
        with self._lock:
            self._known = [(ref, name) for ref, name in self._alive() if ref() is not observed]

    def _samples(self) -> list[Sample]:
        """Return the samples of all objects that live; from any thread."""
        found: dict[tuple[str, tuple[str, ...]], Sample] = {}
        names: Counter[tuple[tuple[str, ...], tuple[str, ...]]] = Counter()
        for ref, given in self._known:
            observed = ref()
            stats = _stats_of(observed)
            if stats is None:
                continue
            read = _READERS[type(stats).__name__]
            samples = list(read(stats, given or _endpoint(observed)))
            metric, labels, _ = samples[0]
            names[metric.labels, labels] += 1
            if (number := names[metric.labels, labels]) > 1:
                samples = list(read(stats, f"{labels[0]}#{number}"))
            for sample in samples:  # both ends of a queue have its latency: the first counts
                found.setdefault((sample[0].name, sample[1]), sample)
        return list(found.values())

    def _alive(self) -> list[tuple[weakref.ref[Any], str]]:
        return [(ref, name) for ref, name in self._known if ref() is not None]


def _endpoint(observed: object) -> str:
    """Return the endpoints of a publisher or a subscriber: their statistics have no name."""
    endpoints = getattr(observed, "endpoints", None)
    if isinstance(endpoints, list):
        return ",".join(endpoints)
    return str(endpoints or getattr(observed, "endpoint", ""))


def _stats_of(observed: Any) -> Any:
    """Return the statistics of an object; None: the object is gone."""
    for _ in range(_ATTEMPTS):
        if observed is None:
            break
        try:
            return observed.stats()
        except (RuntimeError, ValueError):  # another thread changed a dict, or closed the queue
            continue
    return None


class PrometheusCollector(Observer):
    """Exports the metrics of queues, workers, engines and events of this process to Prometheus.

        REGISTRY.register(PrometheusCollector(queue, group, supervisor, subscriber))

    Each scrape reads the statistics, in any thread. The collector references the objects weakly: the metrics of an
    object end with the object. Names begin with ``aioshm_``. Labels are names of queues, ``side`` and ``rank``, names
    of groups, and endpoints.

    Args:
        observed: Objects to observe; see `add`.
        registry: Registers the collector; None: the caller registers it.

    Raises:
        ImportError: prometheus_client is not installed; the text names the extra.
        TypeError: An object cannot be observed.
    """

    def __init__(self, *observed: Any, registry: CollectorRegistry | None = None) -> None:
        self._client = _prometheus_client("PrometheusCollector")
        super().__init__(*observed)
        if registry is not None:
            registry.register(self)

    def collect(self) -> Iterator[PrometheusMetric]:
        """Return the metrics; prometheus_client calls `collect` at each scrape, in any thread."""
        return iter(_families(self._client, self._samples()))

    def describe(self) -> list[PrometheusMetric]:
        """Return all metrics without samples: a registry checks their names."""
        return [_family(self._client, metric) for metric in METRICS.values()]


class HostCollector:
    """Exports the metrics of every queue of this user on this host, from outside, as ``aioshm export`` does.

        REGISTRY.register(HostCollector())

    Each scrape reads the queues, in any thread, at no cost for their processes. It also counts engines and workers, and
    those of them that are stalled or stopped, see `find_processes`. `PrometheusCollector` uses the same names and
    labels: register one of the two.

    Raises:
        ImportError: prometheus_client is not installed; the text names the extra.
        NoProc: There is no ``/proc``.
        ValueError: ``AIOSHM_STALL_WARNING_S`` is invalid.
    """

    def __init__(self) -> None:
        self._client = _prometheus_client("HostCollector")
        check_proc()
        self._watch = Watch()
        self._started = StartedProcesses()
        self._lock = threading.Lock()

    def collect(self) -> Iterator[PrometheusMetric]:
        """Return the metrics; prometheus_client calls `collect` at each scrape, in any thread."""
        with self._lock:
            return iter(_families(self._client, self._samples()))

    def describe(self) -> list[PrometheusMetric]:
        """Return all metrics without samples: a registry checks their names."""
        return [_family(self._client, metric) for metric in METRICS.values()]

    def _samples(self) -> Iterator[Sample]:
        """Yield the samples of a host; of two queues with one name, the second has its id in the label."""
        queues = self._watch.look()
        processes = self._started.look()
        host = {"queues": len(queues), "skipped": self._watch.skipped, "started": len(processes)}
        yield from _rows("host", SimpleNamespace(**host, processes=processes))
        labels: set[str] = set()
        for queue in queues:
            label = queue.label
            if label in labels:
                label += f"#{queue.header.queue_id[:8]}"
            labels.add(label)
            yield from _of_snapshot(queue, label)


def _of_snapshot(queue: QueueSnapshot, label: str) -> Iterator[Sample]:
    header = queue.header
    stats = SimpleNamespace(
        messages=header.writer.messages,
        bytes=header.writer.bytes,
        overflows=header.writer.overflows,
        backlog=header.backlog,
        slots=header.slots,
        readers=sum(row.state == "attached" for row in header.readers),
    )
    yield from _rows("end", stats, label, "writer", "")
    yield from _rows("queue", stats, label)
    yield from _rows("host queue", queue, label)
    for row in header.readers:
        if row.pid:
            yield from _rows("reader", row, label, str(row.rank))
    for end in queue.ends:
        if end.there and end.pid:
            yield from _rows("host end", end, label, end.side, str(end.rank) * (end.side == "reader"))


def _prometheus_client(user: str) -> Any:
    return import_extra("prometheus_client.core", "prometheus", f"{user} needs prometheus_client")


def _families(client: Any, samples: Iterable[Sample]) -> list[PrometheusMetric]:
    found: dict[str, Any] = {}
    for metric, labels, value in samples:
        family = found.setdefault(metric.name, _family(client, metric))
        if isinstance(value, Latency):
            below = dict(zip((*Latency.BOUNDS_NS, None), accumulate(value.counts), strict=True))
            buckets = [(repr(bound / 1e9), below[bound]) for bound in _BOUNDS_NS]
            family.add_metric(labels, buckets=[*buckets, ("+Inf", below[None])], sum_value=value.sum_s)
        else:
            family.add_metric(labels, value)
    return list(found.values())


def _family(client: Any, metric: Metric) -> Any:
    kind = getattr(client, f"{metric.kind.capitalize()}MetricFamily")
    return kind(f"aioshm_{metric.name}", metric.help, labels=metric.labels)
