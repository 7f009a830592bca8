"""Blocking calls in daemon threads of their own, which hold up neither a cancelled task nor the exit of the process."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from aioshm.errors import OutOfThreads
from aioshm.process.limits import start_thread

T = TypeVar("T")

_notified: set[asyncio.Future[Any]] = set()
"""Running tasks of users' callbacks: the loop itself holds tasks weakly."""

RECHECK_S = 1.0
"""How late a result may be found on a loop that other threads cannot wake any more."""


async def in_thread(function: Callable[[], T], discard: Callable[[T], object] | None = None) -> T:
    """Run ``function`` in a thread. Cancelling this ends the wait immediately; the function continues.

    ``discard`` releases the result if this was cancelled. Without a thread nothing is run, and
    `OutOfThreads` is raised.
    """
    loop = asyncio.get_running_loop()
    outcome: Future[T] = Future()
    arrived = asyncio.Event()

    def work() -> None:
        _settle(outcome, function)
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(arrived.set)

    def release(_outcome: Future[T]) -> None:
        if discard is not None and outcome.exception() is None:
            discard(outcome.result())

    start_thread(work, name="aioshm-background", what="work apart from the event loop")
    try:
        while not arrived.is_set():
            # A forked child that has closed its copy of the loop leaves asyncio's deaf to other threads: see epoll(7).
            with suppress(TimeoutError):
                async with asyncio.timeout(RECHECK_S):
                    await arrived.wait()
            if outcome.done():
                break
    except asyncio.CancelledError:
        outcome.add_done_callback(release)
        raise
    return outcome.result()


async def give_back(function: Callable[[], object]) -> None:
    """Run ``function`` in a thread; or here, where none can be started."""
    try:
        await in_thread(function)
    except OutOfThreads:
        function()


def run_apart(function: Callable[[], T], within_s: float, overdue: Exception) -> T:
    """Run ``function`` in a thread, and block until it is done; raise ``overdue`` after ``within_s``.

    For foreign code without timeouts: an overdue function is left to itself.
    """
    outcome: Future[T] = Future()
    start_thread(_settle, outcome, function, name="aioshm-apart", what="a call with a timeout")
    if not wait([outcome], within_s).done:
        raise overdue
    return outcome.result()


def _settle(outcome: Future[T], function: Callable[[], T]) -> None:
    try:
        outcome.set_result(function())
    except BaseException as error:
        outcome.set_exception(error)


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


def notify_soon(callback: Callable[..., object], *args: object) -> None:
    """Do what `notify` does, in the next turn of the running loop."""
    asyncio.get_running_loop().call_soon(notify, callback, *args)


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
