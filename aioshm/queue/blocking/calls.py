"""What the calls of an end that blocks are made of: making one, cancelling one, and what stands in for a core."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from aioshm.config import shown
from aioshm.queue.blocking.private_loop import PrivateLoop
from aioshm.queue.ends.reading import ReadingEnd
from aioshm.queue.ends.writing import WritingEnd
from aioshm.ring.atomics import NOTHING

T = TypeVar("T")

CANCEL_POLL_S = 0.02
"""How often a wait looks at a ``cancel`` event, of which a thread cannot be told otherwise."""


def made(make: Callable[[], Coroutine[Any, Any, T]], end_of: Callable[[T], WritingEnd | ReadingEnd]) -> T:
    """Return what is made by awaiting something, on a loop of its own; close it if a signal's handler raises."""
    loop, kept = PrivateLoop(lambda: "the making of a queue"), []

    async def keep() -> None:
        kept.append(await make())

    try:
        loop.run(keep)
        return kept[0]
    except BaseException:
        if kept:
            loop.run(end_of(kept[0]).gate.aclose, whole=True)
        raise
    finally:
        loop.run_now(loop.close)


async def called(call: Callable[..., T], *args: Any) -> T:
    """Call what does not wait, from a task."""
    await asyncio.sleep(0)  # what the loop has to tell comes first
    return call(*args)


async def cancellable(cancel: threading.Event, call: Callable[[asyncio.Event | None], Coroutine[Any, Any, T]]) -> T:
    """Await a call that a thread's event cancels; it gets one of the loop's for that."""
    event = asyncio.Event()

    async def watch() -> None:
        while not cancel.is_set():  # noqa: ASYNC110 - nothing else tells a loop of a thread's event
            await asyncio.sleep(CANCEL_POLL_S)
        event.set()

    if cancel.is_set():
        event.set()
    watching = asyncio.ensure_future(watch())
    try:
        return await call(event)
    finally:
        watching.cancel()


def check_cancel(cancel: object) -> None:
    """Raise unless this may be passed as ``cancel``.

    Raises:
        TypeError: It is no `threading.Event`.
    """
    if cancel is not None and not callable(getattr(cancel, "is_set", None)):
        raise TypeError(f"cancel must be a threading.Event or None, not {shown(cancel)}")


class NotAtOnce:
    """Stands for a core that cannot do anything at once, or not in one piece."""

    next = NOTHING
    owes = False

    @staticmethod
    def send(_obj: Any) -> bool:
        """Leave it to the slow way."""
        return False
