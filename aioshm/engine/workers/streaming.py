"""The streams of a worker: what generators yield, sent as fast as it is taken, and how they end."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from typing import Any, TypeAlias, cast

from aioshm.engine.workers.envelope import FAILURE, ITEM, RESULT, Envelope
from aioshm.engine.workers.performing import failure_of, hide_frames
from aioshm.queue import MessageQueue

logger: logging.Logger = logging.getLogger("aioshm.engine")

hide_frames(__file__)

Items: TypeAlias = Iterator[Any] | AsyncIterator[Any]


class _Stream:
    """A stream: its generator's items, as far as they may be made."""

    def __init__(self, credit: int) -> None:
        self.credit = credit
        self.task: asyncio.Task[None]
        self._more = asyncio.Event()

    def give(self, credit: int) -> None:
        """Let so many items more be made."""
        self.credit += credit
        self._more.set()

    async def spend(self) -> None:
        """Wait until an item may be made."""
        while not self.credit:
            self._more.clear()
            await self._more.wait()
        self.credit -= 1


class Streams:
    """Sends the items of streams, each in a task of its own, and then how they have ended.

    Args:
        replies: Takes the items.
        reply: Takes the number of a call, the kind of its last reply, and its value.
        spawn: Starts a task.
    """

    def __init__(
        self,
        replies: MessageQueue,
        reply: Callable[[int, int, Any], Awaitable[None]],
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        self._replies, self._reply, self._spawn = replies, reply, spawn
        self._streams: dict[int, _Stream] = {}
        self._stopping = False

    def begin(self, call: int, items: Items, credit: int) -> None:
        """Begin to send what a call has returned, so many items at first."""
        stream = self._streams[call] = _Stream(credit)
        stream.task = self._spawn(self._send(call, stream, items))

    def give(self, call: int, credit: int) -> None:
        """Let so many items more be made; nothing happens if the stream has ended."""
        if (stream := self._streams.get(call)) is not None:
            stream.give(credit)

    def cancel(self, call: int) -> None:
        """Cancel a stream where it is; nothing happens if it has ended."""
        if (stream := self._streams.get(call)) is not None:
            stream.task.cancel()

    def stop(self) -> list[asyncio.Task[None]]:
        """Say nothing more of any stream; return the tasks, which are to be cancelled."""
        self._stopping = True
        return [stream.task for stream in self._streams.values()]

    async def _send(self, call: int, stream: _Stream, items: Items) -> None:
        kind, value = RESULT, None
        try:
            while (made := await _next_item(stream, items)) is not None:
                await self._replies.enqueue(Envelope(ITEM, call, 0, made[0]))
                if isinstance(items, Iterator):
                    await asyncio.sleep(0)  # calls have their turn
        except (Exception, asyncio.CancelledError) as error:
            kind, value = FAILURE, failure_of(error)
        try:
            await _close(items)
        except (Exception, asyncio.CancelledError) as error:
            if not self._stopping:
                logger.warning("a stream's generator has raised while it was closed: %s", failure_of(error))
        del self._streams[call]
        if not self._stopping:
            await self._reply(call, kind, value)


def items_of(result: Any) -> Items:
    """Return the iterator over what is streamed.

    Raises:
        TypeError: It cannot be iterated over.
    """
    if hasattr(result, "__aiter__"):
        return cast(AsyncIterator[Any], aiter(result))
    if hasattr(result, "__iter__"):
        return cast(Iterator[Any], iter(result))
    raise TypeError(f"what is streamed must be a generator, or iterable otherwise, not {type(result).__qualname__}")


async def _next_item(stream: _Stream, items: Items) -> tuple[Any] | None:
    await stream.spend()
    try:
        return (next(items) if isinstance(items, Iterator) else await anext(items),)
    except (StopIteration, StopAsyncIteration):
        return None


async def _close(items: Items) -> None:
    close = getattr(items, "aclose" if isinstance(items, AsyncIterator) else "close", None)
    if callable(close):
        closing = close()
        if inspect.isawaitable(closing):
            await closing
