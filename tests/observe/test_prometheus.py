"""Metrics of queues and events for Prometheus: names, labels, values, and collected objects."""

from __future__ import annotations

import asyncio
import gc
import sys
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from support import until

from aioshm import MessageQueue, blocking
from aioshm.engine import RankInfo
from aioshm.engine.stats import CallStats, EngineClientStats, EngineSupervisorStats, StreamStats, WorkerGroupStats
from aioshm.events import BlockRemoved, EventBatch, EventSubscriber, ZmqEventPublisher
from aioshm.observe import PrometheusCollector
from aioshm.observe.metrics import METRICS
from aioshm.ring.header import Latency


def scraped(collector: Any) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Return every sample of a scrape, as Prometheus' own parser reads it, by name and labels."""
    registry = CollectorRegistry()
    registry.register(collector)
    text = generate_latest(registry).decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    found = {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for sample in samples}
    assert len(found) == len(samples), "each series is there once"
    return found


def value(samples: dict[Any, float], name: str, **labels: str) -> float:
    """Return the only sample with a name and labels."""
    wanted = set(labels.items())
    found = {key[1]: sample for key, sample in samples.items() if key[0] == name and wanted <= set(key[1])}
    assert len(found) == 1, (name, labels, found)
    return next(iter(found.values()))


def test_metric_names_follow_the_conventions() -> None:
    for family in METRICS.values():
        assert family.name == family.name.lower()
        assert family.help.endswith(".")
        assert not family.name.endswith("_total"), "prometheus_client adds that"
        if family.kind == "histogram" or family.unit == "s":
            assert family.name.endswith("_seconds")
        if family.unit == "By":
            assert family.name.endswith("_bytes")
        assert not {"le", "pid", "queue_id"} & set(family.labels), "labels have few values"


async def test_a_queue() -> None:
    async with MessageQueue(1, 1, codec="raw", name="metered") as writer:
        async with MessageQueue.attach("metered", 0) as reader:
            collector = PrometheusCollector(writer, reader)
            await writer.wait_until_ready(20)
            for size in (10, 20, 30):
                await writer.enqueue(bytes(size))
            for _ in range(2):
                await reader.dequeue(20)
            samples = scraped(collector)
            for labels, metrics in (
                ({"side": "writer", "rank": ""}, {"messages_total": 3, "bytes_total": 60, "backlog_messages": 1}),
                ({"side": "reader", "rank": "0"}, {"messages_total": 2, "bytes_total": 30}),
                ({"rank": "0"}, {"reader_lag_messages": 1, "reader_messages_total": 2, "reader_up": 1}),
                ({}, {"attached_readers": 1}),
            ):
                for name, expected in metrics.items():
                    assert value(samples, f"aioshm_queue_{name}", queue="metered", **labels) == expected, name
            one = {"queue": "metered", "rank": "0"}
            latency = reader.stats().latency
            assert latency is not None
            assert value(samples, "aioshm_queue_latency_seconds_count", **one) == latency.samples > 0
            assert value(samples, "aioshm_queue_latency_seconds_sum", **one) == pytest.approx(latency.sum_s)
            assert value(samples, "aioshm_queue_latency_seconds_bucket", le="+Inf", **one) == latency.samples
            buckets = [(float(dict(key[1])["le"]), count) for key, count in samples.items() if "_bucket" in key[0]]
            assert [count for _, count in sorted(buckets)] == sorted(count for _, count in buckets)
            for bound_s, count in buckets:
                below = [
                    n for bound, n in zip(Latency.BOUNDS_NS, latency.counts, strict=False) if bound <= bound_s * 1e9
                ]
                assert count == (sum(below) if bound_s < 1e300 else latency.samples)
    assert value(scraped(collector), "aioshm_queue_messages_total", queue="metered", side="writer") == 3, "closed"


def test_removed_and_collected_objects_have_no_metrics() -> None:
    collector = PrometheusCollector()

    def queues() -> set[str]:
        return {dict(labels)["queue"] for name, labels in scraped(collector) if name == "aioshm_queue_messages_total"}

    with blocking.MessageQueue(0, 0, name="first") as first, blocking.MessageQueue(0, 0, name="second") as second:
        collector.add(first)
        collector.add(second)
        assert queues() == {"first", "second"}
        collector.remove(second)
        assert queues() == {"first"}
    assert queues() == {"first"}, "closed, but there"
    del first, second
    gc.collect()
    assert scraped(collector) == {}


class Reporting:
    """Has statistics, as a group or a supervisor has."""

    def __init__(self, stats: object) -> None:
        self._stats = stats

    def stats(self) -> object:
        return self._stats


def test_stalled_and_stopped_engines_and_workers_are_counted() -> None:
    states = ("running", "stalled", "stopped", "stalled", "waiting")
    infos = tuple(RankInfo(rank, 100 + rank, state, 0, "") for rank, state in enumerate(states))
    counts = dict.fromkeys(("requests", "failed", "in_flight", "late_outputs", "deaths", "missing"), 0)
    client = EngineClientStats(index=0, engines=5, stalled=3, **counts)
    supervisor = Reporting(EngineSupervisorStats(infos, client))
    group = Reporting(WorkerGroupStats("Model", 5, 0, infos, CallStats(), StreamStats()))
    well = Reporting(WorkerGroupStats("Well", 1, 0, infos[:1], CallStats(), StreamStats()))
    samples = scraped(PrometheusCollector(supervisor, group, well))
    for section, labels in (("engine", {"supervisor": "engines"}), ("worker", {"group": "Model"})):
        assert value(samples, f"aioshm_{section}_stalled_processes", **labels) == 2
        assert value(samples, f"aioshm_{section}_stopped_processes", **labels) == 1
        assert value(samples, f"aioshm_{section}_up", rank="1", **labels) == 0
    assert value(samples, "aioshm_worker_stalled_processes", group="Well") == 0
    assert value(samples, "aioshm_engine_stalled_engines", client="0") == 3


async def test_two_of_one_name() -> None:
    async with MessageQueue(0, 0) as one, MessageQueue(0, 0) as two:
        collector = PrometheusCollector()
        collector.add(one, "steps")
        collector.add(two, "steps")
        await two.enqueue(1)
        samples = scraped(collector)
        assert value(samples, "aioshm_queue_messages_total", queue="steps") == 0
        assert value(samples, "aioshm_queue_messages_total", queue="steps#2") == 1


async def test_events() -> None:
    async with ZmqEventPublisher(0, "tcp://127.0.0.1:0", bind=True) as publisher:
        async with EventSubscriber(publisher.endpoint, start="live") as subscriber:
            collector = PrometheusCollector(publisher, subscriber)
            subscriber.open()

            def arrived() -> bool:
                publisher.publish(EventBatch(1.0, [BlockRemoved([1], None)]))
                return subscriber.stats().delivered > 0

            await until(arrived)
            await publisher.flush(20)
            samples = scraped(collector)
            stats = publisher.stats()
            of: dict[str, str] = {"publisher": publisher.endpoint}
            assert value(samples, "aioshm_events_publisher_published_batches_total", **of) == stats.published
            assert value(samples, "aioshm_events_publisher_queued_batches", **of) == 0
            there: dict[str, str] = {"subscriber": publisher.endpoint}
            assert value(samples, "aioshm_events_subscriber_delivered_batches_total", **there) > 0
            assert value(samples, "aioshm_events_subscriber_gaps_total", **there) == 0


async def test_scrapes_in_other_threads_while_messages_pass() -> None:
    async with MessageQueue(1, 1, name="busy") as writer, MessageQueue.attach("busy", 0) as reader:
        collector = PrometheusCollector(writer, reader)
        await writer.wait_until_ready(20)
        scrapes = asyncio.gather(*(asyncio.to_thread(scraped, collector) for _ in range(10)))
        while not scrapes.done():
            await writer.enqueue("text")
            assert await reader.dequeue(20) == "text"
        await scrapes


def test_object_of_another_kind_is_refused() -> None:
    class Other:
        def stats(self) -> int:
            return 5

    collector = PrometheusCollector()
    for wrong in (5, None, "queue", Other()):
        with pytest.raises(TypeError, match="observed must be"):
            collector.add(wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="name must be a str"):
        collector.add(Other(), 5)  # type: ignore[arg-type]


def test_without_prometheus_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client.core", None)
    with pytest.raises(ImportError, match=r"pip install 'aioshm\[prometheus\]'"):
        PrometheusCollector()
