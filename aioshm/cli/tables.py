"""Queues and their ends as tables; how numbers are written, and the JSON of these commands."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import Any, Final, Generic, NamedTuple, TypeVar

from rich.console import Console, ConsoleOptions
from rich.text import Text

from aioshm.observe.processes import StartedProcess
from aioshm.observe.snapshot import End, QueueSnapshot
from aioshm.observe.suspects import LONG_LAG
from aioshm.process.proc import HUNG_STATES

T = TypeVar("T")

BAD = "bold red"
POOR = "yellow"

JSON_VERSION: Final = 1
"""The version of the JSON of ``--json``, see docs/howto/inspection.md. Additions do not change the version."""

NONE: Final = "-"
NO_QUEUE: Final = "no queue of this user is open on this host"
_INDENT: Final = "  "
_SHORTEST_PATH: Final = 20
"""Paths of fewer characters are whole on the narrowest console."""


class Column(NamedTuple, Generic[T]):
    """A column of a table: its name, and the cell of an item."""

    name: str
    cell: Callable[[T], str | Text]
    left: bool = False  # whether the cells are justified to the left


@dataclass(frozen=True)
class Table(Generic[T]):
    """A table whose lines fit the console, where no name is cut.

    If the table is too wide, the cells of the first column (if ``head``) have lines of their own above their rows, or,
    where that is not enough, those of the last column (if ``tail``) lines below, or both.
    """

    columns: Sequence[Column[T]]
    items: Sequence[T]
    style: Callable[[T], str] = lambda _: ""
    head: bool = False
    tail: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        """Draw the table; rich's own tables wrap cells, and take ten times as long."""
        cells = [[Text(column.name) for column in self.columns]]
        cells += [[Text.assemble(column.cell(item)) for column in self.columns] for item in self.items]
        styles = ["bold", *map(self.style, self.items)]
        widths = [max(cell.cell_len for cell in column) for column in zip(*cells, strict=True)]
        first = 0
        last = len(widths)
        if self.head and _total(widths[1:]) <= options.max_width < _total(widths):
            first = 1
        elif self.tail and _total(widths) > options.max_width:
            last -= 1
        if self.head and _total(widths[:last]) > options.max_width:
            first = 1
        shown = slice(first, last)
        above = ""
        for number, (row, style) in enumerate(zip(cells, styles, strict=True)):
            if first and number and row[0].plain != above:
                above = row[0].plain
                yield _uncut(Text(folded(above, options.max_width, "", _INDENT)))
            yield self._line(row[shown], widths[shown], self.columns[shown], style)
            if not number:
                yield _uncut(Text("\u2500" * _total(widths[shown])))
            elif last < len(row):
                yield _uncut(Text(folded(row[-1].plain, options.max_width, _INDENT, _INDENT), style=style or "dim"))

    def _line(self, row: list[Text], widths: list[int], columns: Sequence[Column[T]], style: str) -> Text:
        padded = []
        for column, cell, width in zip(columns, row, widths, strict=True):
            space = Text(" " * (width - cell.cell_len))
            if column.left:
                padded.append(cell + space)
            else:
                padded.append(space + cell)
        line = Text(_INDENT).join(padded)
        line.style = style
        line.rstrip()
        return _uncut(line)


def _total(widths: Collection[int]) -> int:
    return sum(widths) + len(_INDENT) * (len(widths) - 1)


def _uncut(text: Text) -> Text:
    text.no_wrap = True
    text.overflow = "ignore"
    return text


def folded(text: str, width: int, first: str = "", others: str = "") -> str:
    """Return a text in lines of at most this width, but for longer words; ``first`` and ``others`` indent them.

    A longer path is shown without its middle.
    """
    room = width - max(len(first), len(others))
    lines = wrap(
        " ".join(_shortened(word, room) for word in text.split(" ")),
        width,
        initial_indent=first,
        subsequent_indent=others,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(lines)


def _shortened(word: str, room: int) -> str:
    if "/" not in word or len(word) <= max(room, _SHORTEST_PATH):
        return word
    head = room // 3
    return f"{word[:head]}...{word[head + 3 - room :]}"


def console() -> Console:
    """Return the console on standard output: 80 columns wide where that is no terminal, unless ``COLUMNS`` says so."""
    return Console(highlight=False)


def print_folded(console: Console, text: str, indent: str = "", *, bold: str = "") -> None:
    """Print a text in lines that fit, with a hanging indent; the part ``bold`` is bold."""
    shown = Text(folded(text, console.width, indent, indent + _INDENT))
    start = shown.plain.find(bold)
    if bold and start >= 0:
        shown.stylize("bold", start, start + len(bold))
    console.print(shown, soft_wrap=True)


def queues_table(queues: Sequence[QueueSnapshot]) -> Table[QueueSnapshot]:
    """Return the table of queues."""
    columns: tuple[Column[QueueSnapshot], ...] = (
        Column("queue", lambda queue: queue.label, left=True),
        Column("readers", _readers),
        Column("backlog", lambda queue: lag(queue.writer, queue)),
        Column("rate", lambda queue: rate(queue.writer.messages_per_s)),
        Column("writer", lambda queue: process(queue.writer)),
        Column("bytes/s", lambda queue: size(queue.bytes_per_s)),
        Column("age", lambda queue: duration(queue.header.writer.age_s)),
        Column("memory", lambda queue: size(queue.memory_bytes + queue.overflow_bytes)),
    )
    return Table(columns, queues, head=True)


def _readers(queue: QueueSnapshot) -> str:
    text = str(sum(end.membership == "attached" for end in queue.readers))
    if queue.header.writer.remote_readers:
        text += f" + {queue.header.writer.remote_readers} remote"
    return text


def ends_table(queues: Iterable[QueueSnapshot], *, named: bool) -> Table[tuple[QueueSnapshot, End]]:
    """Return the table of ends; ``named``: with the names of their queues."""
    columns: tuple[Column[tuple[QueueSnapshot, End]], ...] = (
        Column("queue", lambda row: row[0].label, left=True),
        Column("end", lambda row: f"{row[1].side} {row[1].rank}".removesuffix(" -1"), left=True),
        Column("pid", lambda row: str(row[1].pid or NONE)),
        Column("state", lambda row: state(row[1]), left=True),
        Column("lag", lambda row: lag(row[1], row[0])),
        Column("rate", lambda row: rate(row[1].messages_per_s)),
        Column("messages", lambda row: count(row[1].messages)),
        Column("p50", lambda row: duration(row[1].latency_p50_s)),
        Column("p99", lambda row: duration(row[1].latency_p99_s)),
        Column("CPU", lambda row: share(row[1].cpu_share)),
        Column("command", lambda row: row[1].command, left=True),
    )
    rows = [(queue, end) for queue in queues for end in queue.ends]
    return Table(columns[not named :], rows, lambda row: _style(row[1]), head=named, tail=True)


def state(end: End) -> Text:
    """Return the state of an end: of its wait, of its process, or of its membership."""
    if not end.there:
        return Text(end.membership, style=_style(end))
    text = end.waits
    if is_bad(end) or not text:
        text = end.state or "not there"
    if end.membership == "held":
        text += " (held)"
    return Text(text, style=_style(end))


def is_bad(end: End) -> bool:
    """Return whether the queue waits for an end whose process does not run."""
    return end.there and end.state in HUNG_STATES


def _style(end: End) -> str:
    if is_bad(end):
        return BAD
    return "dim" * (not end.there)


def process(end: End) -> Text:
    """Return the pid of an end, and a bad state."""
    if is_bad(end):
        return Text(f"{end.pid} {end.state}", style=BAD)
    return Text(f"{end.pid} {'closed' * (end.membership == 'closed')}".rstrip())


def lag(end: End, queue: QueueSnapshot) -> Text:
    """Return the lag of an end, coloured by its share of the ring's slots."""
    full = end.lag / max(1, queue.header.slots)
    style = ""
    if full >= 1 or (queue.header.writer.parked and end.lag):
        style = BAD
    elif full > LONG_LAG:
        style = POOR
    return Text(count(end.lag), style=style)


def processes_table(processes: Sequence[StartedProcess]) -> Table[StartedProcess]:
    """Return the table of the processes that aioshm has started."""
    columns: tuple[Column[StartedProcess], ...] = (
        Column("started by", started_by, left=True),
        Column("process", lambda each: f"{each.kind} {each.rank}".removesuffix(" -1"), left=True),
        Column("pid", lambda each: str(each.pid)),
        Column("state", progress, left=True),
        Column("requests", lambda each: count(each.requests)),
        Column("steps/s", lambda each: rate(each.steps_per_s).removesuffix("/s")),
        Column("name", lambda each: each.name, left=True),
    )
    return Table(columns, processes, lambda each: BAD * (not each.makes_progress), head=True, tail=True)


def started_by(process: StartedProcess) -> str:
    """Return the program and the pid of the process that has started a process."""
    return f"{process.program} (pid {process.parent})"


def progress(process: StartedProcess) -> str:
    """Return the state of a process that aioshm has started: ``idle``, ``busy for 3.2 s``, ``stalled for 70 s``."""
    if process.state in ("busy", "stalled"):
        return f"{process.state} for {duration(process.seconds)}"
    return process.state


def facts_of(queue: QueueSnapshot) -> dict[str, str]:
    """Return the facts that ``inspect`` prints of a queue."""
    header = queue.header
    sizes = header.layout
    writer = header.writer
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
    return {"version": JSON_VERSION, **content}


def count(number: float) -> str:
    """Return a short number: ``999``, ``12.3k``, ``4.56M``."""
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= unit * 10 or (abs(number) >= unit and unit > 1e3):
            return f"{number / unit:.3g}{name}"
    return f"{number:.0f}"


def rate(per_s: float | None) -> str:
    """Return a rate: ``12.3k/s``."""
    return NONE if per_s is None else f"{count(per_s)}/s"


def size(nbytes: float | None) -> str:
    """Return a number of bytes for people: ``512 B``, ``4.7 MiB``; None: a dash."""
    if nbytes is None:
        return NONE
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.1f} {name}"
    return f"{nbytes:.0f} B"


def duration(seconds: float | None) -> str:
    """Return a time: ``870 ns``, ``12 us``, ``3.4 ms``, ``5.6 s``, ``12 min``, ``3.4 h``, ``5.6 d``."""
    if seconds is None:
        return NONE
    units = ((86400, 2, "d"), (3600, 2, "h"), (60, 2, "min"), (1, 1, "s"), (1e-3, 1, "ms"), (1e-6, 1, "us"))
    for unit, least, name in units:
        if seconds >= least * unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds * 1e9:.0f} ns"


def share(part: float | None) -> str:
    """Return a share: ``12%``."""
    return NONE if part is None else f"{part * 100:.0f}%"
