"""An event loop in a thread of its own, for callers that block."""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import weakref
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Generic, TypeVar

from aioshm.arguments import check_plain
from aioshm.errors import EndClosed, QueueClosed, RoleError
from aioshm.process.threads import start_thread

LOOK_S = 1.0
"""How late it may be noticed that the thread has ended."""
END_S = 10.0
"""How long the thread may take to end; more, and a callback is stuck in it."""

T = TypeVar("T")


class LoopThread:
    """Runs functions and coroutines for any thread of this process, which wait for what they return.

    Ctrl-C, or whatever else a signal handler raises in a call that waits, cancels the call's coroutine, waits until it
    has ended, and goes on. The thread is a daemon, and ends with `end`, at the latest when Python ends.

    Args:
        owner: Names what it is for, in errors.
        loop_factory: Makes the loop; None: `asyncio.new_event_loop`.

    Attributes:
        loop: The loop.
    """

    def __init__(self, owner: str, loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None) -> None:
        check_plain("loop_factory", loop_factory)
        self._owner, self._pid = owner, os.getpid()
        self._gate = threading.RLock()  # a signal handler or the garbage collector may call while this thread does
        self._ended = False
        self.loop: asyncio.AbstractEventLoop = (loop_factory or asyncio.new_event_loop)()
        try:
            self._thread = start_thread(_host, self.loop, name="aioshm-engine-client", what=owner)
        except BaseException:
            self.loop.close()
            raise
        _running.add(self)

    @property
    def elsewhere(self) -> bool:
        """Whether this is a forked child, which has the object, but not the thread."""
        return self._pid != os.getpid()

    @property
    def ended(self) -> bool:
        """Whether it was told to end."""
        return self._ended

    def check(self) -> None:
        """Refuse a call that would wait for what cannot come.

        Raises:
            RoleError: Called in a forked child, or in the thread itself.
        """
        if self.elsewhere:
            raise RoleError(f"{self._owner} belongs to process {self._pid}, not to its child {os.getpid()}")
        if threading.get_ident() == self._thread.ident:
            raise RoleError(f"{self._owner} was called in its own thread, which would wait for itself")

    def do(self, function: Callable[[], T]) -> T:
        """Run a function in the thread, and return what it returns.

        Raises:
            QueueClosed: The thread has ended.
            RoleError: Called in a forked child, or in the thread itself.
        """
        errand: _Errand[T] = _Errand()
        try:
            self._post(lambda: errand.run(function))
            self._wait_for(errand)
        except BaseException:
            self.post(errand.drop)
            raise
        return errand.outcome()

    def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine in the thread, and return what it returns.

        Args:
            work: Makes the coroutine.

        Raises:
            QueueClosed: The thread has ended.
            RoleError: Called in a forked child, or in the thread itself.
        """
        errand: _Errand[T] = _Errand()
        try:
            self._post(lambda: errand.start(work))
            self._wait_for(errand)
        except (QueueClosed, RoleError):
            raise
        except BaseException:
            if self.post(errand.cancel):
                self._wait_for(errand)
            raise
        return errand.outcome()

    def post(self, function: Callable[[], object]) -> bool:
        """Have a function run in the thread, and do not wait; return whether it will be. Interrupts wait, too."""
        while True:
            try:
                self._post(function)
                return True
            except (QueueClosed, RoleError):
                return False
            except Exception:
                raise
            except BaseException:  # another interrupt: one is told already
                continue

    def end(self) -> None:
        """Cancel what still runs, and end the thread. Idempotent; may be called in any thread but its own."""
        if self.elsewhere:
            return
        with self._gate:
            if not self._ended:
                self._ended = True
                self._tell(self.loop.stop)
        if threading.get_ident() != self._thread.ident:
            self._thread.join(END_S)
        _running.discard(self)

    def abandon(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Have a coroutine run, which stops the loop, and wait for nothing; for who is forgotten, in any thread."""
        with self._gate:
            if not self._ended:
                self._ended = True
                self._tell(lambda: self.loop.create_task(last()))

    def _tell(self, function: Callable[[], object]) -> None:
        with suppress(RuntimeError):  # the thread has ended by itself, and closed the loop
            self.loop.call_soon_threadsafe(function)

    def _wait_for(self, errand: _Errand[Any]) -> None:
        while not errand.wait(LOOK_S):
            if not self._thread.is_alive() and not errand.wait(0):
                raise EndClosed(f"the thread of {self._owner} has ended; its traceback is on the standard error")

    def _post(self, function: Callable[[], object]) -> None:
        self.check()
        with self._gate:  # what is posted before `end` is run before the loop stops
            if self._ended or self.loop.is_closed():
                raise EndClosed(f"{self._owner} was closed")
            self.loop.call_soon_threadsafe(function)


class _Errand(Generic[T]):
    """Something to do in the thread, and what came out."""

    __slots__ = ("_done", "_dropped", "_error", "_task", "_value")

    def __init__(self) -> None:
        self._done = threading.Lock()
        self._done.acquire()
        self._value: Any = None
        self._error: BaseException | None = None
        self._task: asyncio.Task[T] | None = None
        self._dropped = False

    def wait(self, timeout: float) -> bool:
        if not self._done.acquire(timeout=timeout):
            return False
        self._done.release()
        return True

    def outcome(self) -> T:
        if self._error is not None:
            try:
                raise self._error
            finally:
                self._error = None  # which has this frame
        value: T = self._value
        return value

    # In the thread

    def run(self, function: Callable[[], T]) -> None:
        try:
            self._value = function()
        except BaseException as error:
            self._error = error
        self._done.release()

    def drop(self) -> None:
        """Give back what nobody takes."""
        self._value = self._error = None

    def start(self, work: Callable[[], Coroutine[Any, Any, T]]) -> None:
        if not self._dropped:
            self._task = asyncio.get_running_loop().create_task(work())
            self._task.add_done_callback(self._take)

    def cancel(self) -> None:
        self._dropped = True
        if self._task is not None:
            self._task.cancel()
        elif self._done.locked():  # it was interrupted before it was posted
            self._done.release()

    def _take(self, task: asyncio.Task[T]) -> None:
        if task.cancelled():
            self._error = EndClosed("closed while this call waited")
        else:
            self._error = task.exception()
            if self._error is None:
                self._value = task.result()
        self._task = None
        self._done.release()


_running: weakref.WeakSet[LoopThread] = weakref.WeakSet()


def _end_all() -> None:
    for thread in list(_running):
        thread.end()


atexit.register(_end_all)


def _host(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        asyncio.set_event_loop(None)
        loop.close()
