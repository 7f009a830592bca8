"""faster-fifo: one queue for each reader, carrying what an encoder made once; readers take many at a time.

Taking many is what its documentation recommends, and what makes it fast.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from benchmarks.compare.codecs import decoder, encoder
from benchmarks.compare.contestant import SMALL_CODECS, Codec, Contestant, End, Job, Line, Port

BUFFER_BYTES = 1 << 20
"""Its default, about."""

WAIT_S = 60.0


@dataclass(frozen=True)
class WriterEnd(End):
    """The queues to put into."""

    queues: tuple[Any, ...]
    codec: Codec

    def open(self) -> Port:
        encode, puts = encoder(self.codec), [queue.put for queue in self.queues]

        def send(message: Any) -> None:
            data = encode(message)
            for put in puts:
                put(data, True, WAIT_S)

        return Port(send, _nothing)


@dataclass(frozen=True)
class ReaderEnd(End):
    """The queue to get from."""

    queue: Any
    codec: Codec

    def open(self) -> Port:
        decode, get_many, taken = decoder(self.codec), self.queue.get_many, deque[Any]()

        def receive() -> Any:
            if not taken:
                taken.extend(get_many(True, WAIT_S))
            return decode(taken.popleft())

        return Port(receive, _nothing)


def _as_bytes(data: Any) -> bytes:
    return bytes(data)


def _line(job: Job) -> Line:
    import faster_fifo
    import faster_fifo_reduction  # noqa: F401  # lets its queues travel to a spawned process

    # Plain functions for loads and dumps: what it carries is encoded already.
    queues = tuple(faster_fifo.Queue(BUFFER_BYTES, loads=_as_bytes, dumps=_as_bytes) for _ in range(job.n_reader))
    return Line(WriterEnd(queues, job.codec), [ReaderEnd(queue, job.codec) for queue in queues])


def _nothing() -> None:
    pass  # its memory goes with the last process that holds it


CONTESTANTS = [Contestant("faster-fifo", _line, False, "faster_fifo", "faster-fifo", SMALL_CODECS)]
