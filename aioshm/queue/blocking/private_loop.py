"""An event loop that runs only while a call waits, and what signals do to it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from aioshm.errors import EndClosed, RoleError
from aioshm.process.guard import Guard
from aioshm.process.limits import check_descriptors, naming_limits
from aioshm.wait.blocking import BlockingLoop

T = TypeVar("T")

_LOOP_DESCRIPTORS = 2  # a pair of sockets


class PrivateLoop:
    """The loop of one end whose calls block: threads of one process run it, one at a time.

    Args:
        owner: Names the end, for errors.
    """

    def __init__(self, owner: Callable[[], str]) -> None:
        self._owner = owner
        self._loop: BlockingLoop | None = None
        self._pid = -1
        self._guard = Guard()

    @property
    def closed(self) -> bool:
        """Whether this was used and closed."""
        return self._loop is not None and self._loop.is_closed()

    def run(
        self,
        make: Callable[[], Coroutine[Any, Any, T]],
        *,
        first: Callable[[], bool] | None = None,
        whole: bool = False,
    ) -> T | None:
        """Run until a call of the end is done.

        What a signal's handler raises meanwhile cancels the call, and comes out of here once the call has ended,
        instead of wherever Python happened to be. The call may be done all the same: what it receives, it has to put
        where the next one finds it.

        Args:
            make: Makes the call.
            first: What may make it unnecessary, and says so.
            whole: This is not to be cancelled.

        Raises:
            RoleError: This thread has an event loop that runs, or this end belongs to another process.
            BaseException: A signal's handler has raised it.
        """
        self.check_thread()
        guard = self._guard
        task: asyncio.Task[T] | None = None
        cancel: Callable[[], object] | None = None
        try:
            guard.begin()
            if first is None or not first():
                loop = self._loop_for_call()
                task = loop.create_task(make())
                if not whole:
                    cancel = task.cancel
                    # Not at once: the task may be running, and a result that it is about to return would be lost.
                    guard.on_error = functools.partial(loop.call_soon_threadsafe, cancel)
                    if guard.error is not None:
                        task.cancel()
                return self._finish(loop, task)
            return None
        finally:
            # Before the handlers are back: a task that dies calls back, and what a handler raises there is lost. Nor
            # does it do so later, when what still refers to it, such as an error's frames, lets go of it.
            if task is not None and task.done():
                asyncio._unregister_task(task)
            task = cancel = guard.on_error = None
            try:
                guard.end()
            finally:  # no call before the error is taken: what is left of it would come out of the next call
                error, guard.error = guard.error, None
                if error is not None:
                    raise error from None

    def run_now(self, call: Callable[[], object]) -> None:
        """Do what does not wait, in one piece as far as signals are concerned."""
        guard = self._guard
        try:
            guard.begin()
            call()
        finally:
            try:
                guard.end()
            finally:  # no call before the error is taken: what is left of it would come out of the next call
                error, guard.error = guard.error, None
                if error is not None:
                    raise error from None

    def _finish(self, loop: asyncio.AbstractEventLoop, task: asyncio.Task[T] | None) -> T:
        assert task is not None
        inner = None
        try:
            return loop.run_until_complete(task)
        except BaseException as error:
            if not task.done():  # a handler has raised again, as at a second Ctrl-C
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    loop.run_until_complete(task)
            # Without the frames that refer to the task: its end calls back, and what a handler raises there is lost.
            inner = error.__traceback__ and error.__traceback__.tb_next
            raise error.with_traceback(inner and inner.tb_next) from None
        finally:
            task = inner = None

    def close(self) -> None:
        """Cancel what is left and close the loop. Idempotent."""
        loop = self._loop
        if loop is None or loop.is_closed() or loop.is_running():
            return
        if os.getpid() == self._pid:
            left = asyncio.all_tasks(loop)
            for task in left:
                task.cancel()
            if left and asyncio._get_running_loop() is None:
                loop.run_until_complete(asyncio.wait(left))
        loop.close()

    @property
    def private(self) -> BlockingLoop | None:
        """The loop, once there is one."""
        return self._loop

    def call_soon(self, callback: Callable[[], object]) -> None:
        """Let the call that runs, or the next one, call back first; from any thread."""
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # it is closed
                loop.call_soon_threadsafe(callback)

    def check_process(self) -> None:
        """Raise unless this is the process that used this first.

        Raises:
            RoleError: It is another one.
        """
        if self._loop is not None and os.getpid() != self._pid:
            raise RoleError(f"{self._owner()} belongs to the process that this one was forked from")

    def check_thread(self) -> None:
        """Raise unless this thread may block.

        Raises:
            RoleError: It has an event loop that runs.
        """
        if asyncio._get_running_loop() is not None:  # which, unlike get_running_loop(), does not raise
            raise RoleError(f"{self._owner()} would block this thread's event loop: use aioshm.MessageQueue there")

    def _loop_for_call(self) -> asyncio.AbstractEventLoop:
        self.check_thread()
        if self._loop is None:
            self._pid = os.getpid()
            check_descriptors(self._owner(), _LOOP_DESCRIPTORS)  # one that is made in part only is not given back
            with naming_limits(self._owner()):
                self._loop = BlockingLoop()
        self.check_process()
        if self._loop.is_closed():
            raise EndClosed(f"{self._owner()}: this end was closed")
        return self._loop
