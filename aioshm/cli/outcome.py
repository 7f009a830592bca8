"""How a command runs, prints JSON, and fails: one line on stderr, and an exit code."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any, Self, TypeVar

import msgspec

T = TypeVar("T")

FAILED = 1
UNUSABLE = 2
"""Exit code for wrong arguments, or an environment in which the command cannot start."""


class CommandFailed(Exception):
    """Ends the command with one line on stderr, and an exit code."""

    def __init__(self, message: str, exit_code: int = FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def run_interruptibly(work: Coroutine[Any, Any, T], loop: str = "asyncio") -> T:
    """Run ``work``, which SIGINT and SIGTERM cancel; the exit code is then 128 + the signal."""
    try:
        with _Signals() as signals, asyncio.Runner(loop_factory=loop_factory(loop)) as runner:
            return runner.run(signals.run(work))
    finally:
        work.close()  # a signal may have come before it started


def loop_factory(name: str) -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return the function that creates a loop of ``"uvloop"`` or ``"asyncio"``; None: asyncio's default."""
    if name != "uvloop":
        return None
    import uvloop

    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def interrupted(signum: int = signal.SIGINT) -> CommandFailed:
    """Return the error of a command that a signal interrupted."""
    return CommandFailed("interrupted" if signum == signal.SIGINT else "terminated", 128 + signum)


class _Signals:
    """Cancels a task on SIGINT and SIGTERM; handlers of the loop would run too late."""

    def __init__(self) -> None:
        self._noted: list[int] = []
        self._cancel: Callable[[], object] | None = None

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self._noted.append(number)
        if self._cancel is not None and len(self._noted) == 1:  # a second Ctrl-C does not interrupt the clean-up
            self._cancel()

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` until it ends or a signal comes, or came before."""
        loop = asyncio.get_running_loop()
        task = loop.create_task(work)
        self._cancel = lambda: loop.call_soon_threadsafe(task.cancel)
        if self._noted:
            task.cancel()
        try:
            return await task
        except (asyncio.CancelledError, Exception) as error:
            if not self._noted:
                raise
            raise interrupted(self._noted[0]) from error
        finally:
            self._cancel = None


def print_json(report: dict[str, Any]) -> None:
    """Print one indented JSON object."""
    print(msgspec.json.format(msgspec.json.encode(report), indent=2).decode())


def counted(number: int, noun: str) -> str:
    """Return a number and a noun: ``1 reader``, ``2 readers``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
