"""The answers of all workers to calls of one, read by whoever waits for one.

No task reads all the time: of those that wait, the first reads for all, and the next one goes on when that one has what
it has waited for. So a caller that is alone is woken by its answer itself, and nothing runs when nobody calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from aioshm.errors import AioshmError
from aioshm.queue import MessageQueue, merge


class Waiter:
    """What a task waits for.

    Attributes:
        ready: Whether it need not wait any more.
    """

    __slots__ = ("ready",)

    def __init__(self) -> None:
        self.ready = False


class Inbox:
    """Queues with answers.

    Args:
        on_message: Called with the rank and what came: a message, or the error of one.
        on_end: Called with the rank of a queue that has ended, for its writer has died.
    """

    def __init__(self, on_message: Callable[[int, Any], None], on_end: Callable[[int], None]) -> None:
        self._on_message, self._on_end = on_message, on_end
        self._merged = merge({}, errors="yield")
        self._open = False  # whether there may be a queue that has not ended
        self._waiting: dict[Waiter, asyncio.Future[None]] = {}
        self._reader: Waiter | None = None  # for whom the task waits that reads
        self._task: asyncio.Task[Any] | None = None
        self._asleep = False
        self._interrupted = False

    def add(self, rank: int, queue: MessageQueue) -> None:
        """Read one more queue."""
        self._merged.add(rank, queue)
        self._open = True
        self._hand_on()

    def remove(self, rank: int) -> None:
        """Read a queue no more; what is left in it can be taken from it at once."""
        self._merged.remove(rank)

    async def wait(self, waiter: Waiter) -> None:
        """Wait until `Waiter.ready` is set, and `wake` called, or a message that was read has led to that."""
        if waiter.ready:
            return
        try:
            while not waiter.ready:
                if self._reader is None and self._open:
                    await self._read(waiter)
                else:
                    await self._sleep(waiter)
        finally:
            self._hand_on()

    def wake(self, waiter: Waiter) -> None:
        """Let a task look again, if one waits for this."""
        if waiter is self._reader:
            if self._asleep and not self._interrupted:
                assert self._task is not None
                self._interrupted = True
                self._task.cancel()
        elif (future := self._waiting.get(waiter)) is not None and not future.done():
            future.set_result(None)

    async def _read(self, waiter: Waiter) -> None:
        self._task = task = asyncio.current_task()
        assert task is not None
        before = task.cancelling()
        self._reader, merged = waiter, self._merged
        try:
            while not waiter.ready:
                self._asleep = True
                try:
                    rank, message = await merged.__anext__()
                except StopAsyncIteration:
                    self._open = False
                    return
                finally:
                    self._asleep = False
                if isinstance(message, AioshmError) and rank in merged.failed:
                    self._on_end(rank)
                else:
                    self._on_message(rank, message)
        except asyncio.CancelledError:
            if not self._interrupted or task.uncancel() > before:
                raise
        finally:
            self._reader, self._task, self._interrupted = None, None, False

    async def _sleep(self, waiter: Waiter) -> None:
        self._waiting[waiter] = future = asyncio.get_running_loop().create_future()
        try:
            await future
        finally:
            del self._waiting[waiter]

    def _hand_on(self) -> None:
        """Let the task read that waits for the longest, if none does; one that was woken already sees to it itself."""
        if self._waiting and self._reader is None and self._open:
            future = next(iter(self._waiting.values()))
            if not future.done():
                future.set_result(None)

    async def aclose(self) -> None:
        """Read nothing any more. Idempotent."""
        self._open = False
        await self._merged.aclose()
