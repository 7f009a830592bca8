"""The exporter for Prometheus, by prometheus_client: this process's objects, or this host's queues."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from aioshm.deferred import import_extra
from aioshm.observe.metrics import (
    METRICS,
    SECTIONS,
    Metric,
    Observer,
    Sample,
    process_metrics,
    samples_of,
    without_progress,
)
from aioshm.observe.processes import StartedProcess, StartedProcesses
from aioshm.observe.scan import Watch
from aioshm.observe.snapshot import QueueSnapshot
from aioshm.process.proc import HUNG_STATES, check_proc
from aioshm.ring.header import Latency

if TYPE_CHECKING:
    from prometheus_client.core import Metric as PrometheusMetric
    from prometheus_client.registry import CollectorRegistry

BOUNDS_NS: tuple[int, ...] = tuple(bound for bound in Latency.BOUNDS_NS if bound.bit_length() % 2)
"""Every second bound, so that a reader is 19 series instead of 34: from 256 ns to 275 s, by a factor of four."""

_HOST_SECTIONS = ("queue", "reader", "host", "host queue", "host end")
_HOST_NAMES = ("queue_messages", "queue_bytes", "queue_overflows", "queue_backlog_messages", "queue_slots")


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
        self._core = _client(type(self).__name__)
        super().__init__(*observed)
        if registry is not None:
            registry.register(self)

    def collect(self) -> Iterator[PrometheusMetric]:
        """Return the metrics; prometheus_client calls `collect` at each scrape, in any thread."""
        return iter(_families(self._core, self._samples()))

    def describe(self) -> list[PrometheusMetric]:
        """Return all metrics without samples: a registry checks their names."""
        return [_family(self._core, metric) for metric in process_metrics()]


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
        self._core = _client(type(self).__name__)
        check_proc()
        self._watch = Watch()
        self._started = StartedProcesses()
        self._lock = threading.Lock()

    def collect(self) -> Iterator[PrometheusMetric]:
        """Return the metrics; prometheus_client calls `collect` at each scrape, in any thread."""
        with self._lock:
            samples = [*_host_samples(self._watch.look(), self._watch.skipped), *_of_processes(self._started.look())]
            return iter(_families(self._core, samples))

    def describe(self) -> list[PrometheusMetric]:
        """Return all metrics without samples: a registry checks their names."""
        metrics = [METRICS[name] for name in _HOST_NAMES]
        metrics += [metric for title in _HOST_SECTIONS for metric in SECTIONS[title]]
        return [_family(self._core, metric) for metric in metrics]

    def close(self) -> None:
        """Close the queues. Idempotent."""
        with self._lock:
            self._watch.close()


def _host_samples(queues: Sequence[QueueSnapshot], skipped: int) -> Iterator[Sample]:
    """Yield the samples of a host's queues; of two queues with one name, the second has its id in the label."""
    yield Sample(METRICS["host_queues"], (), len(queues))
    yield Sample(METRICS["host_skipped_processes"], (), skipped)
    labels: set[str] = set()
    for queue in queues:
        label = queue.label
        if label in labels:
            label += f"#{queue.header.queue_id[:8]}"
        labels.add(label)
        yield from _of_queue(queue, label)


def _of_processes(started: Sequence[StartedProcess]) -> Iterator[Sample]:
    yield Sample(METRICS["host_started_processes"], (), len(started))
    yield from without_progress("host", (process.state for process in started))


def _of_queue(queue: QueueSnapshot, label: str) -> Iterator[Sample]:
    header = queue.header
    writer = header.writer
    values = (writer.messages, writer.bytes, writer.overflows, header.backlog, header.slots)
    for name, value in zip(_HOST_NAMES, values, strict=True):
        yield Sample(METRICS[name], (label, "writer", ""), value)
    attached = sum(row.state == "attached" for row in header.readers)
    yield Sample(METRICS["queue_attached_readers"], (label,), attached)
    yield from samples_of("host queue", queue, label)
    for row in header.readers:
        if row.pid:
            yield from samples_of("reader", row, label, str(row.rank))
            yield Sample(METRICS["queue_reader_up"], (label, str(row.rank)), row.state == "attached")
    for end in queue.ends:
        if end.there and end.pid:
            end_labels = (label, end.side, str(end.rank) * (end.side == "reader"))
            yield from samples_of("host end", end, *end_labels)
            yield Sample(METRICS["queue_end_stopped"], end_labels, end.state in HUNG_STATES)
            yield Sample(METRICS["queue_end_parked"], end_labels, end.waits == "parked")


def _client(user: str) -> Any:
    return import_extra("prometheus_client.core", "prometheus", f"{user} needs prometheus_client")


def _families(core: Any, samples: Iterable[Sample]) -> list[PrometheusMetric]:
    found: dict[str, Any] = {}
    for metric, labels, value in samples:
        family = found.setdefault(metric.name, _family(core, metric))
        if isinstance(value, Latency):
            family.add_metric(labels, buckets=_buckets(value), sum_value=value.sum_s)
        else:
            family.add_metric(labels, value)
    return list(found.values())


def _family(core: Any, metric: Metric) -> Any:
    kinds = {"counter": core.CounterMetricFamily, "gauge": core.GaugeMetricFamily}
    kind = kinds.get(metric.kind, core.HistogramMetricFamily)
    return kind(f"aioshm_{metric.name}", metric.help, labels=metric.labels)


def _buckets(latency: Latency) -> list[tuple[str, int]]:
    below = dict(zip((*Latency.BOUNDS_NS, None), accumulate(latency.counts), strict=True))
    return [*((repr(bound / 1e9), below[bound]) for bound in BOUNDS_NS), ("+Inf", below[None])]
