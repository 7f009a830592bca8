"""How a command runs, prints JSON, and fails: one line on stderr, and an exit code."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

FAILED = 1
UNUSABLE = 2
"""Exit code for wrong arguments, or an environment in which the command cannot start."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SIGNAL_S = 0.01


class CommandFailed(Exception):
    """Ends the command with one line on stderr, and an exit code."""

    def __init__(self, message: str, exit_code: int = FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def run_interruptibly(work: Coroutine[Any, Any, T], loop: str = "asyncio") -> T:
    """Run ``work``, which SIGINT and SIGTERM cancel; the exit code is then 128 + the signal."""
    before = [(number, signal.getsignal(number)) for number in _SIGNALS]
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # an exception in the constructor of a loop leaves it open
    try:
        with asyncio.Runner(loop_factory=loop_factory(loop)) as runner:
            return runner.run(_interruptible(work))
    finally:
        work.close()  # it may not have started
        for number, handler in before:  # uvloop leaves its own
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


async def _interruptible(work: Coroutine[Any, Any, T]) -> T:
    loop = asyncio.get_running_loop()
    task = loop.create_task(work)
    noted: list[int] = []

    def note(number: int) -> None:
        if not noted:  # a second Ctrl-C does not interrupt the clean-up
            noted.append(number)
            task.cancel()

    for number in _SIGNALS:
        loop.add_signal_handler(number, note, number)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    try:
        return await task
    except (asyncio.CancelledError, Exception) as error:
        await asyncio.sleep(_SIGNAL_S)  # a signal to the whole group may have ended a child first: this error
        if not noted:
            raise
        raise interrupted(noted[0]) from error


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


def print_json(report: dict[str, Any]) -> None:
    """Print one indented JSON object."""
    print(msgspec.json.format(msgspec.json.encode(report), indent=2).decode())


def counted(number: int, noun: str) -> str:
    """Return a number and a noun: ``1 reader``, ``2 readers``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
