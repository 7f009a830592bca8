"""iceoryx2's Python package: publish and subscribe without loss, with a subscriber that polls.

The payload is a slice of bytes, filled and read by one ``memmove`` each: what its Python examples do with structures.
"""

from __future__ import annotations

import ctypes
import secrets
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.contestants.codecs import decoder, encoder
from benchmarks.contestants.contestant import Contestant, Port, hand, handed
from benchmarks.framework.workload import Workload

LARGEST_BYTES = 4096
"""The first size of a slice; the messages here are smaller."""


def open_writer(links: Sequence[Connection], workload: Workload) -> Port:
    """Publish."""
    import iceoryx2 as iox2

    name, n_reader = f"aioshm-benchmark/{secrets.token_hex(8)}", len(links)
    node, service = _service(name, workload, n_reader)
    publisher = (
        service.publisher_builder()
        .initial_max_slice_len(LARGEST_BYTES)
        .backpressure_strategy(iox2.BackpressureStrategy.RetryUntilDelivered)
        .create()
    )
    hand(links, (name, n_reader))
    _until(lambda: service.dynamic_config.number_of_subscribers >= n_reader)
    publisher.update_connections()
    encode, loan, memmove = encoder(workload.codec), publisher.loan_slice_uninit, ctypes.memmove
    loan(1).assume_init().send()  # a hello, so that both sides know each other before messages are in a hurry

    def send(message: Any) -> None:
        data = encode(message)
        sample = loan(len(data))
        memmove(sample.payload_ptr, data, len(data))
        sample.assume_init().send()

    return Port(send, _held(node, service, publisher))


def open_reader(link: Connection, workload: Workload, _rank: int) -> Port:
    """Poll."""
    name, n_reader = handed(link)
    node, service = _service(name, workload, n_reader)
    subscriber = service.subscriber_builder().create()
    decode, take, read = decoder(workload.codec), subscriber.receive, ctypes.string_at
    _until(lambda: take() is not None)  # the writer's hello

    def poll() -> Any:
        while (sample := take()) is None:
            pass
        return decode(read(sample.payload_ptr, sample.header.number_of_elements))

    return Port(poll, _held(node, service, subscriber))


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


def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.01)


def _held(*parts: Any) -> Callable[[], None]:
    """Return a function that closes an end; it keeps all parts alive until then."""
    kept = list(parts)

    def close() -> None:
        kept.clear()

    return close


CONTESTANTS = [Contestant("iceoryx2 polling", open_writer, open_reader, False, ("iceoryx2",))]
