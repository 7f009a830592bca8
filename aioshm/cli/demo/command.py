"""The ``demo`` command: its options, and one run from beginning to end."""

from __future__ import annotations

import asyncio
import importlib.util
import os
from contextlib import nullcontext
from enum import StrEnum
from pathlib import Path
from time import monotonic
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console

from aioshm.cli.demo.crew import Crew
from aioshm.cli.demo.display import show_results, shown_progress
from aioshm.cli.demo.facts import counted, machine_facts, print_json
from aioshm.cli.demo.orders import Arrays, Job, Result
from aioshm.cli.demo.script import LINES_WANTED, outline, split_lines
from aioshm.cli.demo.source import default_input, printable, read_checked
from aioshm.cli.outcome import UNUSABLE, CommandFailed, until_interrupted
from aioshm.config import Options

MAX_READERS = 64
MAX_ENGINES = 16


class Loop(StrEnum):
    """The event loop of the writer and the readers."""

    AUTO = "auto"
    ASYNCIO = "asyncio"
    UVLOOP = "uvloop"


def register(app: typer.Typer) -> None:
    """Add ``aioshm demo``."""
    app.command("demo")(_demo)


def _demo(
    context: typer.Context,
    input_: Annotated[
        Path | None,
        typer.Option(
            "--input", metavar="FILE", show_default="the licence of aioshm", help="The text whose lines are sent."
        ),
    ] = None,
    readers: Annotated[int, typer.Option("--readers", metavar="N", help="How many processes read.")] = 2,
    remote: Annotated[
        int, typer.Option("--remote", metavar="N", help="How many more processes read over TCP, on the loopback.")
    ] = 0,
    repeat: Annotated[
        int | None,
        typer.Option(
            "--repeat",
            metavar="N",
            show_default=f"as often as makes {LINES_WANTED:,} lines",
            help="How often the text is sent.",
        ),
    ] = None,
    engines: Annotated[
        int | None,
        typer.Option(
            "--engines",
            metavar="N",
            show_default=False,
            help="Show a front end with so many engines instead, one of which is killed.",
        ),
    ] = None,
    loop: Annotated[Loop, typer.Option("--loop", help="Event loop; auto is uvloop where installed.")] = Loop.AUTO,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Send a text and tensors from one process to others, and check every message in each of them."""
    if engines is not None:
        _check_alone("--engines", context, "readers", "remote", "repeat")
        _check_range("--engines", engines, 1, MAX_ENGINES)
        _check_environment()
        from aioshm.cli.demo.engines_command import perform  # here: what it needs takes a while to import

        perform(input_, engines, _loop_name(loop), as_json)
        return
    _check_range("--remote", remote, 0, MAX_READERS)
    _check_range("--readers", readers, 0 if remote else 1, MAX_READERS)
    if repeat is not None:
        _check_range("--repeat", repeat, 1)
    _check_environment()
    path, remark = (input_, None) if input_ is not None else default_input()
    n_lines = len(split_lines(read_checked(path)))
    job = Job(
        input=os.fsencode(path.absolute()),
        repeat=repeat or -(-LINES_WANTED // n_lines),
        readers=readers,
        remote=remote,
        arrays=_arrays(),
    )
    _perform(job, n_lines, _loop_name(loop), remark, as_json)


def _perform(job: Job, n_lines: int, loop: str, remark: str | None, as_json: bool) -> None:
    phases = outline(n_lines, job.repeat)
    total = sum(phases.values())
    facts = machine_facts(loop) | {"arrays": job.arrays}
    console = Console(highlight=False, soft_wrap=False)
    if not as_json:
        _introduce(console, job, n_lines, facts, remark)
    began = monotonic()
    with nullcontext(_nothing) if as_json else shown_progress(console, phases) as progressed:
        writer, *readers = asyncio.run(until_interrupted(Crew(job.readers + job.remote, progressed).run(job, loop)))
        progressed(total)
    for rank, result in enumerate(readers):
        if result.messages != total:  # a reader's own count; the file may have changed in between
            raise CommandFailed(f"reader {rank}: verified {result.messages:,} messages, {total:,} were to come")
    if as_json:
        report = _report(job, n_lines, total, monotonic() - began, facts, writer, readers)
        print_json(report)
        return
    show_results(console, writer, readers, job.readers)
    console.print(f"[bold green]all {total:,} messages verified by every reader[/]")


def _introduce(console: Console, job: Job, n_lines: int, facts: dict[str, Any], remark: str | None) -> None:
    console.print(
        f"aioshm {facts['aioshm']}: 1 writer, {_readers(job)} on {facts['loop']}, "
        f"Python {facts['python']}, {'native' if facts['native_core'] else 'portable'} core, "
        f"{facts['usable_cpus']} usable CPU{'s' if facts['usable_cpus'] > 1 else ''}"
    )
    console.print(f"{n_lines:,} lines x {job.repeat:,} of {printable(job.input)}", markup=False, overflow="fold")
    if remark is not None:
        console.print(remark, markup=False)


def _readers(job: Job) -> str:
    local = counted(job.readers, "reader")
    if not job.remote:
        return local
    return f"{local} and {job.remote} over TCP, encrypted," if job.readers else f"{job.remote} over TCP, encrypted,"


def _report(
    job: Job,
    n_lines: int,
    total: int,
    seconds: float,
    facts: dict[str, Any],
    writer: Result,
    readers: list[Result],
) -> dict[str, Any]:
    return {
        "verified": True,
        "messages": total,
        "seconds": seconds,
        "machine": facts,
        "input": {"path": printable(job.input), "lines": n_lines, "repeat": job.repeat},
        "writer": _process_report(writer),
        "readers": [
            {"rank": rank, "remote": rank >= job.readers, **_process_report(result)}
            for rank, result in enumerate(readers)
        ],
    }


def _process_report(result: Result) -> dict[str, Any]:
    report: dict[str, Any] = msgspec.to_builtins(result)
    del report["type"]
    return report


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


def _check_environment() -> None:
    try:
        Options.from_env()
    except ValueError as error:
        raise CommandFailed(str(error), UNUSABLE) from None


def _loop_name(loop: Loop) -> str:
    installed = importlib.util.find_spec("uvloop") is not None
    if loop is Loop.UVLOOP and not installed:
        raise CommandFailed("--loop uvloop needs uvloop: pip install 'aioshm[uvloop]'", UNUSABLE)
    return "uvloop" if installed and loop is not Loop.ASYNCIO else "asyncio"


def _arrays() -> Arrays:
    if importlib.util.find_spec("numpy") is None:
        return "bytes"
    return "numpy" if importlib.util.find_spec("torch") is None else "torch"
