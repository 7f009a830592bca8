"""aioshm with its defaults: awaited and blocking, with messages leased instead of copied, and loaned by the writer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from aioshm import MessageQueue, blocking
from benchmarks.contestants.contestant import Contestant, Opened, Port, hand, handed
from benchmarks.framework.workload import Workload

READY_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Style:
    """A way to use aioshm.

    Attributes:
        blocking: Whether its calls block.
        leased: Whether readers lease the messages of a stream.
        loaned: Whether the writer fills arrays in the ring: it sets the elements that are checked.
    """

    blocking: bool = False
    leased: bool = False
    loaned: bool = False


def open_writer(style: Style, links: Sequence[Connection], workload: Workload) -> Opened:
    """Create the queue, and give its handle to the readers."""
    codec = "pickle" if workload.codec in {"array", "tensor"} else workload.codec
    queue = _queue_class(style)(len(links), len(links), codec=codec)
    hand(links, queue.export_handle())
    return _ready(queue, style, _lending(queue.loan, workload.nbytes) if style.loaned else queue.enqueue)


def _lending(loan: Callable[..., Any], nbytes: int) -> Callable[..., Any]:
    known: dict[int, tuple[Any, int, int]] = {}  # asking a tensor for two elements takes longer than a loan

    async def send(message: Any) -> None:
        found = known.get(id(message))
        if found is None:
            found = known[id(message)] = message, int(message[0]), int(message[-1])
        async with loan(nbytes, "uint8") as array:
            _, array[0], array[-1] = found
            del array  # as docs/howto/zero-copy.md advises: the memory of a kept array would have to move away

    return send


def open_reader(style: Style, link: Connection, _workload: Workload, rank: int) -> Opened:
    """Attach to the queue."""
    queue = _queue_class(style).create_from_handle(handed(link), rank)
    return _ready(queue, style, queue.dequeue, queue.lease)


def _ready(queue: Any, style: Style, call: Callable[..., Any], lease: Callable[[], Any] | None = None) -> Opened:
    if not style.blocking:
        return _ready_awaited(queue, call, lease)
    queue.wait_until_ready(READY_TIMEOUT_S)
    return Port(call, queue.close, lease, partial(_copied_bytes, queue))


async def _ready_awaited(queue: Any, call: Callable[..., Any], lease: Callable[[], Any] | None) -> Port:
    try:
        await queue.wait_until_ready(READY_TIMEOUT_S)
    except BaseException:
        await queue.aclose()
        raise
    return Port(call, queue.aclose, lease, partial(_copied_bytes, queue))


def _copied_bytes(queue: Any) -> int:
    """Return how many bytes of messages an end has copied so far."""
    return int(queue.stats().copied_bytes)


def _queue_class(style: Style) -> Any:
    return blocking.MessageQueue if style.blocking else MessageQueue


def _contestant(name: str, style: Style) -> Contestant:
    ends = partial(open_writer, style), partial(open_reader, style)
    return Contestant(name, *ends, not style.blocking, leased=style.leased, copies=not style.loaned)


CONTESTANTS = [
    _contestant("aioshm", Style()),
    _contestant("aioshm blocking", Style(blocking=True)),
    _contestant("aioshm leased", Style(leased=True)),
    _contestant("aioshm loaned", Style(leased=True, loaned=True)),
]
