"""faster-fifo: one queue for each reader, carrying what an encoder made once; readers take many at a time.

Taking many is what its documentation recommends, and what makes it fast.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from benchmarks.contestants.codecs import decoder, encoder
from benchmarks.contestants.contestant import SMALL_CODECS, Contestant, Port
from benchmarks.framework.workload import Workload

BUFFER_BYTES = 1 << 20
"""Its default, about."""

WAIT_S = 60.0


def open_writer(queues: Sequence[Any], workload: Workload) -> Port:
    """Take the queues to put into."""
    encode, puts = encoder(workload.codec), [queue.put for queue in queues]

    def send(message: Any) -> None:
        data = encode(message)
        for put in puts:
            put(data, True, WAIT_S)

    return Port(send, _nothing)


def open_reader(queue: Any, workload: Workload, _rank: int) -> Port:
    """Take the queue to get from."""
    decode, get_many, taken = decoder(workload.codec), queue.get_many, deque[Any]()

    def receive() -> Any:
        if not taken:
            taken.extend(get_many(True, WAIT_S))
        return decode(taken.popleft())

    return Port(receive, _nothing)


def _as_bytes(data: Any) -> bytes:
    return bytes(data)


def _link(_workload: Workload) -> tuple[Any, Any]:
    import faster_fifo
    import faster_fifo_reduction  # noqa: F401  # lets its queues travel to a spawned process

    # Plain functions for loads and dumps: what it carries is encoded already.
    queue = faster_fifo.Queue(BUFFER_BYTES, loads=_as_bytes, dumps=_as_bytes)
    return queue, queue


def _nothing() -> None:
    pass  # its memory goes with the last process that holds it


CONTESTANTS = [
    Contestant("faster-fifo", open_writer, open_reader, False, "faster_fifo", "faster-fifo", SMALL_CODECS, _link)
]
