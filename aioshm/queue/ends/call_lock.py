"""A lock that admits one call at a time to an end of a queue, in the order of the calls."""

from __future__ import annotations

import asyncio
from collections import deque

from aioshm.wait.limits import settle


class CallLock:
    """First come, first served. A call that gives up does not lose the other calls' turns."""

    def __init__(self) -> None:
        self._taken = False
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def acquire(self, deadline: float | None, cancel: asyncio.Event | None) -> None:
        """Wait until this task has the lock; each `acquire` needs a `release`."""
        if not self._taken:
            self._taken = True
            return
        acquired: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(acquired)
        try:
            await settle(acquired, deadline=deadline, cancel=cancel)
        except BaseException:
            if acquired.done():
                self.release()  # it was handed over just now: hand it on
            else:
                self._waiting.remove(acquired)
            raise

    def acquire_free(self) -> None:
        """Acquire a lock that nobody holds or waits for."""
        assert not self._taken
        self._taken = True

    def release(self) -> None:
        """Hand the lock to the call that has waited longest, if any."""
        if self._waiting:
            self._waiting.popleft().set_result(None)
        else:
            self._taken = False
