"""An event loop in a thread of its own, for callers that block; the whole process shares one such loop.

The shared loop holds `process_lock` while it runs callbacks, and releases the lock while it sleeps. So a
thread that holds the lock may use objects that belong to the shared loop.
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import os
import selectors
import threading
import weakref
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from threading import get_ident
from time import monotonic
from typing import Any, Generic, TypeAlias, TypeVar, cast

from aioshm.errors import EndClosed, QueueClosed, RoleError
from aioshm.process.limits import check_descriptors, naming_limits, start_thread

ALIVE_CHECK_S = 1.0
"""How late a waiting caller may notice that the loop's thread has ended."""
CANCEL_PATIENCE_S = 3.0
"""A handler's exception interrupts a cancellation older than this: a user who presses Ctrl-C again wants to leave."""
CANCELLATIONS = 8
"""How often a call tries to cancel the coroutine. Handlers of several signals may raise right after each other."""
END_S = 10.0
"""How long `stop` waits for the thread to end. A thread that takes longer is stuck in a callback."""

LOOP_DESCRIPTORS = 5  # enough for a loop of asyncio or of uvloop

T = TypeVar("T")


class ProcessLock(ctypes.Structure):
    """A lock for the threads of a process. They acquire it in any order, but `next_owner` is always first.

    The whole state is one attribute, so that an exception from a signal handler cannot leave the lock half acquired.
    CPython runs handlers, and other threads, at calls and backward jumps only. So ``lock.owner = lock.owner or me`` is
    one step, and so is ``lock.owner = lock.next_owner``. Code that acquires or releases the lock in a thread with
    handlers writes these statements out instead of calling a method.
    """

    # Two words of memory. The native core reads and writes them, too.
    _fields_ = (("owner", ctypes.c_ulong), ("next_owner", ctypes.c_ulong))
    owner: int  # the id of the thread that holds the lock; 0: none
    next_owner: int  # acquires the lock next: the background loop only, for it costs a switch

    def __init__(self, recheck_s: float) -> None:
        super().__init__()
        self._recheck_s = recheck_s  # how late a free lock may be noticed
        self.waiting: deque[threading.Lock] = deque()  # each waiting thread sleeps on its own

    def acquire(self, me: int, deadline: float | None = None) -> bool:
        """Acquire the lock for the calling thread ``me``; return False if the deadline passes first."""
        self.owner = self.owner or me
        while self.owner != me:
            if not self._wait(me, deadline):
                return False
            self.owner = self.owner or me
        return True

    def _wait(self, me: int, deadline: float | None = None) -> bool:
        """Wait until the lock may be free; return False if the deadline has passed."""
        left = self._recheck_s
        if deadline is not None:
            left = min(left, deadline - monotonic())
        if left <= 0:
            return False
        sleeper = threading.Lock()
        sleeper.acquire()
        self.waiting.append(sleeper)
        try:
            if self.owner not in (0, me):
                sleeper.acquire(timeout=left)
        finally:
            with suppress(ValueError):
                self.waiting.remove(sleeper)
        return True

    def wake(self) -> None:
        """Wake every waiting thread, so that each tries to acquire the lock again."""
        for sleeper in list(self.waiting):
            with suppress(RuntimeError):  # another thread has released it just now
                sleeper.release()

    # For the background loop: its thread runs no signal handlers

    def acquire_first(self) -> None:
        """Acquire the lock before all other waiting threads."""
        me = get_ident()
        self.next_owner = me
        while (self.owner or me) != me:
            self._wait(me)
        self.owner = me
        self.next_owner = 0

    def release(self) -> None:
        """Release the lock, to `next_owner` if there is one, and wake waiting threads."""
        self.owner = self.next_owner
        if self.waiting:
            self.wake()


process_lock: ProcessLock = ProcessLock(recheck_s=0.01)
"""The process lock: the shared loop holds it in callbacks, other threads hold it for short pieces of their calls."""

_Started: TypeAlias = tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]
"""A loop, and the future that stops it."""


class LoopThread:
    """Runs functions and coroutines for the threads of this process; the calling thread waits for the result.

    If a signal handler raises in a waiting call (Ctrl-C), the call cancels its coroutine, waits until the coroutine has
    ended, and re-raises. The thread is a daemon; the exit of Python ends it.

    ``owner`` is the purpose of this loop, for error texts. A call from a forked child, or from the thread itself,
    raises `RoleError`; a call after the end raises `QueueClosed`.
    """

    def __init__(
        self, owner: str, loop_factory: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
    ) -> None:
        self.ended: bool = False  # or asked to end
        self._started: set[asyncio.Task[None]] = set()  # tasks of `start`: asyncio holds tasks only weakly
        self._owner = owner
        self._pid = os.getpid()
        started: _Errand[_Started] = _Errand()
        self._thread = start_thread(_serve, owner, loop_factory, started, name="aioshm-loop", what=owner)
        self._wait_for(started)
        self.loop: asyncio.AbstractEventLoop
        self.loop, self._stopping = started.outcome()
        _running.add(self)

    @property
    def elsewhere(self) -> bool:
        """Whether this process is a forked child: it has a copy of this object, but not the thread."""
        return self._pid != os.getpid()

    def check(self) -> None:
        """Raise `RoleError` if a call from here could never finish."""
        if self.elsewhere:
            raise RoleError(f"{self._owner} belongs to process {self._pid}, not to its child {os.getpid()}")
        if get_ident() == self._thread.ident:
            raise RoleError(f"{self._owner} was called in its own thread, which would wait for itself")

    def do(self, function: Callable[[], T]) -> T:
        """Run a function in the thread, and return its result."""
        errand: _Errand[T] = _Errand()
        self._post(lambda: errand.run(function))
        self._wait_for(errand)
        return errand.outcome()

    def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run the coroutine that ``work`` creates in the thread, and return its result."""
        errand: _Errand[T] = _Errand()
        self._run(errand, work, CANCELLATIONS)
        return errand.outcome()

    def _run(self, errand: _Errand[T], work: Callable[[], Coroutine[Any, Any, T]], attempts: int) -> None:
        """Wait for a coroutine; try so often to cancel the coroutine, as handlers may raise before `_cancel` begins."""
        try:
            if attempts > 1:
                self._run(errand, work, attempts - 1)
            else:
                self._post(lambda: errand.start(work))
                self._wait_for(errand)
        except BaseException:  # of a signal handler, of any type; or the thread has ended
            errand.dropped = True
            self._cancel(errand)
            raise

    def _cancel(self, errand: _Errand[Any]) -> None:
        """Cancel a coroutine, and wait for the end; drop exceptions of handlers for the first `CANCEL_PATIENCE_S`."""
        while not errand.left:
            try:
                errand.until = errand.until or monotonic() + CANCEL_PATIENCE_S
                if self.post(errand.cancel):
                    self._wait_for(errand)
                errand.left = True
            except QueueClosed:
                errand.left = True
            except BaseException:
                if errand.until and monotonic() > errand.until:
                    errand.left = True
                    raise

    def post(self, function: Callable[[], object]) -> bool:
        """Schedule a function in the thread without waiting; return False if the thread does not take it."""
        try:
            self._post(function)
        except (QueueClosed, RoleError):
            return False
        return True

    def stop(self) -> None:
        """Cancel the running tasks and end the thread. Idempotent."""
        if self.elsewhere:
            return
        if not self.ended:
            self._call_soon(partial(_stop, self._stopping))  # without a reference to this object
            self.ended = True
        if get_ident() != self._thread.ident:
            self._thread.join(END_S)
        _running.discard(self)

    def start(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a coroutine in the thread; do not wait. May be called in any thread."""

        def start() -> None:
            task = self.loop.create_task(work())
            self._started.add(task)
            task.add_done_callback(self._started.discard)

        self._call_soon(start)

    def _wait_for(self, errand: _Errand[Any]) -> None:
        while not errand.wait(ALIVE_CHECK_S):
            if not self._thread.is_alive() and not errand.wait(0):
                raise EndClosed(f"the thread of {self._owner} has ended; its traceback is on the standard error")

    def _post(self, function: Callable[[], object]) -> None:
        self.check()
        if self.ended or not self._call_soon(function):
            raise EndClosed(f"{self._owner} was closed")

    def _call_soon(self, function: Callable[[], object]) -> bool:
        try:
            self.loop.call_soon_threadsafe(function)
        except RuntimeError:
            if not self.loop.is_closed():
                raise
            return False
        return True


class _Errand(Generic[T]):
    """One function or coroutine to run in the thread, and its result or exception."""

    def __init__(self) -> None:
        # Not an Event or a Future: an exception of a signal handler in their `wait` may leave their lock acquired.
        self._done = threading.Lock()
        self._done.acquire()
        self._settled = False
        self.value: T | None = None  # None until there is a result
        self.dropped: bool = False  # whether the caller was interrupted
        self.until: float = 0.0  # until when the cancellation drops exceptions of handlers; 0: not begun
        self.left: bool = False  # whether the caller has ended the cancellation
        self._error: BaseException | None = None
        self._task: asyncio.Task[T] | None = None

    def wait(self, timeout: float) -> bool:
        if not self._done.acquire(timeout=timeout):
            return False
        self._release()  # an exception of a signal handler before this leaves the lock acquired, until `cancel`
        return True

    def _release(self) -> None:
        with suppress(RuntimeError):  # another thread was faster
            self._done.release()

    def outcome(self) -> T:
        if self._error is not None:
            try:
                raise self._error
            finally:
                self._error = None  # breaks a cycle: its traceback holds this frame
        return cast("T", self.value)

    # In the thread

    def settle(self, value: T | None, error: BaseException | None = None) -> None:
        if not self._settled:
            self._settled = True
            self.value = value
            self._error = error
            self._release()

    def run(self, function: Callable[[], T]) -> None:
        try:
            self.settle(function())
        except BaseException as error:
            self.settle(None, error)

    def start(self, work: Callable[[], Coroutine[Any, Any, T]]) -> None:
        if not self.dropped:
            self._task = asyncio.get_running_loop().create_task(self._begin(work))
            self._task.add_done_callback(self._end)

    async def _begin(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        return await work()

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
        else:
            self.settle(None, EndClosed("interrupted"))  # unless the call had posted `start`
            self._release()

    def _end(self, task: asyncio.Task[T]) -> None:
        self._task = None
        if task.cancelled():
            self.settle(None, EndClosed("closed while this call waited"))
        elif (error := task.exception()) is not None:
            self.settle(None, error)
        else:
            self.settle(task.result())


def _stop(stopping: asyncio.Future[None]) -> None:
    if not stopping.done():
        stopping.set_result(None)


def _serve(owner: str, loop_factory: Callable[[], asyncio.AbstractEventLoop], started: _Errand[_Started]) -> None:
    """Run a new loop in this thread until it is stopped."""

    def make() -> asyncio.AbstractEventLoop:
        check_descriptors(owner, LOOP_DESCRIPTORS)  # a constructor that fails halfway leaks descriptors
        with naming_limits(owner):
            return loop_factory()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        stopping = loop.create_future()
        started.settle((loop, stopping))
        await stopping

    try:
        loop = make()
    except BaseException as error:
        started.settle(None, error)
        return
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(main())


class _ReleasingSelector(selectors.PollSelector):
    """Releases `process_lock` while the loop sleeps.

    It uses poll(2): a forked child shares an epoll, and would unregister the descriptors for the parent, too.
    """

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._release()
        try:
            return super().select(timeout)
        finally:
            process_lock.acquire_first()

    def close(self) -> None:
        self._release()
        super().close()

    def _release(self) -> None:
        if process_lock.owner == get_ident():
            process_lock.release()


_running: weakref.WeakSet[LoopThread] = weakref.WeakSet()
_shared: LoopThread | None = None
_starting = threading.RLock()  # reentrant: a signal handler may start the loop, too
_inherited: list[LoopThread] = []
"""In a forked child, the loops of its parents: kept, since asyncio warns about an open loop that is collected."""


def shared_loop() -> LoopThread:
    """Return the background loop of this process; start the loop if there is none."""
    global _shared
    if _shared is None:
        with _starting:
            if _shared is None:
                _shared = LoopThread("the background loop", lambda: asyncio.SelectorEventLoop(_ReleasingSelector()))
    return _shared


def _end_all() -> None:
    for thread in list(_running):
        thread.stop()


def _detach_after_fork() -> None:
    global _shared, _starting
    if _shared is not None:
        _inherited.append(_shared)
        _running.discard(_shared)
        _shared = None
    _starting = threading.RLock()
    process_lock.owner = 0
    process_lock.next_owner = 0
    process_lock.waiting.clear()


atexit.register(_end_all)
os.register_at_fork(after_in_child=_detach_after_fork)
