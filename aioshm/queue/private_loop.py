"""An event loop that runs only while a call waits, and what Ctrl-C does to it."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # what signal wraps, whose conversions to enums would cost each wait 8 us
import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Coroutine
from threading import get_ident
from typing import Any, TypeVar

from aioshm.errors import QueueClosed, RoleError
from aioshm.limits import check_descriptors, naming_limits
from aioshm.wait.blocking import BlockingLoop

T = TypeVar("T")

_LOOP_DESCRIPTORS = 2  # a pair of sockets


class PrivateLoop:
    """The loop of one end whose calls block: threads of one process run it, one at a time.

    Args:
        owner: Names the end, for errors.

    Attributes:
        interrupted: Whether Ctrl-C was pressed and that has not been told: the call could not be cancelled any more.
    """

    def __init__(self, owner: Callable[[], str]) -> None:
        self._owner = owner
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pid = -1
        self._task: asyncio.Task[Any] | None = None
        self._early = False  # whether Ctrl-C came before there was a task to cancel
        self.interrupted = False

    @property
    def closed(self) -> bool:
        """Whether this was used and closed."""
        return self._loop is not None and self._loop.is_closed()

    def run(self, call: Coroutine[Any, Any, T], *, closing: bool = False, leaving: bool = False) -> T:
        """Run until a call of the end is done.

        Ctrl-C cancels the call, where that loses nothing, instead of raising an error wherever Python happens to be.

        Args:
            call: What to run.
            closing: An interrupt that is still to be told waits.
            leaving: This must run, so an interrupt that is still to be told waits.

        Raises:
            RoleError: This thread has an event loop that runs, or this end belongs to another process.
            KeyboardInterrupt: Ctrl-C was pressed, and the call has done nothing.
        """
        try:
            loop = self._loop_for_call()
            if not (closing or leaving):
                self.raise_interrupt()
        except BaseException:
            call.close()
            raise
        guarding = get_ident() == threading.main_thread().ident and (
            _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler
        )
        task = None
        self._early = False
        try:
            if guarding:
                _signal.signal(_signal.SIGINT, self._interrupt)
            self._task = task = loop.create_task(call)
            if self._early:
                loop.call_soon(task.cancel)
            return loop.run_until_complete(task)
        except asyncio.CancelledError:
            self.raise_interrupt()
            raise
        except BaseException:
            if task is None:
                call.close()
            elif not task.done():  # a signal's handler raised, while the loop waited
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    loop.run_until_complete(task)
            raise
        finally:
            self._task = task = None  # an error that it has raised refers to this frame
            if guarding:
                _signal.signal(_signal.SIGINT, _signal.default_int_handler)

    def raise_interrupt(self) -> None:
        """Raise what Ctrl-C raises, if it was pressed and that has not been told."""
        if self.interrupted:
            self.interrupted = False
            raise KeyboardInterrupt from None

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
            check_descriptors(self._owner(), _LOOP_DESCRIPTORS)  # one that is made in part only is not given back
            with naming_limits(self._owner()):
                self._loop = BlockingLoop()
            self._pid = os.getpid()
        self.check_process()
        if self._loop.is_closed():
            raise QueueClosed(f"{self._owner()}: this end was closed")
        return self._loop

    def _interrupt(self, _number: int, _frame: object) -> None:
        if self.interrupted:
            raise KeyboardInterrupt  # again: whoever presses it does not want to wait for the end of the call
        self.interrupted = True
        task = self._task
        if task is None:
            self._early = True
        else:
            # Not at once: the task may be running, and a result that it is about to return would be lost.
            task.get_loop().call_soon_threadsafe(task.cancel)
