"""The ``aioshm`` command: its sub-commands, and the handling of errors and output."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated

import typer
from typer.main import get_command

import aioshm
from aioshm.cli.outcome import FAILED, UNUSABLE, CommandFailed, interrupted

_UsageError: type[Exception] = typer.BadParameter.__mro__[1]  # typer has no public name for it
_INTERRUPTED = interrupted().exit_code


_COMMANDS = {
    "demo": "aioshm.cli.demo",
    "doctor": "aioshm.cli.doctor",
    "events": "aioshm.cli.events",
    "export": "aioshm.cli.export",
    **dict.fromkeys(("ls", "inspect", "top", "who", "dump"), "aioshm.cli.inspection.commands"),
}
"""The modules that register the sub-commands."""


def make_app(command: str | None = None) -> typer.Typer:
    """Return the application with all sub-commands, or only one: imports take longer than most commands."""
    app = typer.Typer()
    app.callback(invoke_without_command=True)(_root)
    wanted = [_COMMANDS[command]] if command in _COMMANDS else dict.fromkeys(_COMMANDS.values())
    for name in wanted:
        import_module(name).register(app)
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
    except KeyboardInterrupt:
        return _fail(interrupted())
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC, errno.EIO):
            raise
        _give_up_stdout()
        if error.errno == errno.EPIPE:
            return FAILED  # the process that read the output has closed the pipe
        return _fail(CommandFailed(f"cannot write the output: {error.strerror}", UNUSABLE))
    return code


def _run(args: Sequence[str]) -> int:
    try:
        code = get_command(make_app(args[0] if args else None)).main(
            list(args), prog_name="aioshm", standalone_mode=False
        )
    except CommandFailed as failure:
        return _fail(failure)
    except _UsageError as error:
        message = " ".join(str(getattr(error, "format_message", error.__str__)()).split())
        return _fail(CommandFailed(f"{message.rstrip('.')} (see aioshm --help)", UNUSABLE))
    except typer.Abort:
        code = _INTERRUPTED
    if code == _INTERRUPTED:
        raise KeyboardInterrupt  # which typer swallowed, each version in another way
    return code if isinstance(code, int) else 0


def _fail(failure: CommandFailed) -> int:
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
