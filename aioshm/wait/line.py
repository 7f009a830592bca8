"""The queue of waiters, and waiting for a future: until done, a deadline, or a cancel event."""

from __future__ import annotations

import asyncio
from collections import deque
from time import monotonic
from typing import TypeVar

from aioshm.errors import QueueCancelled
from aioshm.wait.stall import Stall

T = TypeVar("T")


async def settle(
    *futures: asyncio.Future[T],
    deadline: float | None = None,
    cancel: asyncio.Event | None = None,
    stall: Stall | None = None,
) -> None:
    """Wait until a future is done, ``deadline`` or ``cancel``; the futures are not cancelled."""
    if cancel is not None and cancel.is_set() and not any(future.done() for future in futures):
        raise QueueCancelled("the cancel event is set")
    watcher = None if cancel is None else asyncio.ensure_future(cancel.wait())
    awaited: set[asyncio.Future[object]] = {*futures} if watcher is None else {*futures, watcher}  # type: ignore[arg-type]
    try:
        while not any(future.done() for future in futures):
            now = monotonic()
            if watcher is not None and watcher.done():  # however soon the event was cleared again
                raise QueueCancelled("the cancel event is set")
            if deadline is not None and now >= deadline:
                raise TimeoutError
            if stall is not None:
                stall.check(now)
            due = [] if deadline is None else [deadline]
            if stall is not None:
                due.append(stall.at)
            await asyncio.wait(awaited, timeout=min(due) - now if due else None, return_when=asyncio.FIRST_COMPLETED)
    finally:
        if watcher is not None:
            watcher.cancel()


class Line:
    """First come, first served; a task that gives up does not lose the others' turns."""

    def __init__(self) -> None:
        self._taken = False
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def join(self, deadline: float | None, cancel: asyncio.Event | None) -> None:
        """Return when it is this task's turn, which lasts until `leave`."""
        if not self._taken:
            self._taken = True
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await settle(turn, deadline=deadline, cancel=cancel)
        except BaseException:
            if turn.done():
                self.leave()  # it was handed over just now: hand it on
            else:
                self._waiting.remove(turn)
            raise

    def take(self) -> None:
        """Begin a turn where nobody has one, nor waits."""
        assert not self._taken
        self._taken = True

    def leave(self) -> None:
        """End this task's turn, and begin the next waiter's."""
        if self._waiting:
            self._waiting.popleft().set_result(None)
        else:
            self._taken = False
