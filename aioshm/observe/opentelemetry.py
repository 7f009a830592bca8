"""Metrics and spans for OpenTelemetry, by its semantic conventions for messaging where these have a name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, Any

from aioshm.deferred import import_extra
from aioshm.observe.families import FAMILIES, Family
from aioshm.observe.figures import Figure, Observer, Told
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
    """Tells OpenTelemetry of queues, workers, engines and events of this process.

        metrics = OpenTelemetryMetrics(queue, group)  # with the global meter provider
        ...
        metrics.close()

    Of queues there are ``messaging.client.sent.messages`` and ``messaging.client.consumed.messages``, with
    ``messaging.system="aioshm"``, ``messaging.operation.name`` and ``messaging.destination.name``; everything else is
    what `PrometheusCollector` tells, as ``aioshm.queue.backlog_messages`` and so on, with how long messages took as
    quantiles. It is read when the provider asks, and costs those that are observed nothing else. They are held weakly.

    With ``durations=True`` calls of queues are timed, too (``messaging.client.operation.duration``), those by which a
    queue is sent to and received from with ``await`` or by calling: this takes some microseconds for each, and the
    calls are no longer the native core's own. Leases, loans and iterations are not timed.

    Args:
        told: What to observe; see `add`.
        meter_provider: Whose meter to use; None: the global one.
        durations: Whether to time calls of queues that are added.

    Raises:
        ImportError: OpenTelemetry is not installed; the text names the extra.
        TypeError: Something cannot be observed.
    """

    def __init__(self, *told: Told, meter_provider: MeterProvider | None = None, durations: bool = False) -> None:
        api = import_extra("opentelemetry.metrics", "opentelemetry", "OpenTelemetryMetrics needs OpenTelemetry's API")
        self._observation: type[Observation] = api.Observation
        super().__init__()
        self._closed = False
        meter = api.get_meter(_INTERFACE, meter_provider=meter_provider)
        self._durations: Any = None
        if durations:
            self._durations = meter.create_histogram(
                DURATION,
                "s",
                "How long a call took that sends or receives.",
                explicit_bucket_boundaries_advisory=DURATION_BOUNDS_S,
            )
        for name, side in ((SENT, "writer"), (CONSUMED, "reader")):
            text = f"Messages that a {side} has {'sent' if side == 'writer' else 'received'}."
            meter.create_observable_counter(name, [functools.partial(self._messages, side)], "{message}", text)
        for family in FAMILIES:
            create = meter.create_observable_counter if family.kind == "counter" else meter.create_observable_gauge
            observe = [functools.partial(self._observe, family)]
            create(f"aioshm.{_dotted(family.name)}", observe, family.unit, family.help)
        for each in told:
            self.add(each)

    def add(self, told: Told, name: str = "") -> None:
        """Observe an object, as long as it lives.

        Args:
            told: What `PrometheusCollector.add` takes.
            name: What it is called; empty: what it is called anyway.

        Raises:
            TypeError: It is nothing of the kind.
        """
        super().add(told, name)
        if self._durations is not None:
            self._time(told, name)

    def remove(self, told: Told) -> None:
        """Observe an object no more; does nothing if it was not observed."""
        super().remove(told)
        for call in _OPERATIONS:
            if getattr(vars(told).get(call), "__wrapped__", None) is not None:
                setattr(told, call, vars(told)[call].__wrapped__)

    def close(self) -> None:
        """Observe nothing any more: a meter's instruments cannot be taken back."""
        self._closed = True

    # What the meter calls, in its own thread

    def _figures(self) -> Iterable[Figure]:
        return () if self._closed else self._sources.figures()

    def _messages(self, side: str, _: CallbackOptions) -> Iterator[Observation]:
        for family, labels, value in self._figures():
            if family.name == "queue_messages" and labels[1] == side:
                attributes = operation(labels[0], "send" if side == "writer" else "receive")
                if labels[2]:
                    attributes["aioshm.rank"] = labels[2]
                yield self._observation(int(value), attributes)  # type: ignore[arg-type]

    def _observe(self, wanted: Family, _: CallbackOptions) -> Iterator[Observation]:
        for family, labels, value in self._figures():
            if family is not wanted:
                continue
            attributes = {f"aioshm.{name}": label for name, label in zip(family.labels, labels, strict=True) if label}
            if not isinstance(value, Latency):
                yield self._observation(value, attributes)
                continue
            for q in _QUANTILES:
                if (quantile := value.quantile(q)) is not None:
                    yield self._observation(quantile, {**attributes, "aioshm.quantile": str(q)})

    # Durations

    def _time(self, told: Any, name: str) -> None:
        for call, operation_name in _OPERATIONS.items():
            timed = getattr(told, call, None)
            if timed is not None and not hasattr(timed, "__wrapped__"):
                attributes = operation(name or told.stats().queue, operation_name)
                record = functools.partial(self._record, attributes)
                setattr(told, call, _timed(timed, record, awaits=hasattr(type(told), "__aiter__")))

    def _record(self, attributes: Mapping[str, str], took_s: float, error: BaseException | None) -> None:
        if not self._closed:
            failed = {} if error is None else {"error.type": type(error).__name__}
            self._durations.record(took_s, {**attributes, **failed})


def operation(queue: str, name: str) -> dict[str, str]:
    """Return the attributes of an operation of a queue, by the conventions.

    Args:
        queue: Its name.
        name: ``"send"``, ``"receive"`` or ``"process"``.
    """
    return {
        "messaging.system": SYSTEM,
        "messaging.operation.name": name,
        "messaging.operation.type": name,
        "messaging.destination.name": queue,
    }


@contextmanager
def process_span(reader: Any, *, count: int = 1, tracer: Tracer | None = None, parent: bool = False) -> Iterator[Span]:
    """Have a span in which received messages are processed, linked to those in which they were sent.

        message = await mq.dequeue()
        with process_span(mq):
            ...

    Args:
        reader: A reader's `MessageQueue`, of either face, whose writer has ``Options(trace_context=True)``.
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
    """Return the name of a family after OpenTelemetry's conventions: what it is of, a dot, what it is."""
    first, _, rest = name.partition("_")
    return f"{first}.{rest.removesuffix('_seconds')}"


def _timed(
    call: Callable[..., Any], record: Callable[[float, BaseException | None], None], *, awaits: bool
) -> Callable[..., Any]:
    """Return what calls, or awaits, and records how long that took."""

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
