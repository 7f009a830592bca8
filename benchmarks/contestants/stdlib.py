"""``multiprocessing.Queue`` and ``Pipe``: one for each reader, carrying what an encoder made once for all of them.

That is quicker than leaving it to them, which make a new pickler for each message and each reader.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.queues import Queue
from typing import Any

from benchmarks.contestants.codecs import decoding, encoder
from benchmarks.contestants.contestant import Contestant, Port, close_all
from benchmarks.framework.workload import Workload

PUT_TIMEOUT_S = 60.0
"""A full queue whose reader has died blocks for ever otherwise."""


def open_pipes(connections: Sequence[Connection], workload: Workload) -> Port:
    """Take the pipes' writing ends."""
    encode, writes = encoder(workload.codec), [connection.send_bytes for connection in connections]
    close = partial(close_all, connections)
    if len(writes) == 1:
        write = writes[0]
        return Port(lambda message: write(encode(message)), close)

    def send(message: Any) -> None:
        data = encode(message)
        for write in writes:
            write(data)

    return Port(send, close)


def open_pipe(connection: Connection, workload: Workload, _rank: int) -> Port:
    """Take a pipe's reading end."""
    return Port(decoding(workload.codec, connection.recv_bytes), connection.close)


def open_queues(queues: Sequence[Queue[Any]], workload: Workload) -> Port:
    """Take the queues to put into."""
    encode = encoder(workload.codec)

    def send(message: Any) -> None:
        data = encode(message)
        for queue in queues:
            queue.put(data, timeout=PUT_TIMEOUT_S)

    def close() -> None:
        for queue in queues:
            queue.close()
            queue.cancel_join_thread()

    return Port(send, close)


def open_queue(queue: Queue[Any], workload: Workload, _rank: int) -> Port:
    """Take the queue to get from."""
    return Port(decoding(workload.codec, queue.get), queue.close)


def _queue(workload: Workload) -> tuple[Queue[Any], Queue[Any]]:
    queue: Queue[Any] = multiprocessing.get_context("spawn").Queue(workload.slots)
    return queue, queue


CONTESTANTS = [
    Contestant("mp.Queue", open_queues, open_queue, False, link=_queue),
    Contestant("mp.Pipe", open_pipes, open_pipe, False),
]
