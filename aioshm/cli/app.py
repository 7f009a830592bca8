"""The ``aioshm`` command: its sub-commands, put together, and what all of them share."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Protocol

import typer
from typer.main import get_command

import aioshm
from aioshm.cli import doctor, events, export
from aioshm.cli.demo import command as demo
from aioshm.cli.inspection import commands as inspection
from aioshm.cli.outcome import FAILED, UNUSABLE, CommandFailed, interrupted

_UsageError: type[Exception] = typer.BadParameter.__mro__[1]  # typer gives it no public name of its own
_INTERRUPTED = interrupted().exit_code


class _Command(Protocol):
    def register(self, app: typer.Typer) -> None: ...


_COMMANDS: tuple[_Command, ...] = (demo, doctor, events, export, inspection)


def make_app() -> typer.Typer:
    """Return the application with every sub-command."""
    app = typer.Typer()
    app.callback(invoke_without_command=True)(_root)
    for command in _COMMANDS:
        command.register(app)
    return app


def run(args: Sequence[str]) -> int:
    """Run a command line; return its exit code. What goes wrong is one line on stderr."""
    if sys.stdout is None:
        return _told(CommandFailed("standard output is closed", UNUSABLE))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # better a question mark than no output
    try:
        code = _run(args)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return _told(interrupted())
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC, errno.EIO):
            raise
        _give_up_stdout()
        if error.errno == errno.EPIPE:
            return FAILED  # the process that read the output has closed the pipe
        return _told(CommandFailed(f"cannot write the output: {error.strerror}", UNUSABLE))
    return code


def _run(args: Sequence[str]) -> int:
    try:
        code = get_command(make_app()).main(list(args), prog_name="aioshm", standalone_mode=False)
    except CommandFailed as failure:
        return _told(failure)
    except _UsageError as error:
        message = " ".join(str(getattr(error, "format_message", error.__str__)()).split())
        return _told(CommandFailed(f"{message.rstrip('.')} (see aioshm --help)", UNUSABLE))
    except typer.Abort:
        code = _INTERRUPTED
    if code == _INTERRUPTED:
        raise KeyboardInterrupt  # which typer has swallowed, each version in its own way
    return code if isinstance(code, int) else 0


def _told(failure: CommandFailed) -> int:
    print(f"aioshm: {failure}", file=sys.stderr)
    return failure.exit_code


def _give_up_stdout() -> None:
    # The interpreter flushes once more as it exits, and would report the same error again.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


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
