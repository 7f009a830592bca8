"""``multiprocessing.Queue``: one for each reader; what it carries are the bytes that ``pickle.dumps`` returned.

That is quicker than leaving it to the queue, which makes a new pickler for each message, and copies arrays once more.
"""

from __future__ import annotations

import multiprocessing
import pickle
from dataclasses import dataclass
from multiprocessing.queues import Queue
from typing import Any

from benchmarks.payloads import Payload
from benchmarks.rivals.base import Line, ReaderEnd, Receiver, Rival, Sender, WriterEnd

PUT_TIMEOUT_S = 30.0
"""A full queue whose reader has died blocks for ever otherwise."""


class QueueSender(Sender):
    """Pickles once, then puts into one queue after the other."""

    def __init__(self, queues: list[Queue[bytes]]) -> None:
        self._queues = queues

    async def send(self, message: Any) -> None:
        data = pickle.dumps(message, 5)
        for queue in self._queues:
            queue.put(data, timeout=PUT_TIMEOUT_S)

    async def aclose(self) -> None:
        for queue in self._queues:
            queue.close()
            queue.cancel_join_thread()


class QueueReceiver(Receiver):
    """Gets from its queue."""

    def __init__(self, queue: Queue[bytes]) -> None:
        self._queue = queue

    async def receive(self) -> Any:
        return pickle.loads(self._queue.get())

    async def aclose(self) -> None:
        self._queue.close()


@dataclass(frozen=True)
class QueueWriterEnd(WriterEnd):
    """The queues to put into."""

    queues: list[Queue[bytes]]

    async def open(self) -> QueueSender:
        return QueueSender(self.queues)

    def leave(self) -> None:
        """Keep it: a queue does not come apart into ends."""


@dataclass(frozen=True)
class QueueReaderEnd(ReaderEnd):
    """The queue to get from."""

    queue: Queue[bytes]

    async def open(self) -> QueueReceiver:
        return QueueReceiver(self.queue)

    def leave(self) -> None:
        """Keep it: a queue does not come apart into ends."""


def _line(payload: Payload, n_reader: int) -> Line:
    context = multiprocessing.get_context("spawn")
    queues: list[Queue[bytes]] = [context.Queue(payload.slots) for _ in range(n_reader)]
    return Line(QueueWriterEnd(queues), [QueueReaderEnd(queue) for queue in queues])


RIVAL = Rival("mp.Queue", _line, blocks=True)
