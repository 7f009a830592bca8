"""The ``aioshm`` command: runs its sub-commands, and prints errors and JSON for all of them."""

from __future__ import annotations

import asyncio
import errno
import io
import os
import shutil
import signal
import sys
import textwrap
from collections.abc import Callable, Coroutine, Sequence
from importlib import import_module
from typing import Annotated, Any, TypeVar

import msgspec
import typer
from typer.main import get_command

import aioshm
from aioshm.errors import AioshmError

T = TypeVar("T")

FAILED = 1
UNUSABLE = 2
"""Exit code for wrong arguments, or an environment in which the command cannot start."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SIGNAL_S = 0.01
_OUTPUT_ERRORS = (errno.EPIPE, errno.ENOSPC, errno.EIO)
_INTERRUPTED = 128 + signal.SIGINT

_UsageError: type[Exception] = typer.BadParameter.__mro__[1]  # typer has no public name for it

_COMMANDS = {
    **{name: f"aioshm.cli.{name}" for name in ("demo", "doctor", "events")},
    **dict.fromkeys(("export", "ls", "inspect", "top", "who", "dump"), "aioshm.cli.inspection"),
}
"""The sub-commands, and the modules with functions of these names."""


class CommandFailed(Exception):
    """Ends the command with one line on stderr, and an exit code."""

    def __init__(self, message: str, exit_code: int = FAILED) -> None:
        super().__init__(message.partition("\n")[0])
        self.exit_code = exit_code


def interrupted(signum: int) -> CommandFailed:
    """Return the error of a command that a signal interrupted."""
    text = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}[signal.Signals(signum)]
    return CommandFailed(text, 128 + signum)


def print_json(report: dict[str, Any]) -> None:
    """Print one indented JSON object."""
    print(msgspec.json.format(msgspec.json.encode(report), indent=2).decode())


def make_app(command: str | None = None) -> typer.Typer:
    """Return the application with all sub-commands, or only one: imports take longer than most commands."""
    app = typer.Typer()
    app.callback(invoke_without_command=True)(_root)
    names = list(_COMMANDS)
    if command is not None and command in _COMMANDS:
        names = [command]
    for name in names:
        found = getattr(import_module(_COMMANDS[name]), name)
        if isinstance(found, typer.Typer):
            app.add_typer(found, name=name)
        else:
            app.command(name)(found)
    return app


def run(args: Sequence[str]) -> int:
    """Run a command line; return its exit code. Errors are one line on stderr."""
    if sys.stdout is None:
        return _fail(CommandFailed("standard output is closed", UNUSABLE))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a question mark is better than no output
    try:
        code = _run(args)
        sys.stdout.flush()
    except CommandFailed as failure:
        return _fail(failure)
    except KeyboardInterrupt:
        return _fail(interrupted(signal.SIGINT))
    except ValueError as error:  # of AIOSHM_NATIVE, as the command is imported
        return _fail(CommandFailed(str(error), UNUSABLE))
    except OSError as error:
        if error.errno not in _OUTPUT_ERRORS:
            raise
        # The interpreter flushes once more as it exits, and would report the same error again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno == errno.EPIPE:
            return FAILED  # the process that read the output has closed the pipe
        return _fail(CommandFailed(f"cannot write the output: {error.strerror}", UNUSABLE))
    return code


def _run(args: Sequence[str]) -> int:
    command = get_command(make_app(*args[:1]))
    try:
        code = command.main(list(args), prog_name="aioshm", standalone_mode=False)
    except _UsageError as error:
        message = " ".join(str(getattr(error, "format_message", error.__str__)()).split())
        path = getattr(getattr(error, "ctx", None), "command_path", "aioshm")
        raise CommandFailed(f"{message.rstrip('.')} (see {path} --help)", UNUSABLE) from None
    except (AioshmError, ImportError, ValueError, OSError) as error:  # of what the user asked for
        if isinstance(error, OSError) and error.errno in _OUTPUT_ERRORS:
            raise
        raise CommandFailed(str(error), UNUSABLE) from None
    except typer.Abort:
        code = _INTERRUPTED
    if code == _INTERRUPTED:
        raise KeyboardInterrupt  # typer swallows it, and each version returns something else
    return int(code or 0)


def _fail(failure: CommandFailed) -> int:
    text = f"aioshm: {failure}"
    if "COLUMNS" in os.environ or (sys.stderr is not None and sys.stderr.isatty()):
        text = fold(text)
    print(text, file=sys.stderr)
    return failure.exit_code


def fold(text: str) -> str:
    """Fold a text into lines that fit the terminal, or 80 columns, with a hanging indent."""
    width = shutil.get_terminal_size().columns
    return textwrap.fill(text, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"aioshm {aioshm.__version__}")
        raise typer.Exit


def _root(
    ctx: typer.Context,
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Messages between the processes of one asyncio service."""
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


def run_interruptibly(
    work: Coroutine[Any, Any, T], loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None
) -> T:
    """Run a coroutine, which SIGINT and SIGTERM cancel; the exit code is then 128 + the signal."""
    before = [(number, signal.getsignal(number)) for number in _SIGNALS]
    try:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            return runner.run(_interruptible(work))
    finally:
        work.close()  # it may not have started
        for number, handler in before:  # uvloop leaves its own
            signal.signal(number, handler)


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
    try:
        return await task
    except (asyncio.CancelledError, Exception) as error:
        await asyncio.sleep(_SIGNAL_S)  # a signal to the whole group may have ended a child first: this error
        if not noted:
            raise
        raise interrupted(noted[0]) from error
