"""How a command runs, and how it ends when it does not end well: one line on stderr, and an exit code."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

FAILED = 1
UNUSABLE = 2
"""Bad arguments, or surroundings in which the command cannot start."""


class CommandFailed(Exception):
    """Ends the command.

    Attributes:
        exit_code: Of the process.
    """

    def __init__(self, message: str, exit_code: int = FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def run_interruptibly(work: Coroutine[Any, Any, T], loop: str = "asyncio") -> T:
    """Run ``work`` to its end; SIGINT and SIGTERM cancel it, and it is given the time to clean up.

    Args:
        work: What to run.
        loop: The name of the event loop, see `loop_factory`.

    Raises:
        CommandFailed: It was interrupted; the exit code is the one that shells give to that signal.
    """
    try:
        with asyncio.Runner(loop_factory=loop_factory(loop)) as runner:
            return runner.run(_until_interrupted(work))
    finally:
        work.close()  # a signal may have come before it began


def loop_factory(name: str) -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return what makes the loops of ``"uvloop"`` or ``"asyncio"``; None is asyncio's own."""
    if name != "uvloop":
        return None
    import uvloop

    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def interrupted(signum: int = signal.SIGINT) -> CommandFailed:
    """Return the end of a command that a signal has interrupted."""
    return CommandFailed("interrupted" if signum == signal.SIGINT else "terminated", 128 + signum)


async def _until_interrupted(work: Coroutine[Any, Any, T]) -> T:
    loop = asyncio.get_running_loop()
    task = loop.create_task(work)
    caught: list[int] = []

    def interrupt(signum: int) -> None:
        caught.append(signum)
        if len(caught) == 1:  # a second Ctrl-C must not interrupt the cleaning up
            task.cancel()

    signals = (signal.SIGINT, signal.SIGTERM)
    for signum in signals:
        loop.add_signal_handler(signum, interrupt, signum)
    try:
        return await task
    except asyncio.CancelledError:
        if not caught:
            raise
        raise interrupted(caught[0]) from None
    finally:
        for signum in signals:
            loop.remove_signal_handler(signum)
