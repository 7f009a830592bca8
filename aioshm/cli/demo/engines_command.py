"""The ``demo`` command with ``--engines``: one run from beginning to end."""

from __future__ import annotations

import asyncio
import os
from contextlib import nullcontext
from pathlib import Path
from time import monotonic

import msgspec
from rich.console import Console

from aioshm.cli.demo.engines import FrontEnd
from aioshm.cli.demo.engines_display import NoDisplay, show_result, shown_engines
from aioshm.cli.demo.facts import counted, machine_facts, print_json
from aioshm.cli.demo.loops import loop_factory
from aioshm.cli.demo.script import split_lines
from aioshm.cli.demo.source import default_input, printable, read_checked
from aioshm.cli.outcome import until_interrupted


def perform(input_: Path | None, n_engines: int, loop: str, as_json: bool) -> None:
    """Do what ``--engines`` says.

    Args:
        input_: The text; None takes the one that is at hand.
        n_engines: How many engines there are.
        loop: The name of the event loop of all processes.
        as_json: Whether to print one JSON object, and nothing else.

    Raises:
        CommandFailed: Something was not as it must be.
    """
    path, remark = (input_, None) if input_ is not None else default_input()
    lines = split_lines(read_checked(path))
    text = os.fsencode(path.absolute())
    facts = machine_facts(loop)
    console = Console(highlight=False, soft_wrap=False)
    if not as_json:
        console.print(f"aioshm {facts['aioshm']}: {counted(n_engines, 'engine')} on {loop}, Python {facts['python']}")
        console.print(f"{len(lines):,} lines of {printable(text)}", markup=False, overflow="fold")
        if remark is not None:
            console.print(remark, markup=False)
    began = monotonic()
    with nullcontext(NoDisplay()) if as_json else shown_engines(console, n_engines) as display:
        front_end = FrontEnd(text, lines, n_engines, loop, display)
        with asyncio.Runner(loop_factory=loop_factory(loop)) as runner:
            result = runner.run(until_interrupted(front_end.run()))
    if not as_json:
        show_result(console, result)
        return
    report = {
        "verified": True,
        "seconds": monotonic() - began,
        "machine": facts,
        "input": {"path": printable(text), "lines": len(lines)},
        **msgspec.to_builtins(result),
    }
    print_json(report)
