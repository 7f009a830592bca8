"""Reads the answers of all workers, in one of the tasks that wait for an answer.

The first waiting task reads for all, and the next one continues when the first has its answer. So the answer itself
wakes a lone caller, and nothing runs while there is no call.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from aioshm.errors import AioshmError
from aioshm.queue import MessageQueue, merge

if TYPE_CHECKING:
    from aioshm.engine.workers.calls import Calls


class Waiter:
    """A condition that one task waits for, see `Inbox.wait`."""

    __slots__ = ("future", "interrupted", "reading", "ready")

    def __init__(self) -> None:
        self.ready: bool = False
        self.future: asyncio.Future[None] | None = None
        self.reading: asyncio.Task[Any] | None = None
        self.interrupted: bool = False

    def notify(self) -> None:
        """Set `ready`, and wake the task."""
        self.ready = True
        self.wake()

    def wake(self) -> None:
        """Let the task check again."""
        if self.reading is not None:
            if not self.interrupted:
                self.interrupted = True
                self.reading.cancel()
        elif self.future is not None and not self.future.done():
            self.future.set_result(None)


class Inbox:
    """The queues with the answers of the workers."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._merged = merge({}, errors="yield")
        self._open = False  # whether there may be a queue that has not ended
        self._sleeping: dict[Waiter, None] = {}  # in the order in which they began
        self._reader: Waiter | None = None

    def add(self, rank: int, queue: MessageQueue) -> None:
        """Read one more queue."""
        self._merged.add(rank, queue)
        self._open = True
        self._hand_on()

    def remove(self, rank: int) -> None:
        """Stop reading a queue; its messages can be taken from it immediately."""
        self._merged.remove(rank)

    async def wait(self, waiter: Waiter) -> None:
        """Wait until `Waiter.ready` is set; read the messages of all meanwhile unless another task does."""
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

    async def _read(self, waiter: Waiter) -> None:
        task = asyncio.current_task()
        assert task is not None
        before = task.cancelling()
        merged = self._merged
        self._reader = waiter
        try:
            merged.needed = self._calls.needed()
            while not waiter.ready:
                waiter.reading = task
                try:
                    rank, message = await merged.__anext__()
                except StopAsyncIteration:
                    self._open = False
                    return
                finally:
                    waiter.reading = None
                if isinstance(message, AioshmError) and rank in merged.failed:
                    self._calls.queue_ended(rank)
                else:
                    self._calls.receive(rank, message)
        except asyncio.CancelledError:
            if not waiter.interrupted or task.uncancel() > before:
                raise
        finally:
            self._reader = None
            waiter.interrupted = False

    async def _sleep(self, waiter: Waiter) -> None:
        waiter.future = asyncio.get_running_loop().create_future()
        self._sleeping[waiter] = None
        try:
            await waiter.future
        finally:
            waiter.future = None
            del self._sleeping[waiter]

    def widen(self) -> None:
        """Let the reading task wake for every message, now that several calls are in flight."""
        if self._merged.needed and self._reader is not None:
            self._merged.needed = frozenset()
            self._reader.wake()

    def _hand_on(self) -> None:
        """Let the longest sleeping task read, if none reads; a task that was woken already does so itself."""
        if self._sleeping and self._reader is None and self._open:
            next(iter(self._sleeping)).wake()

    async def aclose(self) -> None:
        """Stop reading. Idempotent."""
        self._open = False
        await self._merged.aclose()
