"""``multiprocessing.Queue`` and ``Pipe``: one for each reader, carrying what an encoder made once for all of them.

That is quicker than leaving it to them, which make a new pickler for each message and each reader.
"""

from __future__ import annotations

import multiprocessing
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.queues import Queue
from typing import Any

from benchmarks.compare.codecs import decoder, encoder
from benchmarks.compare.contestant import ALL_CODECS, Codec, Contestant, End, Job, Line, Port

PUT_TIMEOUT_S = 60.0
"""A full queue whose reader has died blocks for ever otherwise."""


@dataclass(frozen=True)
class PipesWriter(End):
    """The pipes' writing ends."""

    connections: tuple[Connection, ...]
    codec: Codec

    def open(self) -> Port:
        encode, writes = encoder(self.codec), [connection.send_bytes for connection in self.connections]
        if len(writes) == 1:
            write = writes[0]
            return Port(lambda message: write(encode(message)), self.leave)

        def send(message: Any) -> None:
            data = encode(message)
            for write in writes:
                write(data)

        return Port(send, self.leave)

    def leave(self) -> None:
        for connection in self.connections:
            connection.close()


@dataclass(frozen=True)
class PipeReader(End):
    """A pipe's reading end."""

    connection: Connection
    codec: Codec

    def open(self) -> Port:
        decode, read = decoder(self.codec), self.connection.recv_bytes
        return Port(read if self.codec == "raw" else lambda: decode(read()), self.leave)

    def leave(self) -> None:
        self.connection.close()


def _pipes(job: Job) -> Line:
    pipes = [Pipe(duplex=False) for _ in range(job.n_reader)]
    writer = PipesWriter(tuple(sender for _, sender in pipes), job.codec)
    return Line(writer, [PipeReader(receiver, job.codec) for receiver, _ in pipes])


@dataclass(frozen=True)
class QueuesWriter(End):
    """The queues to put into."""

    queues: tuple[Queue[Any], ...]
    codec: Codec

    def open(self) -> Port:
        encode = encoder(self.codec)

        def send(message: Any) -> None:
            data = encode(message)
            for queue in self.queues:
                queue.put(data, timeout=PUT_TIMEOUT_S)

        def close() -> None:
            for queue in self.queues:
                queue.close()
                queue.cancel_join_thread()

        return Port(send, close)


@dataclass(frozen=True)
class QueueReader(End):
    """The queue to get from."""

    queue: Queue[Any]
    codec: Codec

    def open(self) -> Port:
        decode, get = decoder(self.codec), self.queue.get
        return Port(get if self.codec == "raw" else lambda: decode(get()), self.queue.close)


def _queues(job: Job) -> Line:
    context = multiprocessing.get_context("spawn")
    queues: list[Queue[Any]] = [context.Queue(job.slots) for _ in range(job.n_reader)]
    return Line(QueuesWriter(tuple(queues), job.codec), [QueueReader(queue, job.codec) for queue in queues])


CONTESTANTS = [
    Contestant("mp.Queue", _queues, False, "multiprocessing", "multiprocessing", ALL_CODECS),
    Contestant("mp.Pipe", _pipes, False, "multiprocessing", "multiprocessing", ALL_CODECS),
]
