"""What the demo shows of a front end and its engines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from aioshm.cli.demo.engines import Display, EnginesResult
from aioshm.engine import CoreEngineState, StartupProgress
from aioshm.errors import EngineDead

_OTHERS_WIDTH = 48
"""How many columns of the terminal the table needs besides what the engines say."""


@contextmanager
def shown_engines(console: Console, n_engines: int) -> Iterator[Display]:
    """Show what happens inside the block: a table that lives, or, where nobody watches, line by line."""
    if not console.is_interactive:
        yield _PlainLines(console)
        return
    display = _Table(n_engines, max(10, console.width - _OTHERS_WIDTH))
    with Live(get_renderable=display.render, console=console, refresh_per_second=20):
        yield display


class NoDisplay:
    """Shows nothing."""

    def progressed(self, progress: StartupProgress) -> None: ...

    def ready(self, pids: Sequence[int]) -> None: ...

    def heard(self, engine: int, word: str, said: str | None) -> None: ...

    def killing(self, engine: int) -> None: ...

    def died(self, error: EngineDead) -> None: ...


def show_result(console: Console, result: EnginesResult) -> None:
    """Print what was measured."""
    table = Table(box=box.SIMPLE, pad_edge=False)
    for column in ("engine", "pid", "ready after", "requests", "words"):
        table.add_column(column, justify="right", no_wrap=True)
    for engine in result.engines:
        table.add_row(
            str(engine.engine), str(engine.pid), f"{engine.ready_s:.2f} s", str(engine.requests), str(engine.words)
        )
    console.print(table)
    killed = result.killed
    console.print(Text(killed.error, style="red"))
    console.print(
        f"{killed.requests} requests in flight were told so, the last one {killed.noticed_ms:.1f} ms after the kill"
    )
    console.print(
        f"[bold green]{result.requests} requests, all {result.words:,} words as they must be[/]; "
        f"the first word after {result.first_word_p50_ms:.1f} ms (median)"
    )


class _PlainLines:
    def __init__(self, console: Console) -> None:
        self._console = console

    def progressed(self, progress: StartupProgress) -> None:
        self._print(str(progress))

    def ready(self, pids: Sequence[int]) -> None:
        pass  # the last line has said so

    def heard(self, engine: int, word: str, said: str | None) -> None:
        if said is not None:
            self._print(f"engine {engine}: {said}")

    def killing(self, engine: int) -> None:
        self._print(f"engine {engine} is killed now, with more requests in flight")

    def died(self, error: EngineDead) -> None:
        pass  # the result says so

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)


class _Table:
    def __init__(self, n_engines: int, width: int) -> None:
        self._width = width
        self._states = ["starting"] * n_engines
        self._pids = [""] * n_engines
        self._requests = [0] * n_engines
        self._words = [0] * n_engines
        self._latest = [""] * n_engines

    def render(self) -> Table:
        table = Table(box=box.SIMPLE, pad_edge=False)
        for column in ("engine", "pid"):
            table.add_column(column, justify="right", no_wrap=True)
        table.add_column("state", no_wrap=True, min_width=10)
        for column in ("requests", "words"):
            table.add_column(column, justify="right", no_wrap=True)
        table.add_column("", no_wrap=True, width=self._width)
        for engine, state in enumerate(self._states):
            style = "red" if state == "killed" else "green" if state == "ready" else "yellow"
            latest = Text(self._latest[engine][-self._width :], style="dim")
            counts = (str(self._requests[engine]), str(self._words[engine]))
            table.add_row(str(engine), self._pids[engine], Text(state, style=style), *counts, latest)
        return table

    def progressed(self, progress: StartupProgress) -> None:
        if progress.moved is not None:
            self._states[progress.moved] = "ready"
        for each in progress.waiting:
            self._states[each.index] = "connected" if each.state is CoreEngineState.CONNECTED else "starting"
            self._pids[each.index] = str(each.pid or "")

    def ready(self, pids: Sequence[int]) -> None:
        self._states = ["ready"] * len(pids)
        self._pids = list(map(str, pids))

    def heard(self, engine: int, word: str, said: str | None) -> None:
        self._words[engine] += 1
        self._latest[engine] += " " + "".join(letter if letter.isprintable() else "?" for letter in word)
        self._latest[engine] = self._latest[engine][-self._width :]
        if said is not None:
            self._requests[engine] += 1

    def killing(self, engine: int) -> None:
        self._states[engine] = "killed"

    def died(self, error: EngineDead) -> None:
        if error.engine is not None:
            self._latest[error.engine] = str(error)[: self._width]
