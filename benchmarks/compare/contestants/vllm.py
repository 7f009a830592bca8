"""vLLM's own ``MessageQueue``, used as it documents: the same ring as aioshm's in slots and chunk size, no timeouts.

Two faces: as it comes, and with its optional arena for large tensors, whose readers see the writer's copy instead of
one of their own. Its optional spin-loop extension is left out: it loads only beside CUDA's libraries. It always
pickles, whatever the codec's name says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, Literal

from benchmarks.compare.contestant import ALL_CODECS, Codec, Contestant, End, Job, Line, Port

Face = Literal["plain", "arena"]

PACKAGE = "vllm"


@dataclass(frozen=True)
class WriterEnd(End):
    """Creates the queue, and gives its handle to the readers."""

    handles: tuple[Connection, ...]
    job: Job
    face: Face

    def open(self) -> Port:
        queue = _queue_class()(
            self.job.n_reader,
            self.job.n_reader,
            max_chunk_bytes=self.job.chunk_bytes,
            max_chunks=self.job.slots,
            enable_shm_tensor_arena=self.face == "arena",
        )
        for connection in self.handles:
            connection.send(queue.export_handle())
        self.leave()
        queue.wait_until_ready()
        return Port(queue.enqueue, queue.shutdown)

    def leave(self) -> None:
        for connection in self.handles:
            connection.close()


@dataclass(frozen=True)
class ReaderEnd(End):
    """Attaches to the queue."""

    handle: Connection
    rank: int
    face: Face

    def open(self) -> Port:
        queue_class = _queue_class()  # first: the handle is of one of its module's classes
        queue = queue_class.create_from_handle(self.handle.recv(), self.rank)
        self.leave()
        queue.wait_until_ready()
        return Port(queue.dequeue, queue.shutdown)

    def leave(self) -> None:
        self.handle.close()


def _queue_class() -> Any:
    from benchmarks.compare.vllm_shim import load_message_queue

    return load_message_queue()


def _lines(face: Face) -> Callable[[Job], Line]:
    def line(job: Job) -> Line:
        pipes = [Pipe(duplex=False) for _ in range(job.n_reader)]
        readers = [ReaderEnd(receiver, rank, face) for rank, (receiver, _) in enumerate(pipes)]
        return Line(WriterEnd(tuple(sender for _, sender in pipes), job, face), readers)

    return line


def _lacks(_codec: Codec) -> str | None:
    from importlib.util import find_spec

    return None if find_spec("torch") else "vllm needs torch, which is not installed"


CONTESTANTS = [
    Contestant("vLLM", _lines("plain"), False, "vllm", PACKAGE, ALL_CODECS, _lacks),
    Contestant("vLLM arena", _lines("arena"), False, "vllm", PACKAGE, frozenset({"tensor"}), _lacks),
]
