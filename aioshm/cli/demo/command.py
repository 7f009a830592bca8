"""The ``demo`` command: its options, and one run from beginning to end."""

from __future__ import annotations

import importlib.util
import os
import platform
from contextlib import nullcontext
from enum import StrEnum
from pathlib import Path
from time import monotonic
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console

import aioshm
from aioshm.cli.demo.blocks import Arrays
from aioshm.cli.demo.display import show_results, shown_progress
from aioshm.cli.demo.processes import Job, run_processes
from aioshm.cli.demo.script import LINES_WANTED, outline, split_lines
from aioshm.cli.demo.source import default_input, printable, read_checked
from aioshm.cli.outcome import UNUSABLE, CommandFailed, run_interruptibly
from aioshm.cli.output import counted, print_json
from aioshm.config import Options
from aioshm.wait.cpus import usable_cpus

MAX_READERS = 64
MAX_ENGINES = 16


class Loop(StrEnum):
    """The event loop of the demo's processes."""

    AUTO = "auto"
    ASYNCIO = "asyncio"
    UVLOOP = "uvloop"


_Input = Annotated[
    Path | None,
    typer.Option(
        "--input", metavar="FILE", show_default="the licence of aioshm", help="The text whose lines are sent."
    ),
]
_Readers = Annotated[int, typer.Option("--readers", metavar="N", help="How many processes read.")]
_Remote = Annotated[
    int, typer.Option("--remote", metavar="N", help="How many more processes read over TCP, on the loopback.")
]
_OFTEN = f"as often as makes {LINES_WANTED:,} lines"
_Repeat = Annotated[
    int | None, typer.Option("--repeat", metavar="N", show_default=_OFTEN, help="How often the text is sent.")
]
_ENGINES_HELP = "Show a front end with so many engines instead, one of which is killed, and comes back."
_Engines = Annotated[int | None, typer.Option("--engines", metavar="N", show_default=False, help=_ENGINES_HELP)]
_Loop = Annotated[Loop, typer.Option("--loop", help="Event loop; auto is uvloop where installed.")]
_AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


def register(app: typer.Typer) -> None:
    """Add ``aioshm demo``."""
    app.command("demo")(_demo)


def _demo(
    context: typer.Context,
    input_: _Input = None,
    readers: _Readers = 2,
    remote: _Remote = 0,
    repeat: _Repeat = None,
    engines: _Engines = None,
    loop: _Loop = Loop.AUTO,
    as_json: _AsJson = False,
) -> None:
    """Send a text and tensors from one process to others, and check every message in each of them."""
    if engines is not None:
        _check_alone("--engines", context, "readers", "remote", "repeat")
        _check_range("--engines", engines, 1, MAX_ENGINES)
    else:
        _check_range("--remote", remote, 0, MAX_READERS)
        _check_range("--readers", readers, 0 if remote else 1, MAX_READERS)
        if repeat is not None:
            _check_range("--repeat", repeat, 1)
    try:
        Options.from_env()
    except ValueError as error:
        raise CommandFailed(str(error), UNUSABLE) from None
    run = _Run(input_, _loop_name(loop), as_json)
    if engines is not None:
        run.engines(engines)
    else:
        run.queue(readers, remote, repeat)


class _Run:
    """One run, of either demo.

    Args:
        input_: The text; None takes the one that is at hand.
        loop: The name of the event loop of all processes.
        as_json: Whether to print one JSON object, and nothing else.
    """

    def __init__(self, input_: Path | None, loop: str, as_json: bool) -> None:
        path, self._remark = (input_, None) if input_ is not None else default_input()
        self._lines = split_lines(read_checked(path))
        self._path = os.fsencode(path.absolute())
        self._loop = loop
        self._as_json = as_json
        self._console = Console(highlight=False, soft_wrap=False)
        self._machine: dict[str, Any] = {
            "aioshm": aioshm.__version__,
            "python": platform.python_version(),
            "platform": platform.platform(),
            "native_core": aioshm.native_core,
            "usable_cpus": usable_cpus(),
            "loop": loop,
        }
        self._began = monotonic()

    def queue(self, readers: int, remote: int, repeat: int | None) -> None:
        """Run a writer and its readers."""
        repeat = repeat or -(-LINES_WANTED // len(self._lines))
        job = Job(input=self._path, repeat=repeat, readers=readers, remote=remote, arrays=_arrays())
        self._machine["arrays"] = job.arrays
        core = "native" if aioshm.native_core else "portable"
        cpus = counted(self._machine["usable_cpus"], "usable CPU")
        self._introduce(f"1 writer, {_readers(job)}", f"{core} core, {cpus}", f" x {repeat:,}")
        phases = outline(len(self._lines), repeat)
        total = sum(phases.values())
        with nullcontext(_nothing) if self._as_json else shown_progress(self._console, phases) as progressed:
            writer, read = run_interruptibly(run_processes(job, self._loop, progressed))
            progressed(total)
        for rank, result in enumerate(read):
            if result.messages != total:  # a reader's own count; the file may have changed in between
                raise CommandFailed(f"reader {rank}: verified {result.messages:,} messages, {total:,} were to come")
        if self._as_json:
            ranks = [
                {"rank": rank, "remote": rank >= readers} | msgspec.to_builtins(result)
                for rank, result in enumerate(read)
            ]
            self._report({"repeat": repeat}, {"messages": total, "writer": writer, "readers": ranks})
            return
        show_results(self._console, writer, read, readers)
        self._console.print(f"[bold green]all {total:,} messages verified by every reader[/]")

    def engines(self, n_engines: int) -> None:
        """Run a front end and its engines."""
        from aioshm.cli.demo.engines import FrontEnd  # here: what it needs takes a while to import
        from aioshm.cli.demo.engines_display import show_result, shown_engines

        self._introduce(counted(n_engines, "engine"))
        front_end = FrontEnd(self._path, self._lines, n_engines, self._loop)
        with nullcontext() if self._as_json else shown_engines(self._console, front_end):
            result = run_interruptibly(front_end.run(), self._loop)
        if self._as_json:
            self._report({}, msgspec.to_builtins(result))
        else:
            show_result(self._console, result)

    def _introduce(self, who: str, where: str = "", times: str = "") -> None:
        if self._as_json:
            return
        what = f"{who} on {self._loop}, Python {self._machine['python']}"
        self._console.print(f"aioshm {aioshm.__version__}: {', '.join(filter(None, (what, where)))}")
        text = f"{len(self._lines):,} lines{times} of {printable(self._path)}"
        self._console.print(text, markup=False, overflow="fold")
        if self._remark is not None:
            self._console.print(self._remark, markup=False)

    def _report(self, more_of_input: dict[str, Any], result: dict[str, Any]) -> None:
        input_ = {"path": printable(self._path), "lines": len(self._lines)} | more_of_input
        head = {"verified": True, "seconds": monotonic() - self._began, "machine": self._machine, "input": input_}
        print_json(head | result)


def _readers(job: Job) -> str:
    local = counted(job.readers, "reader")
    if not job.remote:
        return local
    return f"{local} and {job.remote} over TCP, encrypted," if job.readers else f"{job.remote} over TCP, encrypted,"


def _nothing(_: int, /) -> None:
    pass


# What is checked before anything starts


def _check_range(option: str, value: int, lowest: int, highest: int | None = None) -> None:
    if value < lowest:
        raise CommandFailed(f"{option} must be at least {lowest}, not {value}", UNUSABLE)
    if highest is not None and value > highest:
        raise CommandFailed(f"{option} must be at most {highest}, not {value}", UNUSABLE)


def _check_alone(option: str, context: typer.Context, *others: str) -> None:
    for name in others:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise CommandFailed(f"{option} does not go with --{name}", UNUSABLE)


def _loop_name(loop: Loop) -> str:
    installed = importlib.util.find_spec("uvloop") is not None
    if loop is Loop.UVLOOP and not installed:
        raise CommandFailed("--loop uvloop needs uvloop: pip install 'aioshm[uvloop]'", UNUSABLE)
    return "uvloop" if installed and loop is not Loop.ASYNCIO else "asyncio"


def _arrays() -> Arrays:
    if importlib.util.find_spec("numpy") is None:
        return "bytes"
    return "numpy" if importlib.util.find_spec("torch") is None else "torch"
