"""Metrics for Prometheus, by prometheus_client."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from aioshm.deferred import import_extra
from aioshm.observe.families import FAMILIES, Family
from aioshm.observe.figures import Figure, Observer, Told
from aioshm.observe.host import HOST_FAMILIES, host_figures
from aioshm.observe.proc import check_proc
from aioshm.observe.watch import Watch
from aioshm.ring.header import Latency

if TYPE_CHECKING:
    from prometheus_client.core import Metric
    from prometheus_client.registry import CollectorRegistry

PREFIX = "aioshm_"
BOUNDS_NS: tuple[int, ...] = tuple(bound for bound in Latency.BOUNDS_NS if bound.bit_length() % 2)
"""Every second bound, so that a reader is 19 series instead of 34: from 256 ns to 275 s, by a factor of four."""


class PrometheusCollector(Observer):
    """Tells Prometheus of queues, workers, engines and events of this process.

        REGISTRY.register(PrometheusCollector(queue, group, supervisor, subscriber))

    What is told is read when it is asked for, in any thread: it costs those that are observed nothing else. They are
    held weakly, and what is gone is not told of any more. Names begin with ``aioshm_``. Labels are names of queues,
    ``side`` and ``rank``, names of groups, and endpoints: as many as there are registered.

    Args:
        told: What to observe; see `add`.
        registry: Where to register this; None: the caller does that.

    Raises:
        ImportError: prometheus_client is not installed; the text names the extra.
        TypeError: Something cannot be observed.
    """

    def __init__(self, *told: Told, registry: CollectorRegistry | None = None) -> None:
        self._core: Any = import_extra(
            "prometheus_client.core", "prometheus", "PrometheusCollector needs prometheus_client"
        )
        super().__init__(*told)
        if registry is not None:
            registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Return what there is to tell; prometheus_client calls this at each scrape, in any thread."""
        return iter(families(self._core, self._sources.figures()))

    def describe(self) -> list[Metric]:
        """Return the names of all that may ever be told, so that they are this collector's."""
        return [_family(self._core, family) for family in FAMILIES]


class HostCollector:
    """Tells Prometheus of every queue of this user on this host, from outside: what ``aioshm export`` serves.

        REGISTRY.register(HostCollector())

    The queues are looked at when Prometheus asks, in any thread; that needs no cooperation of theirs, and costs them
    nothing. What means the same has the same names and labels as with `PrometheusCollector`: observe with one of them.

    Raises:
        ImportError: prometheus_client is not installed; the text names the extra.
        NoProc: There is no ``/proc``.
    """

    def __init__(self) -> None:
        self._core: Any = import_extra("prometheus_client.core", "prometheus", "HostCollector needs prometheus_client")
        check_proc()
        self._watch = Watch()
        self._looking = threading.Lock()

    def collect(self) -> Iterator[Metric]:
        """Return what there is to tell; prometheus_client calls this at each scrape, in any thread."""
        with self._looking:
            queues = [each.queue for each in self._watch.look()]
            return iter(families(self._core, host_figures(queues, self._watch.skipped)))

    def describe(self) -> list[Metric]:
        """Return the names of all that may ever be told, so that they are this collector's."""
        return [_family(self._core, family) for family in HOST_FAMILIES]

    def close(self) -> None:
        """Let go of the queues. Idempotent."""
        with self._looking:
            self._watch.close()


def families(core: Any, figures: Iterable[Figure]) -> list[Metric]:
    """Return figures as prometheus_client has them.

    Args:
        core: The module ``prometheus_client.core``.
        figures: The figures.
    """
    found: dict[str, Metric] = {}
    for family, labels, value in figures:
        metric: Any = found.get(family.name)
        if metric is None:
            metric = found[family.name] = _family(core, family)
        if isinstance(value, Latency):
            metric.add_metric(labels, buckets=_buckets(value), sum_value=value.sum_s)
        else:
            metric.add_metric(labels, value)
    return list(found.values())


def _family(core: Any, family: Family) -> Any:
    kinds = {"counter": core.CounterMetricFamily, "gauge": core.GaugeMetricFamily}
    return kinds.get(family.kind, core.HistogramMetricFamily)(PREFIX + family.name, family.help, labels=family.labels)


def _buckets(latency: Latency) -> list[tuple[str, int]]:
    below = dict(zip((*Latency.BOUNDS_NS, None), accumulate(latency.counts), strict=True))
    return [*((repr(bound / 1e9), below[bound]) for bound in BOUNDS_NS), ("+Inf", below[None])]
