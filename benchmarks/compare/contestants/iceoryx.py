"""iceoryx2's Python package: publish and subscribe without loss, the subscriber polling or woken by an event.

The payload is a slice of bytes, filled and read by one ``memmove`` each: what its Python examples do with structures.
"""

from __future__ import annotations

import ctypes
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.compare.codecs import decoder, encoder
from benchmarks.compare.contestant import SMALL_CODECS, Contestant, End, Job, Line, Port

LARGEST_BYTES = 4096
"""What a slice has room for at first; the messages here are smaller."""


@dataclass(frozen=True)
class WriterEnd(End):
    """Publishes, and notifies if there are events."""

    name: str
    job: Job
    events: bool

    def open(self) -> Port:
        import iceoryx2 as iox2

        node, service = _service(self.name, self.job)
        publisher = (
            service.publisher_builder()
            .initial_max_slice_len(LARGEST_BYTES)
            .backpressure_strategy(iox2.BackpressureStrategy.RetryUntilDelivered)
            .create()
        )
        notifier: Any = None
        if self.events:
            event_service = _event_service(node, self.name, self.job)
            notifier = event_service.notifier_builder().create()
            _until(lambda: event_service.dynamic_config.number_of_listeners >= self.job.n_reader)
        _until(lambda: service.dynamic_config.number_of_subscribers >= self.job.n_reader)
        publisher.update_connections()
        encode, loan, memmove = encoder(self.job.codec), publisher.loan_slice_uninit, ctypes.memmove
        loan(1).assume_init().send()  # says hello, so that both sides know each other before messages are in a hurry

        def send(message: Any) -> None:
            data = encode(message)
            sample = loan(len(data))
            memmove(sample.payload_ptr, data, len(data))
            sample.assume_init().send()

        def send_and_notify(message: Any) -> None:
            send(message)
            notifier.notify()

        return Port(send if notifier is None else send_and_notify, _held(node, service, publisher, notifier))


@dataclass(frozen=True)
class ReaderEnd(End):
    """Polls, or waits for an event and takes whatever is there."""

    name: str
    job: Job
    events: bool

    def open(self) -> Port:
        node, service = _service(self.name, self.job)
        subscriber = service.subscriber_builder().create()
        listener: Any = _event_service(node, self.name, self.job).listener_builder().create() if self.events else None
        decode, take, read = decoder(self.job.codec), subscriber.receive, ctypes.string_at
        _until(lambda: take() is not None)  # the writer's hello

        def poll() -> Any:
            while (sample := take()) is None:
                pass
            return decode(read(sample.payload_ptr, sample.header.number_of_elements))

        def wait() -> Any:
            while (sample := take()) is None:
                listener.blocking_wait()  # an event that came before is still there: none is lost
            return decode(read(sample.payload_ptr, sample.header.number_of_elements))

        return Port(poll if listener is None else wait, _held(node, service, subscriber, listener))


def _service(name: str, job: Job) -> tuple[Any, Any]:
    import iceoryx2 as iox2

    iox2.set_log_level(iox2.LogLevel.Error)
    node = iox2.NodeBuilder.new().create(iox2.ServiceType.Ipc)
    service = (
        node.service_builder(iox2.ServiceName.new(name))
        .publish_subscribe(iox2.Slice[ctypes.c_uint8])
        .enable_safe_overflow(False)
        .subscriber_max_buffer_size(job.slots)
        .history_size(0)
        .max_publishers(1)
        .max_subscribers(job.n_reader)
        .open_or_create()
    )
    return node, service


def _event_service(node: Any, name: str, job: Job) -> Any:
    import iceoryx2 as iox2

    builder = node.service_builder(iox2.ServiceName.new(f"{name}/event")).event()
    return builder.max_notifiers(1).max_listeners(job.n_reader).open_or_create()


def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.01)


def _held(*parts: Any) -> Callable[[], None]:
    """Return what closes an end: it keeps all its parts alive until then."""
    kept = list(parts)

    def close() -> None:
        kept.clear()

    return close


def _lines(events: bool) -> Callable[[Job], Line]:
    def line(job: Job) -> Line:
        name = f"aioshm-compare/{secrets.token_hex(8)}"
        return Line(WriterEnd(name, job, events), [ReaderEnd(name, job, events)] * job.n_reader)

    return line


CONTESTANTS = [
    Contestant("iceoryx2 polling", _lines(False), False, "iceoryx2", "iceoryx2", SMALL_CODECS),
    Contestant("iceoryx2 event", _lines(True), False, "iceoryx2", "iceoryx2", SMALL_CODECS),
]
