"""aioshm: awaited and blocking, both also with each message leased instead of copied; and over TCP."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any, Literal

from aioshm import MessageQueue, Options
from aioshm.codec import get_codec
from benchmarks.contestants.contestant import ALL_CODECS, Contestant, Opened, Port, hand, handed
from benchmarks.framework.workload import Codec, Marks, Workload

READY_TIMEOUT_S = 60.0
LOOPBACK = "127.0.0.1"
BLOCKING = "aioshm.blocking"


@dataclass(frozen=True)
class Face:
    """A way to use aioshm.

    Attributes:
        blocking: Whether its calls block.
        leased: Whether readers lease the messages of a stream.
        secure: Whether what goes over TCP is encrypted; None for local readers.
        overflow: What carries messages that do not fit a chunk; None for the default.
        sized: Whether the ring is made for the messages; else it has the sizes that every ring has.
        slots: How many a sized ring has; None for as many as every ring has.
        loaned: Whether the writer fills arrays where readers see them: it sets what is looked at of each message.
    """

    blocking: bool = False
    leased: bool = False
    secure: bool | None = None
    overflow: Literal["segments", "zmq"] | None = None
    sized: bool = False
    slots: int | None = None
    loaned: bool = False


def open_writer(face: Face, links: Sequence[Connection], workload: Workload) -> Opened:
    """Create the queue, and give its handle to the readers."""
    arguments: dict[str, Any] = {}
    if face.secure is not None:
        arguments |= {"connect_ip": LOOPBACK, "options": Options(secure=face.secure)}
    elif face.overflow is not None:
        arguments |= {"options": Options(overflow=face.overflow)}
    if face.sized:
        chunks = workload.slots if face.slots is None else min(workload.slots, face.slots)
        arguments |= {"max_chunk_bytes": workload.chunk_bytes, "max_chunks": chunks, "slots": face.slots}
    queue = _queue_class(face)(
        len(links),
        len(links) if face.secure is None else 0,
        codec=_own_codec(workload.codec),
        **arguments,
    )
    hand(links, queue.export_handle())
    if not face.loaned:
        return _ready(queue, face, queue.enqueue)
    return _ready(queue, face, (_lending_blocks if face.blocking else _lending)(queue.loan, workload.nbytes))


def _lending(loan: Callable[..., Any], nbytes: int) -> Callable[..., Any]:
    marks_of = Marks().of

    async def send(message: Any) -> None:
        _, first, last = marks_of(message)
        async with loan(nbytes, "uint8") as array:
            array[0], array[-1] = first, last

    return send


def _lending_blocks(loan: Callable[..., Any], nbytes: int) -> Callable[..., Any]:
    marks_of = Marks().of

    def send(message: Any) -> None:
        _, first, last = marks_of(message)
        with loan(nbytes, "uint8") as array:
            array[0], array[-1] = first, last

    return send


def open_reader(face: Face, link: Connection, _workload: Workload, rank: int) -> Opened:
    """Attach to the queue."""
    queue = _queue_class(face).create_from_handle(handed(link), rank)
    return _ready(queue, face, queue.dequeue, queue.lease)


def _ready(queue: Any, face: Face, call: Callable[..., Any], lease: Callable[[], Any] | None = None) -> Opened:
    if not face.blocking:
        return _ready_awaited(queue, call, lease)
    queue.wait_until_ready(READY_TIMEOUT_S)
    return Port(call, queue.close, lambda: int(queue.stats().parks), lease, queue, partial(copied_bytes, queue))


def copied_bytes(queue: Any) -> int:
    """Return how many bytes of messages an end has copied so far."""
    return int(queue.stats().copied_bytes)


async def _ready_awaited(queue: Any, call: Callable[..., Any], lease: Callable[[], Any] | None) -> Port:
    try:
        await queue.wait_until_ready(READY_TIMEOUT_S)
    except BaseException:
        await queue.aclose()
        raise
    return Port(call, queue.aclose, lambda: int(queue.stats().parks), lease, queue, partial(copied_bytes, queue))


def _queue_class(face: Face) -> Any:
    return import_module(BLOCKING).MessageQueue if face.blocking else MessageQueue


def _own_codec(codec: Codec) -> str:
    return "pickle" if codec in {"array", "tensor"} else codec


def _lacks(codec: Codec) -> str | None:
    try:
        get_codec(_own_codec(codec))
    except (ValueError, ImportError):
        return f"this aioshm has no codec {codec!r}"
    return None


def _contestant(name: str, face: Face, *codecs: Codec) -> Contestant:
    module = BLOCKING if face.blocking else "aioshm"
    ends = partial(open_writer, face), partial(open_reader, face)
    carried = frozenset(codecs) or ALL_CODECS
    about = {"lacks": _lacks, "leased": face.leased, "copies": not face.loaned}
    return Contestant(name, *ends, not face.blocking, module, module, carried, **about)  # type: ignore[arg-type]


CONTESTANTS = [
    _contestant("aioshm", Face()),
    _contestant("aioshm blocking", Face(blocking=True)),
    _contestant("aioshm leased", Face(leased=True)),
    _contestant("aioshm blocking leased", Face(blocking=True, leased=True)),
    _contestant("aioshm, sized", Face(sized=True)),
    *(_contestant(f"aioshm, {slots} slots", Face(sized=True, slots=slots)) for slots in (256, 1024, 16384)),
    _contestant("aioshm loaned", Face(leased=True, loaned=True), "tensor"),
]
SEGMENTS = _contestant("overflow segments", Face(overflow="segments", sized=True))
ZEROMQ = _contestant("overflow over ZeroMQ", Face(overflow="zmq", sized=True))
PLAIN = _contestant("aioshm, secure=False", Face(secure=False), "raw")
CURVE = _contestant("aioshm, CURVE", Face(secure=True), "raw")
LEASED = _contestant("aioshm leased, secure=False", Face(secure=False, leased=True), "raw")
