"""aioshm: awaited, blocking, and awaited with each message leased instead of copied."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, Literal

from aioshm import MessageQueue
from aioshm.codec import get_codec
from benchmarks.compare.contestant import ALL_CODECS, Codec, Contestant, End, Job, Line, Port

READY_TIMEOUT_S = 60.0

Face = Literal["awaited", "blocking", "leased"]


@dataclass(frozen=True)
class WriterEnd(End):
    """Creates the queue, and gives its handle to the readers."""

    handles: tuple[Connection, ...]
    job: Job
    face: Face

    def open(self) -> Port | Coroutine[Any, Any, Port]:
        queue = _queue_class(self.face)(
            self.job.n_reader,
            self.job.n_reader,
            max_chunk_bytes=self.job.chunk_bytes,
            max_chunks=self.job.slots,
            codec="pickle" if self.job.codec == "tensor" else self.job.codec,
        )
        for connection in self.handles:
            connection.send(queue.export_handle())
        self.leave()
        return _ready(queue, self.face, queue.enqueue)

    def leave(self) -> None:
        for connection in self.handles:
            connection.close()


@dataclass(frozen=True)
class ReaderEnd(End):
    """Attaches to the queue."""

    handle: Connection
    rank: int
    face: Face

    def open(self) -> Port | Coroutine[Any, Any, Port]:
        handle = self.handle.recv()  # nothing else is going on here yet that this could hold up
        self.leave()
        queue = _queue_class(self.face).create_from_handle(handle, self.rank)
        return _ready(queue, self.face, Leases(queue).receive if self.face == "leased" else queue.dequeue)

    def leave(self) -> None:
        self.handle.close()


class Leases:
    """Holds each message until the next one is asked for."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue
        self._held: Any = None

    async def receive(self) -> Any:
        """Give the last message back and lease the next one."""
        if self._held is not None:
            await self._held.__aexit__(None, None, None)
        self._held = self._queue.lease()
        return await self._held.__aenter__()


def _ready(queue: Any, face: Face, call: Callable[..., Any]) -> Port | Coroutine[Any, Any, Port]:
    if face != "blocking":
        return _ready_awaited(queue, call)
    queue.wait_until_ready(READY_TIMEOUT_S)
    return Port(call, queue.close)


async def _ready_awaited(queue: Any, call: Callable[..., Any]) -> Port:
    await queue.wait_until_ready(READY_TIMEOUT_S)
    return Port(call, queue.aclose)


def _queue_class(face: Face) -> Any:
    if face != "blocking":
        return MessageQueue
    from importlib import import_module

    return import_module(_BLOCKING).MessageQueue


def _lines(face: Face) -> Callable[[Job], Line]:
    def line(job: Job) -> Line:
        pipes = [Pipe(duplex=False) for _ in range(job.n_reader)]
        readers = [ReaderEnd(receiver, rank, face) for rank, (receiver, _) in enumerate(pipes)]
        return Line(WriterEnd(tuple(sender for _, sender in pipes), job, face), readers)

    return line


def _lacks(face: Face) -> Callable[[Codec], str | None]:
    def lacks(codec: Codec) -> str | None:
        if face == "leased" and not hasattr(MessageQueue, "lease"):
            return "this aioshm has no lease()"
        try:
            get_codec("pickle" if codec == "tensor" else codec)
        except ValueError:
            return f"this aioshm has no codec {codec!r}"
        return None

    return lacks


_BLOCKING = "aioshm.blocking"

CONTESTANTS = [
    Contestant("aioshm", _lines("awaited"), True, "aioshm", "aioshm", ALL_CODECS, _lacks("awaited")),
    Contestant("aioshm blocking", _lines("blocking"), False, _BLOCKING, _BLOCKING, ALL_CODECS, _lacks("blocking")),
    Contestant("aioshm leased", _lines("leased"), True, "aioshm", "aioshm", frozenset({"tensor"}), _lacks("leased")),
]
