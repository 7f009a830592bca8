"""A lock that admits one call at a time to an end of a queue, in the order of the calls."""

from __future__ import annotations

import asyncio
import weakref
from collections import deque

from aioshm.wait.limits import settle


class CallLock:
    """First come, first served. A call that gives up does not lose the other calls' turns."""

    def __init__(self) -> None:
        # Calls that hold the lock or wait for it.
        self.calls: int = 0
        self._taken = False
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._block: object = None  # a weak reference to the task whose block has the lock

    async def acquire(self, deadline: float | None, cancel: asyncio.Event | None) -> None:
        """Wait until this task has the lock; each `acquire` needs a `release`."""
        self.calls += 1
        try:
            if self._taken:
                await self._wait(deadline, cancel)
        except BaseException:
            self.calls -= 1
            raise
        self._taken = True

    async def _wait(self, deadline: float | None, cancel: asyncio.Event | None) -> None:
        acquired: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(acquired)
        try:
            await settle(acquired, deadline=deadline, cancel=cancel)
        except BaseException:
            if acquired.done():
                self._hand_over()  # this call was next just now
            else:
                self._waiting.remove(acquired)
            raise

    def acquire_free(self) -> None:
        """Acquire a lock that nobody holds or waits for."""
        assert not self._taken
        self.calls += 1
        self._taken = True

    def release(self) -> None:
        """Hand the lock to the call that has waited longest, if any."""
        self.calls -= 1
        self._block = None
        self._hand_over()

    def _hand_over(self) -> None:
        if self._waiting:
            self._waiting.popleft().set_result(None)
        else:
            self._taken = False

    def hold(self) -> None:
        """Note that a block of this task has the lock until `release`."""
        self._block = _this_task()

    @property
    def in_block(self) -> bool:
        """Whether a block has the lock."""
        return self._block is not None

    @property
    def in_own_block(self) -> bool:
        """Whether a block of the calling task has the lock."""
        return self._block is not None and self._block == _this_task()


def _this_task() -> object:
    task = asyncio.current_task()
    return None if task is None else weakref.ref(task)  # a lease may end when its task is collected
