"""Metrics of queues for OpenTelemetry, and the span of a consumer."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from aioshm import MessageQueue, Options, QueueEmpty
from aioshm.observe import OpenTelemetryMetrics, process_span


class Metered:
    """A meter provider, and the points that it got."""

    def __init__(self) -> None:
        self.reader = InMemoryMetricReader()
        self.provider = MeterProvider([self.reader])

    def points(self, name: str) -> list[Any]:
        data = self.reader.get_metrics_data()
        scopes = [scope for resource in data.resource_metrics for scope in resource.scope_metrics] if data else []
        metrics = [metric for scope in scopes for metric in scope.metrics if metric.name == name]
        return [point for metric in metrics for point in metric.data.data_points]

    def value(self, name: str, **attributes: str) -> Any:
        wanted = {key.replace("__", "."): value for key, value in attributes.items()}.items()
        (point,) = [point for point in self.points(name) if wanted <= dict(point.attributes or {}).items()]
        return point.value


@pytest.fixture
def metered() -> Any:
    made = Metered()
    yield made
    made.provider.shutdown()


async def test_a_queue(metered: Metered) -> None:
    async with MessageQueue(1, 1, codec="raw", name="otel") as writer, MessageQueue.attach("otel", 0) as reader:
        metrics = OpenTelemetryMetrics(writer, reader, meter_provider=metered.provider)
        await writer.wait_until_ready(20)
        await writer.enqueue_many([b"1", b"22", b"333"])
        await reader.dequeue(20)
        (sent,) = metered.points("messaging.client.sent.messages")
        (consumed,) = metered.points("messaging.client.consumed.messages")
        assert (sent.value, consumed.value) == (3, 1)
        assert sent.attributes == {
            "messaging.system": "aioshm",
            "messaging.operation.name": "send",
            "messaging.operation.type": "send",
            "messaging.destination.name": "otel",
        }
        assert consumed.attributes["messaging.operation.name"] == "receive"
        assert consumed.attributes["aioshm.rank"] == "0"
        assert metered.value("aioshm.queue.bytes", aioshm__side="writer") == 6
        assert metered.value("aioshm.queue.reader_lag_messages", aioshm__rank="0") == 2
        latencies = {
            point.attributes["aioshm.quantile"]: point.value for point in metered.points("aioshm.queue.latency")
        }
        assert latencies.keys() == {"0.5", "0.99"}
        assert 0 < latencies["0.5"] <= latencies["0.99"]
        metrics.close()
        assert not metered.points("messaging.client.sent.messages")


async def test_the_span_of_a_consumer() -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("tests")
    async with MessageQueue(1, 1, name="spans", options=Options(trace_context=True)) as writer:
        async with MessageQueue.attach("spans", 0) as reader:
            await writer.wait_until_ready(20)
            for _ in range(2):
                with tracer.start_as_current_span("produce"):
                    await writer.enqueue("work")
            await writer.enqueue("no span")
            await reader.dequeue(20)
            with process_span(reader, tracer=tracer):
                pass
            await reader.dequeue(20)
            with process_span(reader, tracer=tracer, parent=True):
                pass
            await reader.dequeue(20)
            with process_span(reader, tracer=tracer, count=3):
                pass
            with pytest.raises(QueueEmpty):
                reader.dequeue_nowait()
    first, second, linked, child, batch = exporter.get_finished_spans()
    assert (linked.name, linked.kind) == ("process spans", SpanKind.CONSUMER)
    assert linked.parent is None
    assert [link.context.span_id for link in linked.links] == [first.context.span_id]
    assert (linked.attributes or {})["messaging.system"] == "aioshm"
    assert child.context.trace_id == second.context.trace_id
    assert child.parent is not None
    assert child.parent.span_id == second.context.span_id
    assert [link.context.span_id for link in batch.links] == [first.context.span_id, second.context.span_id]
    assert (batch.attributes or {})["messaging.batch.message_count"] == 3


def test_without_opentelemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.metrics", None)
    with pytest.raises(ImportError, match=r"pip install 'aioshm\[opentelemetry\]'"):
        OpenTelemetryMetrics()
