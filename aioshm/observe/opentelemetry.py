"""Metrics and spans for OpenTelemetry, by its semantic conventions for messaging where these have a name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, Any

from aioshm.deferred import import_extra
from aioshm.observe.metrics import SECTIONS, Metric, Observer, Sample
from aioshm.ring.header import Latency

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation
    from opentelemetry.trace import Span, Tracer

    from aioshm.queue.tracing import TraceContext

SYSTEM = "aioshm"
SENT, CONSUMED = "messaging.client.sent.messages", "messaging.client.consumed.messages"
DURATION = "messaging.client.operation.duration"

DURATION_BOUNDS_S = (1e-6, 5e-6, 2e-5, 1e-4, 5e-4, 0.001, 0.005, 0.025, 0.1, 0.5, 1, 5, 10)
"""Those of the conventions begin with 5 ms, below which nearly every message of a queue would be."""

_QUANTILES = (0.5, 0.99)
_OPERATIONS = {"enqueue": "send", "enqueue_many": "send", "dequeue": "receive", "dequeue_many": "receive"}
_INTERFACE = "aioshm"


class OpenTelemetryMetrics(Observer):
    """Exports the metrics of queues, workers, engines and events of this process to OpenTelemetry.

        metrics = OpenTelemetryMetrics(queue, group)  # with the global meter provider
        ...
        metrics.close()

    Of queues there are ``messaging.client.sent.messages`` and ``messaging.client.consumed.messages``, with
    ``messaging.system="aioshm"``, ``messaging.operation.name`` and ``messaging.destination.name``. All other metrics
    are those of `PrometheusCollector`, as ``aioshm.queue.backlog_messages`` and so on, with latencies as quantiles.
    Statistics are read when the provider asks, and cost the observed objects nothing else. The objects are held weakly.

    With ``durations=True`` calls of queues are timed, too (``messaging.client.operation.duration``): enqueue, dequeue
    and their ``_many``. This takes some microseconds for each call, and the native core's own calls are not used then.
    Leases, loans and iterations are not timed.

    Args:
        observed: Objects to observe; see `add`.
        meter_provider: The provider of the meter; None: the global one.
        durations: Whether to time calls of queues that are added.

    Raises:
        ImportError: OpenTelemetry is not installed; the text names the extra.
        TypeError: An object cannot be observed.
    """

    def __init__(self, *observed: Any, meter_provider: MeterProvider | None = None, durations: bool = False) -> None:
        api = import_extra("opentelemetry.metrics", "opentelemetry", "OpenTelemetryMetrics needs OpenTelemetry's API")
        self._observation: type[Observation] = api.Observation
        self._closed = False
        meter = api.get_meter(_INTERFACE, meter_provider=meter_provider)
        self._durations: Any = None
        if durations:
            self._durations = meter.create_histogram(
                DURATION,
                "s",
                "Duration of a call that sends or receives.",
                explicit_bucket_boundaries_advisory=DURATION_BOUNDS_S,
            )
        super().__init__(*observed)
        for name, side, done in ((SENT, "writer", "sent"), (CONSUMED, "reader", "received")):
            text = f"Messages that a {side} has {done}."
            meter.create_observable_counter(name, [functools.partial(self._messages, side)], "{message}", text)
        for section, metrics in SECTIONS.items():
            for metric in () if section.startswith("host") else metrics:
                create = meter.create_observable_counter if metric.kind == "counter" else meter.create_observable_gauge
                observe = [functools.partial(self._observe, metric)]
                create(f"aioshm.{_dotted(metric.name)}", observe, metric.unit, metric.help)

    def add(self, observed: Any, name: str = "") -> None:
        """Observe an object, as long as it lives.

        Args:
            observed: An object that `PrometheusCollector.add` takes.
            name: Its name in attributes; empty: the name that it has.

        Raises:
            TypeError: It is an object of another kind.
        """
        super().add(observed, name)
        if self._durations is not None:
            self._time(observed, name)

    def remove(self, observed: Any) -> None:
        """Stop observing an object; does nothing if it was not observed."""
        super().remove(observed)
        for call in _OPERATIONS:
            if getattr(vars(observed).get(call), "__wrapped__", None) is not None:
                setattr(observed, call, vars(observed)[call].__wrapped__)

    def close(self) -> None:
        """Stop observing all objects: a meter's instruments cannot be removed."""
        self._closed = True

    # The meter calls these in its own thread.

    def _samples(self) -> list[Sample]:
        return [] if self._closed else super()._samples()

    def _messages(self, side: str, _: CallbackOptions) -> Iterator[Observation]:
        for metric, labels, value in self._samples():
            if metric.name == "queue_messages" and labels[1] == side:
                attributes = operation(labels[0], "send" if side == "writer" else "receive")
                if labels[2]:
                    attributes["aioshm.rank"] = labels[2]
                yield self._observation(int(value), attributes)  # type: ignore[arg-type]

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

    # Durations

    def _time(self, observed: Any, name: str) -> None:
        for call, operation_name in _OPERATIONS.items():
            timed = getattr(observed, call, None)
            if timed is not None and not hasattr(timed, "__wrapped__"):
                attributes = operation(name or observed.stats().queue, operation_name)
                record = functools.partial(self._record, attributes)
                setattr(observed, call, _timed(timed, record, awaits=hasattr(type(observed), "__aiter__")))

    def _record(self, attributes: Mapping[str, str], took_s: float, error: BaseException | None) -> None:
        if not self._closed:
            failed = {} if error is None else {"error.type": type(error).__name__}
            self._durations.record(took_s, {**attributes, **failed})


def operation(queue: str, name: str) -> dict[str, str]:
    """Return the attributes of ``"send"``, ``"receive"`` or ``"process"``, by the conventions."""
    return {
        "messaging.system": SYSTEM,
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
        reader: A reader's `MessageQueue`, of either API, whose writer has ``Options(trace_context=True)``.
        count: How many of the messages that it received last: ``len(batch)`` after ``dequeue_many``.
        tracer: Makes the span; None: that of the global provider.
        parent: Whether the span belongs to the trace of the last message, instead of that which is current here.

    Raises:
        ImportError: OpenTelemetry is not installed; the text names the extra.
        RoleError: It is a writer.
    """
    api = import_extra("opentelemetry.trace", "opentelemetry", "process_span needs OpenTelemetry's API")
    contexts: list[TraceContext | None] = reader.trace_contexts(count)
    sent = [context for context in contexts if context is not None]
    queue = reader.stats().queue
    attributes: dict[str, Any] = dict(operation(queue, "process"))
    if count > 1:
        attributes["messaging.batch.message_count"] = count
    with (tracer or api.get_tracer(_INTERFACE)).start_as_current_span(
        f"process {queue}",
        context=sent[-1].context() if parent and sent else None,
        kind=api.SpanKind.CONSUMER,
        links=[context.link() for context in sent],
        attributes=attributes,
    ) as span:
        yield span


def _dotted(name: str) -> str:
    """Return a metric's name by OpenTelemetry's conventions."""
    first, _, rest = name.partition("_")
    return f"{first}.{rest.removesuffix('_seconds')}"


def _timed(
    call: Callable[..., Any], record: Callable[[float, BaseException | None], None], *, awaits: bool
) -> Callable[..., Any]:
    """Return a function that calls, or awaits, ``call`` and records the duration."""

    @contextmanager
    def timing() -> Iterator[None]:
        began, failure = perf_counter(), None
        try:
            yield
        except BaseException as error:
            failure = error
            raise
        finally:
            record(perf_counter() - began, failure)

    @functools.wraps(call)
    async def awaited(*args: Any, **kwargs: Any) -> Any:
        with timing():
            return await call(*args, **kwargs)

    @functools.wraps(call)
    def called(*args: Any, **kwargs: Any) -> Any:
        with timing():
            return call(*args, **kwargs)

    return awaited if awaits else called
