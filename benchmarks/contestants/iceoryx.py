"""iceoryx2's Python package: publish and subscribe without loss, the subscriber polling or woken by an event.

The payload is a slice of bytes, filled and read by one ``memmove`` each: what its Python examples do with structures.
"""

from __future__ import annotations

import ctypes
import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.contestants.codecs import decoder, encoder
from benchmarks.contestants.contestant import SMALL_CODECS, Contestant, Port, hand, handed
from benchmarks.framework.workload import Workload

LARGEST_BYTES = 4096
"""What a slice has room for at first; the messages here are smaller."""


def open_writer(links: Sequence[Connection], workload: Workload, *, events: bool) -> Port:
    """Publish, and notify if there are events."""
    import iceoryx2 as iox2

    name, n_reader = f"aioshm-benchmark/{secrets.token_hex(8)}", len(links)
    node, service = _service(name, workload, n_reader)
    publisher = (
        service.publisher_builder()
        .initial_max_slice_len(LARGEST_BYTES)
        .backpressure_strategy(iox2.BackpressureStrategy.RetryUntilDelivered)
        .create()
    )
    event_service: Any = _event_service(node, name, n_reader) if events else None
    notifier: Any = event_service.notifier_builder().create() if events else None
    hand(links, (name, n_reader))
    if events:
        _until(lambda: event_service.dynamic_config.number_of_listeners >= n_reader)
    _until(lambda: service.dynamic_config.number_of_subscribers >= n_reader)
    publisher.update_connections()
    encode, loan, memmove = encoder(workload.codec), publisher.loan_slice_uninit, ctypes.memmove
    loan(1).assume_init().send()  # says hello, so that both sides know each other before messages are in a hurry

    def send(message: Any) -> None:
        data = encode(message)
        sample = loan(len(data))
        memmove(sample.payload_ptr, data, len(data))
        sample.assume_init().send()

    def send_and_notify(message: Any) -> None:
        send(message)
        notifier.notify()

    return Port(send_and_notify if events else send, _held(node, service, publisher, notifier))


def open_reader(link: Connection, workload: Workload, _rank: int, *, events: bool) -> Port:
    """Poll, or wait for an event and take whatever is there."""
    name, n_reader = handed(link)
    node, service = _service(name, workload, n_reader)
    subscriber = service.subscriber_builder().create()
    listener: Any = _event_service(node, name, n_reader).listener_builder().create() if events else None
    decode, take, read = decoder(workload.codec), subscriber.receive, ctypes.string_at
    _until(lambda: take() is not None)  # the writer's hello

    def poll() -> Any:
        while (sample := take()) is None:
            pass
        return decode(read(sample.payload_ptr, sample.header.number_of_elements))

    def wait() -> Any:
        while (sample := take()) is None:
            listener.blocking_wait()  # an event that came before is still there: none is lost
        return decode(read(sample.payload_ptr, sample.header.number_of_elements))

    return Port(wait if events else poll, _held(node, service, subscriber, listener))


def _service(name: str, workload: Workload, n_reader: int) -> tuple[Any, Any]:
    import iceoryx2 as iox2

    iox2.set_log_level(iox2.LogLevel.Error)
    node = iox2.NodeBuilder.new().create(iox2.ServiceType.Ipc)
    service = (
        node.service_builder(iox2.ServiceName.new(name))
        .publish_subscribe(iox2.Slice[ctypes.c_uint8])
        .enable_safe_overflow(False)
        .subscriber_max_buffer_size(workload.slots)
        .history_size(0)
        .max_publishers(1)
        .max_subscribers(n_reader)
        .open_or_create()
    )
    return node, service


def _event_service(node: Any, name: str, n_reader: int) -> Any:
    import iceoryx2 as iox2

    builder = node.service_builder(iox2.ServiceName.new(f"{name}/event")).event()
    return builder.max_notifiers(1).max_listeners(n_reader).open_or_create()


def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.01)


def _held(*parts: Any) -> Callable[[], None]:
    """Return what closes an end: it keeps all its parts alive until then."""
    kept = list(parts)

    def close() -> None:
        kept.clear()

    return close


def _contestant(name: str, events: bool) -> Contestant:
    ends = partial(open_writer, events=events), partial(open_reader, events=events)
    return Contestant(name, *ends, False, "iceoryx2", "iceoryx2", SMALL_CODECS)


CONTESTANTS = [_contestant("iceoryx2 polling", False), _contestant("iceoryx2 event", True)]
