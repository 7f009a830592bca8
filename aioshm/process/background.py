"""Blocking calls in daemon threads, which delay neither a cancelled task nor the exit of the process."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, TypeVar

from aioshm.errors import OutOfThreads
from aioshm.process.limits import start_thread

T = TypeVar("T")

_notified: set[asyncio.Future[Any]] = set()
"""Running tasks of users' callbacks: the loop itself holds tasks weakly."""


async def in_thread(function: Callable[[], T], discard: Callable[[T], object] | None = None) -> T:
    """Run ``function`` in a thread. Cancelling this call ends the wait immediately; the function continues.

    Args:
        function: Runs in the thread; this call raises its exception.
        discard: Releases the result, in a thread, if this call was cancelled.

    Raises:
        OutOfThreads: No thread can be started; the function has not run.
    """
    outcome: Future[T] = Future()
    outcome.set_running_or_notify_cancel()  # so that a cancellation does not keep the function from running
    start_thread(_settle, outcome, function, name="aioshm-background", what="work outside of the event loop")
    try:
        return await asyncio.wrap_future(outcome)
    except asyncio.CancelledError:
        if discard is not None:
            outcome.add_done_callback(partial(_discard, discard))
        raise


async def give_back(function: Callable[[], object]) -> None:
    """Run ``function`` in a thread, or here if no thread can be started."""
    try:
        await in_thread(function)
    except OutOfThreads:
        function()


def run_apart(function: Callable[[], T], within_s: float, overdue: Exception) -> T:
    """Run ``function``, for example foreign code without timeouts, in a thread; block until it has ended.

    Raises:
        Exception: The exception of the function; or ``overdue`` after ``within_s``, while the function continues.
        OutOfThreads: No thread can be started; the function has not run.
    """
    outcome: Future[T] = Future()
    start_thread(_settle, outcome, function, name="aioshm-apart", what="a call with a timeout")
    if not wait([outcome], within_s).done:
        raise overdue
    return outcome.result()


def _settle(outcome: Future[T], function: Callable[[], T]) -> None:
    try:
        value = function()
    except StopIteration as error:  # asyncio's futures refuse it: it would end a generator that awaits them
        stopped = RuntimeError("the function raised StopIteration")
        stopped.__cause__ = error
        outcome.set_exception(stopped)
    except BaseException as error:
        outcome.set_exception(error)
    else:
        outcome.set_result(value)


def _discard(discard: Callable[[T], object], outcome: Future[T]) -> None:
    if outcome.exception() is not None:
        return
    try:  # not a daemon: the result may outlive the process
        start_thread(discard, outcome.result(), name="aioshm-discard", what="releasing a result", daemon=False)
    except (OutOfThreads, RuntimeError):  # Python is ending
        discard(outcome.result())


def notify(callback: Callable[..., object], *args: object) -> None:
    """Call a user's callback on the running loop; run an awaitable result as a task.

    Errors go to the loop's exception handler, which logs them. They do not reach the caller.
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


def notify_soon(callback: Callable[..., object], *args: object) -> None:
    """Call `notify` in the next iteration of the running loop."""
    asyncio.get_running_loop().call_soon(notify, callback, *args)


def _end_notified(callback: Callable[..., object], task: asyncio.Future[Any]) -> None:
    _notified.discard(task)
    if not task.cancelled() and (error := task.exception()) is not None:
        _report(callback, error)


def _report(callback: Callable[..., object], error: BaseException) -> None:
    context = {"message": f"callback {callback!r} has failed", "exception": error}
    asyncio.get_running_loop().call_exception_handler(context)


async def completed(task: asyncio.Task[Any]) -> None:
    """Wait until a task is done, even if this call is cancelled meanwhile; ignore the result of the task."""
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
