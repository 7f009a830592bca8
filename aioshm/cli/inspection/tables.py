"""Queues and their ends as tables; how numbers are written, and the JSON of these commands."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import msgspec
from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, JustifyMethod
from rich.markup import escape
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from aioshm.observe.proc import HUNG
from aioshm.observe.scan import Watched
from aioshm.observe.snapshot import End, QueueSnapshot
from aioshm.observe.suspects import LONG_LAG

BAD = "bold red"
POOR = "yellow"

JSON_VERSION: Final = 1
"""Of the shape of what ``--json`` prints; see docs/howto/inspection.md. What is added does not change it."""

NONE: Final = "-"


class Rows(NamedTuple):
    """What a table says, however it is drawn.

    Attributes:
        names: Of the columns.
        left: Those that are justified to the left.
        rows: The cells of each row.
        styles: Of each row.
    """

    names: tuple[str, ...]
    left: Collection[str]
    rows: list[list[str | Text]]
    styles: list[str]

    def table(self) -> Table:
        """Return a table that fits in where it is printed."""
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for name in self.names:
            justify: JustifyMethod = "left" if name in self.left else "right"
            if name == "command":
                table.add_column(name, no_wrap=True, overflow="ellipsis", max_width=60)
            else:
                table.add_column(name, justify=justify)
        for row, style in zip(self.rows, self.styles, strict=True):
            table.add_row(*row, style=style)
        return table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        """Draw at once what a table looks like, cut off at the right: a tenth of the work, once a second."""
        plain = [[str(cell) for cell in row] for row in self.rows]
        widths = [max(map(cell_len, column)) for column in zip(self.names, *plain, strict=True)]
        yield from self._line(console, options, self.names, self.names, widths, "bold")
        yield from _cut([Segment("\u2500" * (sum(widths) + 2 * len(widths) - 2))], options)
        for row, cells, style in zip(self.rows, plain, self.styles, strict=True):
            yield from self._line(console, options, row, cells, widths, style)

    def _line(
        self,
        console: Console,
        options: ConsoleOptions,
        row: Sequence[str | Text],
        cells: Sequence[str],
        widths: Sequence[int],
        style: str,
    ) -> list[Segment]:
        base = console.get_style(style or "none")
        segments: list[Segment] = []
        for name, cell, text, width in zip(self.names, row, cells, widths, strict=True):
            own = base + console.get_style(cell.style or "none") if isinstance(cell, Text) else base
            space, is_last = " " * (width - cell_len(text)), len(segments) == len(widths) - 1
            padded = text + space * (not is_last) if name in self.left else space + text
            segments.append(Segment(padded + "  " * (not is_last), own))
        return _cut(segments, options)


def _cut(line: list[Segment], options: ConsoleOptions) -> list[Segment]:
    return [*Segment.adjust_line_length(line, options.max_width, pad=False), Segment.line()]


def queues_rows(watched: Iterable[Watched]) -> Rows:
    """Return the table of ``ls``."""
    names = ("queue", "writer", "readers", "rate", "bytes/s", "backlog", "age", "memory")
    rows: list[list[str | Text]] = []
    for each in watched:
        queue, rates = each.queue, each.rates
        there = sum(end.membership == "attached" for end in queue.readers)
        remote = queue.header.writer.remote_readers
        rows.append(
            [
                Text(queue.label),
                process(queue.writer),
                f"{there}" + f" + {remote} remote" * bool(remote),
                NONE if rates is None else f"{count(rates.messages_per_s)}/s",
                NONE if rates is None else size(rates.bytes_per_s),
                backlog(queue),
                duration(queue.header.writer.age_s),
                size(queue.memory_bytes + queue.overflow_bytes),
            ]
        )
    return Rows(names, {"queue"}, rows, [""] * len(rows))


def ends_rows(watched: Iterable[Watched], *, queues: bool) -> Rows:
    """Return the table of the ends of queues, with or without the queues' names."""
    names = ("queue",) * queues + ("end", "pid", "state", "waits", "messages", "rate", "lag", "p50", "p99", "CPU")
    rows: list[list[str | Text]] = []
    styles = []
    for each in watched:
        for number, end in enumerate(each.queue.ends):
            rows.append([*([Text(each.queue.label)] * queues), *_end_row(each, number, end)])
            styles.append(_row_style(end))
    return Rows((*names, "command"), {"queue", "end", "state", "waits", "command"}, rows, styles)


def _end_row(each: Watched, number: int, end: End) -> list[str | Text]:
    rates = each.rates
    speed = None if rates is None else (rates.read_per_s[number - 1] if number else rates.messages_per_s)
    return [
        "writer" if end.rank < 0 else f"reader {end.rank}",
        str(end.pid) if end.pid else NONE,
        state(end),
        end.waits or NONE,
        count(end.messages),
        NONE if speed is None else f"{count(speed)}/s",
        backlog(each.queue) if end.rank < 0 else lag(each.queue, end),
        duration(end.latency_p50_s),
        duration(end.latency_p99_s),
        share(None if rates is None else rates.cpu_share[number]),
        Text(end.command),
    ]


def state(end: End) -> Text:
    """Return how an end is: what its process does, and whether the queue still counts on it."""
    if not end.there:
        return Text(end.membership, style="dim")
    text = end.state or "not there"
    return Text(text if end.membership != "held" else f"{text} (held)", style=BAD if is_bad(end) else "")


def is_bad(end: End) -> bool:
    """Return whether an end is hung or stopped, though the queue counts on it."""
    return end.there and end.state in HUNG


def process(end: End) -> Text:
    """Return the process of an end; how it is, if that is bad."""
    text = f"{end.pid}" + (f" {end.state}" if is_bad(end) else " closed" if end.membership == "closed" else "")
    return Text(text, style=BAD if is_bad(end) else "")


def backlog(queue: QueueSnapshot) -> Text:
    """Return a queue's backlog, which is its slowest reader's lag."""
    return _lag(queue.header.backlog, queue)


def lag(queue: QueueSnapshot, end: End) -> Text:
    """Return a reader's lag."""
    return _lag(end.lag, queue)


def _lag(number: int, queue: QueueSnapshot) -> Text:
    full, waits = number / max(1, queue.header.slots), queue.header.writer.parked and number
    return Text(count(number), style=BAD if full >= 1 or waits else POOR if full > LONG_LAG else "")


def _row_style(end: End) -> str:
    return BAD if is_bad(end) else "dim" if not end.there else ""


def facts_of(queue: QueueSnapshot) -> list[tuple[str, str]]:
    """Return what ``inspect`` says of a queue as a whole."""
    header, sizes = queue.header, queue.header.layout
    inline = f"{header.slots:,} slots of {size(header.inline_bytes)}"
    chunks = ", ".join(f"{pool.chunks} of {size(pool.room)}" for pool in sizes.pools)
    writer = header.writer
    return [
        ("queue", escape(header.name) or "(it has no name)"),
        ("id", header.queue_id),
        ("age", duration(writer.age_s)),
        ("codec", escape(queue.codec)),
        ("ring", f"{inline}; chunks: {chunks}"),
        ("memory", f"{size(queue.memory_bytes)} of {size(sizes.total_bytes)} in use"),
        (
            "overflow",
            f"{queue.overflow_segments} segments, {size(queue.overflow_bytes)}; {writer.overflows:,} messages",
        ),
        ("published", f"{writer.messages:,} messages, {size(writer.bytes)}"),
        ("backlog", f"{header.backlog:,} messages"),
        ("remote", f"{writer.remote_readers} readers, of which only the writer's process knows more"),
        ("open in", ", ".join(map(str, queue.holders))),
    ]


def report(**content: Any) -> dict[str, Any]:
    """Return what ``--json`` prints."""
    return {"version": JSON_VERSION, **{name: msgspec.to_builtins(value) for name, value in content.items()}}


def count(number: float) -> str:
    """Return a number of things, short: ``999``, ``12.3k``, ``4.56M``."""
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= unit * 10 or (abs(number) >= unit and unit > 1e3):
            return f"{number / unit:.3g}{name}"
    return f"{number:.0f}"


def size(nbytes: float) -> str:
    """Return a number of bytes: ``512 B``, ``4.7 MiB``."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.1f} {name}"
    return f"{nbytes:.0f} B"


def duration(seconds: float | None) -> str:
    """Return a time: ``870 ns``, ``12 us``, ``3.4 ms``, ``5.6 s``, ``12 min``, ``3.4 h``, ``5.6 d``."""
    if seconds is None:
        return NONE
    for unit, name in ((86400 * 2, "d"), (7200, "h"), (120, "min")):
        if seconds >= unit:
            return f"{seconds / {'d': 86400, 'h': 3600, 'min': 60}[name]:.3g} {name}"
    for least, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= least:
            return f"{seconds / least:.3g} {name}"
    return f"{seconds * 1e9:.0f} ns"


def share(part: float | None) -> str:
    """Return a share: ``12%``."""
    return NONE if part is None else f"{part * 100:.0f}%"
