"""What the demo shows of a front end and its engines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from aioshm.cli.demo.engines import EnginesResult, FrontEnd

_OTHERS_WIDTH = 48
"""How many columns of the terminal the table needs besides what the engines say."""
_STYLES = {"killed": "red", "ready": "green"}


@contextmanager
def shown_engines(console: Console, front_end: FrontEnd) -> Iterator[None]:
    """Show what happens inside the block: a table that lives, or, where nobody watches, line by line."""
    if not console.is_interactive:
        front_end.say = lambda line: console.print(line, markup=False, soft_wrap=True)
        yield
        return
    width = max(10, console.width - _OTHERS_WIDTH)
    with Live(get_renderable=lambda: _table(front_end, width), console=console, refresh_per_second=20):
        yield


def show_result(console: Console, result: EnginesResult) -> None:
    """Print what was measured."""
    table = _columns("engine", "pid", "ready after", "requests", "words")
    for each in result.engines:
        table.add_row(str(each.engine), str(each.pid), f"{each.ready_s:.2f} s", str(each.requests), str(each.words))
    console.print(table)
    killed = result.killed
    console.print(Text(killed.error, style="red"))
    console.print(
        f"its {killed.requests} requests in flight were told so, the last one {killed.noticed_ms:.1f} ms after the kill"
    )
    console.print(f"{killed.went_on} requests of the other engines went on")
    console.print(
        f"engine {killed.engine} was back {killed.back_s:.2f} s after it was killed, with pid {killed.new_pid}"
    )
    console.print(
        f"[bold green]{result.requests} requests, all {result.words:,} words as they must be[/]; "
        f"the first word after {result.first_word_p50_ms:.1f} ms (median)"
    )


def _table(front_end: FrontEnd, width: int) -> Table:
    table = _columns("engine", "pid", "state", "requests", "words")
    table.add_column("", no_wrap=True, width=width)
    for each, state, latest in zip(front_end.figures, front_end.states, front_end.latest, strict=True):
        shown = latest[:width] if state == "killed" else latest[-width:]
        styled = Text(state, style=_STYLES.get(state, "yellow"))
        counts = str(each.requests), str(each.words)
        table.add_row(str(each.engine), str(each.pid or ""), styled, *counts, Text(shown, style="dim"))
    return table


def _columns(*names: str) -> Table:
    table = Table(box=box.SIMPLE, pad_edge=False)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True, min_width=len("connected") if name == "state" else None)
    return table
