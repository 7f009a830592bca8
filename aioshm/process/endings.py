"""The ends of processes, seen from an event loop: no thread, nothing polled."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from multiprocessing.process import BaseProcess
from types import TracebackType

_RETRY_S = 0.001
_MAX_RETRY_S = 0.25


class Endings:
    """The ends of some processes, as they come; a context manager.

    It watches copies of their sentinels: a loop knows one callback for each descriptor, and others may wait for the
    same process, or give its descriptors back meanwhile.

    Args:
        processes: Those to watch; what has not been started is left out.
    """

    def __init__(self, processes: Iterable[BaseProcess]) -> None:
        self._loop = asyncio.get_running_loop()
        self._watched: dict[int, BaseProcess] = {}
        self._late: dict[BaseProcess, asyncio.TimerHandle] = {}
        self._ended: list[BaseProcess] = []
        self._waiter: asyncio.Future[None] | None = None
        try:
            for process in processes:
                if process.exitcode is not None:
                    self._ended.append(process)
                elif process.pid is not None:
                    self._watch(process)
        except BaseException:
            self.close()
            raise

    def _watch(self, process: BaseProcess) -> None:
        try:
            fd = os.dup(process.sentinel)
        except OSError:  # there is no descriptor left
            self._look(process, _RETRY_S)
            return
        self._watched[fd] = process
        self._loop.add_reader(fd, self._readable, fd)

    @property
    def running(self) -> bool:
        """Whether any of them still runs."""
        return bool(self._watched or self._late)

    async def next(self, deadline: float | None = None) -> list[BaseProcess]:
        """Return those that have ended since the last call; wait until there are any, if any run.

        Cancelling this loses nothing. One task at a time may wait.

        Args:
            deadline: By the clock of the loop; the list is empty then.
        """
        if not self._ended and self.running:
            self._waiter = self._loop.create_future()
            timer = None if deadline is None else self._loop.call_at(deadline, self._wake)
            try:
                await self._waiter
            finally:
                self._waiter = None
                if timer is not None:
                    timer.cancel()
        ended, self._ended = self._ended, []
        return ended

    async def last(self, deadline: float | None = None) -> bool:
        """Wait until all have ended, or the deadline has passed; return whether they have."""
        while self.running and (deadline is None or self._loop.time() < deadline):
            await self.next(deadline)
        return not self.running

    def close(self) -> None:
        """Watch no longer. Idempotent."""
        for fd in list(self._watched):
            self._forget(fd)
        for timer in self._late.values():
            timer.cancel()
        self._late.clear()

    def __enter__(self) -> Endings:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _forget(self, fd: int) -> BaseProcess:
        self._loop.remove_reader(fd)
        os.close(fd)
        return self._watched.pop(fd)

    def _readable(self, fd: int) -> None:
        self._look(self._forget(fd), _RETRY_S)

    def _look(self, process: BaseProcess, retry_s: float) -> None:
        # The sentinel that multiprocessing makes is a pipe, and ends a little before the process does.
        if process.exitcode is None:
            self._late[process] = self._loop.call_later(retry_s, self._look, process, min(2 * retry_s, _MAX_RETRY_S))
            return
        self._late.pop(process, None)
        self._ended.append(process)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
