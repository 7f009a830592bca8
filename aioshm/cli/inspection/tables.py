"""Queues and their ends as tables; how numbers are written, and the JSON of these commands."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from textwrap import wrap
from typing import Any, Final, NamedTuple

import msgspec
from rich.console import Console, ConsoleOptions
from rich.text import Text

from aioshm.observe.proc import HUNG
from aioshm.observe.scan import Watched
from aioshm.observe.snapshot import End, QueueSnapshot
from aioshm.observe.suspects import LONG_LAG

BAD = "bold red"
POOR = "yellow"

JSON_VERSION: Final = 1
"""The version of the JSON of ``--json``, see docs/howto/inspection.md. Additions do not change the version."""

NONE: Final = "-"
_INDENT: Final = "  "


class Rows(NamedTuple):
    """A table whose lines fit the console, where no name is cut.

    If the table is too wide, the cells of the last column (if ``tail``) have lines of their own below their rows, and
    those of the first column (if ``head``) lines above.
    """

    names: tuple[str, ...]
    left: Collection[str]  # the columns that are justified to the left
    rows: list[list[str | Text]]
    styles: list[str]
    head: bool = False
    tail: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        """Draw the table; rich's own wrap cells, and take ten times as long."""
        cells = [[cell if isinstance(cell, Text) else Text(cell) for cell in row] for row in [self.names, *self.rows]]
        widths = [max(cell.cell_len for cell in column) for column in zip(*cells, strict=True)]
        first = 0
        last = len(widths)
        if self.tail and _total(widths) > options.max_width:
            last -= 1
        if self.head and _total(widths[:last]) > options.max_width:
            first = 1
        shown = slice(first, last)
        above = ""
        for number, (row, style) in enumerate(zip(cells, ["bold", *self.styles], strict=True)):
            if first and number and row[0].plain != above:
                above = row[0].plain
                yield _uncut(row[0])
            yield self._line(row[shown], widths[shown], self.names[shown], style)
            if not number:
                yield _uncut(Text("\u2500" * _total(widths[shown])))
            elif last < len(row):
                yield _uncut(Text(folded(row[-1].plain, options.max_width, _INDENT, _INDENT), style=style or "dim"))

    def _line(self, row: list[Text], widths: list[int], names: Iterable[str], style: str) -> Text:
        line = Text(style=style)
        for number, (name, cell, width) in enumerate(zip(names, row, widths, strict=True)):
            space = " " * (width - cell.cell_len)
            line.append(_INDENT if number else "")
            line.append_text(cell + Text(space) if name in self.left else Text(space) + cell)
        line.rstrip()
        return _uncut(line)


def _total(widths: Collection[int]) -> int:
    return sum(widths) + len(_INDENT) * (len(widths) - 1)


def _uncut(text: Text) -> Text:
    text.no_wrap = True
    text.overflow = "ignore"
    return text


def folded(text: str, width: int, first: str = "", others: str = "") -> str:
    """Return a text in lines of at most this width, but for longer words; ``first`` and ``others`` indent them."""
    lines = wrap(
        text,
        width,
        initial_indent=first,
        subsequent_indent=others,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(lines)


def console() -> Console:
    """Return the console on standard output: 80 columns wide where that is no terminal, unless ``COLUMNS`` says so."""
    return Console(highlight=False)


def say(console: Console, text: str, indent: str = "", *, bold: str = "") -> None:
    """Print a text in lines that fit, later ones indented more; its first ``bold`` part stands out."""
    shown = Text(folded(text, console.width, indent, indent + _INDENT))
    start = shown.plain.find(bold)
    if bold and start >= 0:
        shown.stylize("bold", start, start + len(bold))
    console.print(shown, soft_wrap=True)


def queues_rows(watched: Iterable[Watched]) -> Rows:
    """Return the table of queues."""
    names = ("queue", "readers", "backlog", "rate", "writer", "bytes/s", "age", "memory")
    rows: list[list[str | Text]] = []
    for each in watched:
        queue = each.queue
        rates = each.rates
        there = sum(end.membership == "attached" for end in queue.readers)
        remote = queue.header.writer.remote_readers
        rows.append(
            [
                Text(queue.label),
                f"{there}" + f" + {remote} remote" * bool(remote),
                lag(queue.header.backlog, queue),
                NONE if rates is None else f"{count(rates.messages_per_s)}/s",
                process(queue.writer),
                NONE if rates is None else size(rates.bytes_per_s),
                duration(queue.header.writer.age_s),
                size(queue.memory_bytes + queue.overflow_bytes),
            ]
        )
    return Rows(names, {"queue"}, rows, [""] * len(rows), head=True)


def ends_rows(watched: Iterable[Watched], *, queues: bool) -> Rows:
    """Return the table of ends; ``queues`` adds the names of their queues."""
    names = ("queue",) * queues + ("end", "pid", "state", "lag", "rate", "messages", "p50", "p99", "CPU", "command")
    rows: list[list[str | Text]] = []
    styles = []
    for each in watched:
        for number, end in enumerate(each.queue.ends):
            rows.append([*([Text(each.queue.label)] * queues), *_end_row(each, number, end)])
            styles.append(_row_style(end))
    return Rows(names, {"queue", "end", "state", "command"}, rows, styles, head=queues, tail=True)


def _end_row(each: Watched, number: int, end: End) -> list[str | Text]:
    rates = each.rates
    speed = None
    if rates is not None:
        speed = rates.read_per_s[number - 1] if number else rates.messages_per_s
    return [
        "writer" if end.rank < 0 else f"reader {end.rank}",
        str(end.pid) if end.pid else NONE,
        state(end),
        lag(end.lag, each.queue),
        NONE if speed is None else f"{count(speed)}/s",
        count(end.messages),
        duration(end.latency_p50_s),
        duration(end.latency_p99_s),
        share(None if rates is None else rates.cpu_share[number]),
        Text(end.command),
    ]


def state(end: End) -> Text:
    """Return the state of an end: how it waits, or of its process, or of its membership once it has left."""
    if not end.there:
        return Text(end.membership, style="dim")
    text = end.waits
    if is_bad(end) or not text:
        text = end.state or "not there"
    return Text(text if end.membership != "held" else f"{text} (held)", style=BAD if is_bad(end) else "")


def is_bad(end: End) -> bool:
    """Return whether the queue waits for an end whose process does not run."""
    return end.there and end.state in HUNG


def process(end: End) -> Text:
    """Return the pid of an end, and a bad state."""
    if is_bad(end):
        return Text(f"{end.pid} {end.state}", style=BAD)
    return Text(f"{end.pid} closed" if end.membership == "closed" else f"{end.pid}")


def lag(number: int, queue: QueueSnapshot) -> Text:
    """Return a lag, coloured by its share of the ring's slots."""
    full = number / max(1, queue.header.slots)
    style = ""
    if full >= 1 or (queue.header.writer.parked and number):
        style = BAD
    elif full > LONG_LAG:
        style = POOR
    return Text(count(number), style=style)


def _row_style(end: End) -> str:
    if is_bad(end):
        return BAD
    return "" if end.there else "dim"


def facts_of(queue: QueueSnapshot) -> dict[str, str]:
    """Return the facts that ``inspect`` prints of a queue."""
    header, sizes, writer = queue.header, queue.header.layout, queue.header.writer
    chunks = ", ".join(f"{pool.chunks} of {size(pool.room)}" for pool in sizes.pools)
    return {
        "queue": header.name or "(it has no name)",
        "id": header.queue_id,
        "age": duration(writer.age_s),
        "codec": queue.codec,
        "ring": f"{header.slots:,} slots of {size(header.inline_bytes)}; chunks: {chunks}",
        "memory": f"{size(queue.memory_bytes)} of {size(sizes.total_bytes)} in use",
        "overflow": f"{queue.overflow_segments} segments, {size(queue.overflow_bytes)}; {writer.overflows:,} messages",
        "published": f"{writer.messages:,} messages, {size(writer.bytes)}",
        "backlog": f"{header.backlog:,} messages",
        "remote": f"{writer.remote_readers} readers, of which only the writer's process knows more",
        "open in": ", ".join(map(str, queue.holders)),
    }


def report(**content: Any) -> dict[str, Any]:
    """Return the object that ``--json`` prints."""
    return {"version": JSON_VERSION, **{name: msgspec.to_builtins(value) for name, value in content.items()}}


def count(number: float) -> str:
    """Return a short number: ``999``, ``12.3k``, ``4.56M``."""
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
