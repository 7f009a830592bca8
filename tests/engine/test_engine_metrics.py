"""What engines and workers tell of themselves, and Prometheus of them."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from served_engine import ask, begun, collected, stop, until
from supervised import MANY, pids, serve
from workers.worker_targets import Streaming, Worker

from aioshm import WorkerDied, WorkerError
from aioshm.engine import EngineSupervisor, Restart, WorkerGroup
from aioshm.observe import PrometheusCollector

pytestmark = [pytest.mark.usefixtures("runtime_dir"), pytest.mark.slow_on_uvloop]


def scrape(*told: Any) -> Any:
    registry = CollectorRegistry()
    registry.register(PrometheusCollector(*told))
    return lambda name, **labels: registry.get_sample_value(f"aioshm_{name}", labels)


async def test_engines() -> None:
    async with EngineSupervisor(serve, 2, restart=MANY) as supervisor:
        client = supervisor.client
        metric = scrape(supervisor)
        await collected(client.submit(ask("a", 2)))
        _lost = await begun(client, "b", engine=1)
        stats = client.stats()
        assert (stats.requests, stats.failed, stats.in_flight, stats.missing) == (2, 0, 1, 0)
        assert (metric("engine_requests_total", client="0"), metric("engine_requests_in_flight", client="0")) == (2, 1)
        stop(pids(supervisor)[1])
        await until(lambda: supervisor.engines[1].restarts == 1 and client.stats().missing == 0)
        assert metric("engine_deaths_total", client="0") == 1
        assert metric("engine_failed_requests_total", client="0") == 1
        assert metric("engine_restarts_total", supervisor="engines", rank="1") == 1
        assert metric("engine_restarts_total", supervisor="engines", rank="0") == 0
        await until(lambda: metric("engine_up", supervisor="engines", rank="1") == 1)
        assert scrape(client)("engine_deaths_total", client="0") == 1, "the client alone"


async def test_workers() -> None:
    async with WorkerGroup(Worker, 2, name="Metered", restart=Restart(backoff_s=0.01)) as group:
        metric = scrape(group)
        before = group.stats().calls.calls
        for _ in range(3):
            await group.collective_rpc("pid")
        with pytest.raises(WorkerError):
            await group.collective_rpc("fail")
        with pytest.raises(TimeoutError):
            await group.collective_rpc("slowly", (0.2,), timeout=0.01)
        calls = group.stats().calls
        assert (calls.calls - before, calls.failed, calls.cancelled, calls.in_flight) == (5, 1, 1, 0)
        assert calls.latency.samples == 3
        assert metric("worker_calls_total", group="Metered") == calls.calls
        assert metric("worker_call_duration_seconds_count", group="Metered") == 3
        assert metric("worker_up", group="Metered", rank="1") == 1
        await group.collective_rpc("pid")  # the late call has ended: the next call is sent immediately
        stop(group.pids[1])
        with pytest.raises(WorkerDied):
            while True:
                await group.collective_rpc("pid")
        await group.collective_rpc("pid")
        assert metric("worker_restarts_total", group="Metered", rank="1") == 1
        assert metric("worker_processes", group="Metered") == 2


async def test_streams_of_workers() -> None:
    async with WorkerGroup(Streaming, 1, name="Streaming") as group:
        metric = scrape(group)
        assert [item async for item in group.stream(0, "count", 5)] == [0, 1, 2, 3, 4]
        with pytest.raises(WorkerError):
            async for _ in group.stream(0, "count", 2, True):
                pass
        left = group.stream(0, "count")
        assert await anext(left) == 0
        assert group.stats().streams.in_flight == 1
        await left.aclose()
        group.stream(0, "count")  # never iterated over: never begun
        streams = group.stats().streams
        assert (streams.streams, streams.failed, streams.cancelled, streams.in_flight) == (3, 1, 1, 0)
        assert (streams.items, streams.first_item.samples) == (5 + 2 + 1, 3)
        told = {name: metric(f"worker_{name}_total", group="Streaming") for name in ("streams", "stream_items")}
        assert told == {"streams": 3, "stream_items": 8}
        assert metric("worker_failed_streams_total", group="Streaming") == 1
        assert metric("worker_cancelled_streams_total", group="Streaming") == 1
        assert metric("worker_streams_in_flight", group="Streaming") == 0
        assert metric("worker_stream_first_item_seconds_count", group="Streaming") == 3
