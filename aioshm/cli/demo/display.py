"""What the demo of a queue shows: progress while it runs, and its results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import TypeAlias

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from aioshm.cli.demo.ends import Figures
from aioshm.cli.demo.processes import Result

NOTES = (
    'Latency is from just before enqueue to just after dequeue, in the phase "paced", where no message waits behind '
    "another; the other phases run flat out. CPU is of one core, with the making and checking of the messages."
)

Progressed: TypeAlias = Callable[[int], None]
"""Shows how many messages every reader has read."""


@contextmanager
def shown_progress(console: Console, phases: Mapping[str, int]) -> Iterator[Progressed]:
    """Show progress inside the block: a bar for each phase, or, where nobody watches, a line for each that is over."""
    # Each phase's name and count, and how many messages have been read when it is over.
    ends = [(*phase, end) for phase, end in zip(phases.items(), accumulate(phases.values()), strict=True)]
    if not console.is_interactive:
        yield _lines(console, ends)
        return
    columns = (TextColumn("{task.description:<8}"), BarColumn(), TextColumn("{task.completed:,} of {task.total:,}"))
    with Progress(*columns, console=console) as progress:
        yield _bars(progress, ends)


def show_results(console: Console, writer: Result, readers: Sequence[Result], n_local: int) -> None:
    """Print the table of what each process measured; readers from ``n_local`` on are remote."""
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("phase")
    for column in ("messages", "messages/s", "GB/s", "p50 µs", "p99 µs", "CPU"):
        table.add_column(column, justify="right")
    names = [*(f"reader {rank}{', TCP' if rank >= n_local else ''}" for rank in range(len(readers))), "writer"]
    for name, result in zip(names, [*readers, writer], strict=True):
        for index, figures in enumerate(result.phases):
            table.add_row("" if index else name, *_row(figures), end_section=index == len(result.phases) - 1)
    console.print(table)
    console.print(Text(NOTES, style="dim"))


def _row(figures: Figures) -> Iterator[str]:
    yield figures.phase
    yield f"{figures.messages:,}"
    yield _number(figures.messages_per_s, ",.0f")
    yield _number(figures.gb_per_s, ".2f") if figures.phase == "tensors" else ""
    yield _number(figures.p50_us, ",.0f")
    yield _number(figures.p99_us, ",.0f")
    yield _number(figures.cpu_share, ".0%")


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _lines(console: Console, phases: Sequence[tuple[str, int, int]]) -> Progressed:
    coming = list(phases)

    def progressed(done: int) -> None:
        while coming and done >= coming[0][2]:
            name, count, _ = coming.pop(0)
            console.print(f"{name}: {count:,} messages read by every reader")

    return progressed


def _bars(progress: Progress, phases: Sequence[tuple[str, int, int]]) -> Progressed:
    # A bar that has not been started pulses: the first one does, until the processes are up.
    bars = [progress.add_task(name, total=count, start=count < end) for name, count, end in phases]

    def progressed(done: int) -> None:
        for bar, (_, count, end) in zip(bars, phases, strict=True):
            if done > end - count:
                progress.start_task(bar)
                progress.update(bar, completed=min(count, done - end + count))

    return progressed
