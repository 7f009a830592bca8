"""aioshm, with its default options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from aioshm import MessageQueue
from benchmarks.payloads import Payload
from benchmarks.rivals.base import Line, ReaderEnd, Receiver, Rival, Sender, WriterEnd
from benchmarks.waiting import readable

READY_TIMEOUT_S = 30.0


class QueueSender(Sender):
    """The writer's end of a queue."""

    def __init__(self, queue: MessageQueue) -> None:
        self._queue = queue
        self.send = queue.enqueue

    async def aclose(self) -> None:
        await self._queue.aclose()


class QueueReceiver(Receiver):
    """A reader's end of a queue."""

    def __init__(self, queue: MessageQueue) -> None:
        self.queue = queue
        self.receive = queue.dequeue

    def parks(self) -> int:
        return self.queue.stats().parks

    async def aclose(self) -> None:
        await self.queue.aclose()


@dataclass(frozen=True)
class QueueWriterEnd(WriterEnd):
    """Creates the queue, and gives its handle to the readers."""

    handles: list[Connection]
    payload: Payload

    def create(self) -> MessageQueue:
        """Return a new queue for as many readers as there are handles to give."""
        n_reader = len(self.handles)
        return MessageQueue(n_reader, n_reader, max_chunk_bytes=self.payload.chunk_bytes, max_chunks=self.payload.slots)

    async def open(self) -> QueueSender:
        queue = self.create()
        try:
            for connection in self.handles:
                connection.send(queue.export_handle())
            await queue.wait_until_ready(READY_TIMEOUT_S)
        except BaseException:
            await queue.aclose()
            raise
        self.leave()
        return QueueSender(queue)

    def leave(self) -> None:
        for connection in self.handles:
            connection.close()


@dataclass(frozen=True)
class QueueReaderEnd(ReaderEnd):
    """Attaches to the queue."""

    handle: Connection
    rank: int

    async def open(self) -> QueueReceiver:
        await readable(self.handle.fileno())
        queue = MessageQueue.create_from_handle(self.handle.recv(), self.rank)
        try:
            await queue.wait_until_ready(READY_TIMEOUT_S)
        except BaseException:
            await queue.aclose()
            raise
        self.leave()
        return QueueReceiver(queue)

    def leave(self) -> None:
        self.handle.close()


def queue_line(
    payload: Payload,
    n_reader: int,
    writer: Callable[[list[Connection], Payload], WriterEnd] = QueueWriterEnd,
    reader: Callable[[Connection, int], ReaderEnd] = QueueReaderEnd,
) -> Line:
    """Make a line of these ends, or of others that exchange a handle."""
    pipes = [Pipe(duplex=False) for _ in range(n_reader)]
    readers = [reader(receiver, rank) for rank, (receiver, _) in enumerate(pipes)]
    return Line(writer([sender for _, sender in pipes], payload), readers)


RIVAL = Rival("aioshm", queue_line, blocks=False)
