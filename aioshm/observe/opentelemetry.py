"""Metrics and spans for OpenTelemetry, by its semantic conventions for messaging where these have a name."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any

from aioshm.deferred import import_extra
from aioshm.observe.metrics import SECTIONS, Metric, Observer, Sample
from aioshm.ring.header import Latency

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation
    from opentelemetry.trace import Span, Tracer

    from aioshm.queue.tracing import TraceContext

_SYSTEM = "aioshm"
_QUANTILES = (0.5, 0.99)


class OpenTelemetryMetrics(Observer):
    """Exports the metrics of queues, workers, engines and events of this process to OpenTelemetry.

        metrics = OpenTelemetryMetrics(queue, group)  # with the global meter provider
        ...
        metrics.close()

    Queues have ``messaging.client.sent.messages`` and ``messaging.client.consumed.messages``, with the attributes
    ``messaging.system="aioshm"``, ``messaging.operation.name`` and ``messaging.destination.name``. All other metrics
    are those of `PrometheusCollector`, such as ``aioshm.queue.backlog_messages``, with latencies as quantiles. The
    provider reads the statistics when it exports; the observed objects do no extra work, and are held weakly.

    Args:
        observed: Objects to observe; see `add`.
        meter_provider: The provider of the meter; None: the global one.

    Raises:
        ImportError: OpenTelemetry is not installed; the text names the extra.
        TypeError: An object cannot be observed.
    """

    def __init__(self, *observed: Any, meter_provider: MeterProvider | None = None) -> None:
        api = import_extra("opentelemetry.metrics", "opentelemetry", "OpenTelemetryMetrics needs OpenTelemetry's API")
        self._observation: type[Observation] = api.Observation
        self._closed = False
        meter = api.get_meter(_SYSTEM, meter_provider=meter_provider)
        super().__init__(*observed)
        sent = [functools.partial(self._messages, "writer", "send")]
        meter.create_observable_counter(
            "messaging.client.sent.messages", sent, "{message}", "Messages that a writer has sent."
        )
        consumed = [functools.partial(self._messages, "reader", "receive")]
        meter.create_observable_counter(
            "messaging.client.consumed.messages", consumed, "{message}", "Messages that a reader has received."
        )
        sections = [section for title, section in SECTIONS.items() if not title.startswith("host")]
        for metric in chain.from_iterable(sections):
            create = meter.create_observable_gauge
            if metric.kind == "counter":
                create = meter.create_observable_counter
            observe = [functools.partial(self._observe, metric)]
            first, _, rest = metric.name.partition("_")
            create(f"aioshm.{first}.{rest.removesuffix('_seconds')}", observe, metric.unit, metric.help)

    def close(self) -> None:
        """Stop observing all objects: a meter's instruments cannot be removed."""
        self._closed = True

    # The meter calls the following methods in its own thread.

    def _samples(self) -> list[Sample]:
        if self._closed:
            return []
        return super()._samples()

    def _messages(self, side: str, name: str, _: CallbackOptions) -> Iterator[Observation]:
        for metric, labels, value in self._samples():
            if metric.name == "queue_messages" and labels[1] == side:
                attributes = _operation(labels[0], name)
                if labels[2]:
                    attributes["aioshm.rank"] = labels[2]
                yield self._observation(int(value), attributes)

    def _observe(self, wanted: Metric, _: CallbackOptions) -> Iterator[Observation]:
        for metric, labels, value in self._samples():
            if metric is not wanted:
                continue
            attributes = {f"aioshm.{name}": label for name, label in zip(metric.labels, labels, strict=True) if label}
            if not isinstance(value, Latency):
                yield self._observation(value, attributes)
                continue
            for q in _QUANTILES:
                if (quantile := value.quantile(q)) is not None:
                    yield self._observation(quantile, {**attributes, "aioshm.quantile": str(q)})


def _operation(queue: str, name: str) -> dict[str, str]:
    """Return the attributes of ``"send"``, ``"receive"`` or ``"process"``, by the conventions."""
    return {
        "messaging.system": _SYSTEM,
        "messaging.operation.name": name,
        "messaging.operation.type": name,
        "messaging.destination.name": queue,
    }


@contextmanager
def process_span(reader: Any, *, count: int = 1, tracer: Tracer | None = None, parent: bool = False) -> Iterator[Span]:
    """Open a span for the processing of received messages, with links to the spans that sent them.

        message = await mq.dequeue()
        with process_span(mq):
            ...

    Args:
        reader: A reader's `MessageQueue`, of either API; its writer needs ``Options(trace_context=True)``.
        count: The number of messages, counted back from the last one received: ``len(batch)`` after ``dequeue_many``.
        tracer: Makes the span; None: the global provider's tracer.
        parent: Whether the span continues the trace of the last message instead of the current trace.

    Raises:
        ImportError: OpenTelemetry is not installed; the text names the extra.
        RoleError: ``reader`` is a writer.
    """
    api = import_extra("opentelemetry.trace", "opentelemetry", "process_span needs OpenTelemetry's API")
    contexts: list[TraceContext | None] = reader.trace_contexts(count)
    sent = [context for context in contexts if context is not None]
    queue = reader.stats().queue
    attributes: dict[str, Any] = dict(_operation(queue, "process"))
    if count > 1:
        attributes["messaging.batch.message_count"] = count
    context = None
    if parent and sent:
        context = sent[-1].context()
    with (tracer or api.get_tracer(_SYSTEM)).start_as_current_span(
        f"process {queue}",
        context=context,
        kind=api.SpanKind.CONSUMER,
        links=[context.link() for context in sent],
        attributes=attributes,
    ) as span:
        yield span
