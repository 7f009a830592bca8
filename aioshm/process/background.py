"""Blocking calls in threads of their own, which keep neither a cancelled task nor the process' exit waiting.

The threads of ``asyncio.to_thread`` are waited for when the loop and the interpreter end, so that one call that is
stuck would keep the whole process. These are daemons, one for each call.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, TypeVar

from aioshm.errors import OutOfThreads
from aioshm.process.threads import start_thread

T = TypeVar("T")

_notified: set[asyncio.Future[Any]] = set()
"""Running tasks of users' callbacks: the loop itself holds tasks weakly."""

LOOK_S = 1.0
"""How late a result may be found on a loop that other threads cannot wake any more."""


async def in_thread(function: Callable[[], T], discard: Callable[[T], object] | None = None) -> T:
    """Run ``function`` in a thread, without blocking the loop.

    Cancelling this ends the wait at once; the function goes on, and nobody waits for it any more.

    Args:
        function: What to run. What it raises, this raises.
        discard: Gives back what the function returns when nobody is there to take it, because this was cancelled or
            the loop is closed. Called in a thread, too.

    Raises:
        OutOfThreads: None can be started; nothing was run.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()
    outcome: Future[T] = Future()

    def unclaimed(value: T) -> None:
        if discard is not None:
            discard(value)

    def deliver() -> None:
        error = outcome.exception()
        if done.done():
            if error is None:
                _discard_apart(unclaimed, outcome.result())
        elif error is None:
            done.set_result(outcome.result())
        else:
            done.set_exception(error)

    def work() -> None:
        _settle(outcome, function)
        try:
            loop.call_soon_threadsafe(deliver)
        except RuntimeError:  # the loop is closed: they have left
            if outcome.exception() is None:
                unclaimed(outcome.result())

    thread = start_thread(work, name="aioshm-background", what="work apart from the event loop")
    try:
        while not done.done():
            ended = not thread.is_alive()
            # A forked child that has closed its copy of the loop leaves asyncio's deaf to other threads: see epoll(7).
            await asyncio.wait({done}, timeout=0 if ended else LOOK_S)
            if ended and not done.done():  # it had no memory left to tell
                if not outcome.done():
                    raise MemoryError("a thread ended for want of memory, before its work was done")
                deliver()
        return done.result()
    except asyncio.CancelledError:
        if done.done() and not done.cancelled() and done.exception() is None:  # it came together with the cancellation
            _discard_apart(unclaimed, done.result())
        done.cancel()  # what comes later is nobody's
        raise


async def give_back(function: Callable[[], object]) -> None:
    """Run in a thread what gives something back; where none can be started, here: it has to be done."""
    try:
        await in_thread(function)
    except OutOfThreads:
        function()


def run_apart(function: Callable[[], T], within_s: float, overdue: Exception) -> T:
    """Run ``function`` in a thread, and block until it is done.

    For what may be stuck in foreign code that knows no timeout, and for what needs a thread without an event loop.

    Args:
        function: What to run. What it raises, this raises.
        within_s: How long to wait, in seconds; the function is left to itself then.
        overdue: What to raise then.

    Raises:
        OutOfThreads: None can be started; nothing was run.
    """
    outcome: Future[T] = Future()
    start_thread(_settle, outcome, function, name="aioshm-apart", what="a call with a timeout")
    if not wait([outcome], within_s).done:
        raise overdue
    return outcome.result()


def _settle(outcome: Future[T], function: Callable[[], T]) -> None:
    try:
        value = function()
    except StopIteration as error:  # asyncio's futures refuse it, because it would end whatever generator awaits them
        stopped = RuntimeError("the function raised StopIteration")
        stopped.__cause__ = error
        outcome.set_exception(stopped)
    except BaseException as error:
        outcome.set_exception(error)
    else:
        outcome.set_result(value)


def _discard_apart(discard: Callable[[T], object], value: T) -> None:
    # No daemon: it takes no time, and what it gives back may outlive the process.
    try:
        start_thread(discard, value, name="aioshm-discard", what="giving back what nobody takes", daemon=False)
    except OutOfThreads:
        discard(value)


def notify(callback: Callable[..., object], *args: object) -> None:
    """Call a user's callback on the running loop; run an awaitable result as a task.

    Errors go to the loop's exception handler, which logs them: they do not end the work that is notified of.
    """
    try:
        result = callback(*args)
    except Exception as error:
        _report(callback, error)
        return
    if inspect.isawaitable(result):
        task = asyncio.ensure_future(result)
        _notified.add(task)
        task.add_done_callback(partial(_end_notified, callback))


def _end_notified(callback: Callable[..., object], task: asyncio.Future[Any]) -> None:
    _notified.discard(task)
    if not task.cancelled() and (error := task.exception()) is not None:
        _report(callback, error)


def _report(callback: Callable[..., object], error: BaseException) -> None:
    context = {"message": f"callback {callback!r} has failed", "exception": error}
    asyncio.get_running_loop().call_exception_handler(context)


async def completed(task: asyncio.Task[Any]) -> None:
    """Wait until a task is done, also if this is cancelled meanwhile; neither raise nor return what it did."""
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
