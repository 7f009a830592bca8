"""Queues and their ends as tables; how numbers are written, and the JSON of these commands."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from textwrap import wrap
from typing import Any, Final, NamedTuple

from rich.console import Console, ConsoleOptions
from rich.text import Text

from aioshm.observe.processes import StartedProcess
from aioshm.observe.snapshot import End, QueueSnapshot
from aioshm.observe.suspects import LONG_LAG
from aioshm.process.proc import HUNG_STATES

BAD = "bold red"
POOR = "yellow"

JSON_VERSION: Final = 1
"""The version of the JSON of ``--json``, see docs/howto/inspection.md. Additions do not change the version."""

NONE: Final = "-"
NO_QUEUE: Final = "no queue of this user is open on this host"
_INDENT: Final = "  "
_SHORTEST_PATH: Final = 20
"""Paths of fewer characters are whole on the narrowest console."""


class Rows(NamedTuple):
    """A table whose lines fit the console, where no name is cut.

    If the table is too wide, the cells of the first column (if ``head``) have lines of their own above their rows, or,
    where that is not enough, those of the last column (if ``tail``) lines below, or both.
    """

    names: tuple[str, ...]
    left: Collection[str]  # the columns that are justified to the left
    rows: list[list[str | Text]]
    styles: list[str]
    head: bool = False
    tail: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        """Draw the table; rich's own tables wrap cells, and take ten times as long."""
        cells = [[Text.assemble(cell) for cell in row] for row in [self.names, *self.rows]]
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
        for number, (row, style) in enumerate(zip(cells, ["bold", *self.styles], strict=True)):
            if first and number and row[0].plain != above:
                above = row[0].plain
                yield _uncut(Text(folded(above, options.max_width, "", _INDENT)))
            yield self._line(row[shown], widths[shown], self.names[shown], style)
            if not number:
                yield _uncut(Text("\u2500" * _total(widths[shown])))
            elif last < len(row):
                yield _uncut(Text(folded(row[-1].plain, options.max_width, _INDENT, _INDENT), style=style or "dim"))

    def _line(self, row: list[Text], widths: list[int], names: Iterable[str], style: str) -> Text:
        padded = []
        for name, cell, width in zip(names, row, widths, strict=True):
            space = Text(" " * (width - cell.cell_len))
            if name in self.left:
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


def queues_rows(queues: Iterable[QueueSnapshot]) -> Rows:
    """Return the table of queues."""
    names = ("queue", "readers", "backlog", "rate", "writer", "bytes/s", "age", "memory")
    rows: list[list[str | Text]] = []
    for queue in queues:
        readers = str(sum(end.membership == "attached" for end in queue.readers))
        if queue.header.writer.remote_readers:
            readers += f" + {queue.header.writer.remote_readers} remote"
        rows.append(
            [
                Text(queue.label),
                readers,
                lag(queue.writer, queue),
                rate(queue.writer.messages_per_s),
                process(queue.writer),
                size(queue.bytes_per_s),
                duration(queue.header.writer.age_s),
                size(queue.memory_bytes + queue.overflow_bytes),
            ]
        )
    return Rows(names, {"queue"}, rows, [""] * len(rows), head=True)


def ends_rows(queues: Iterable[QueueSnapshot], *, named: bool) -> Rows:
    """Return the table of ends; ``named``: with the names of their queues."""
    names = ("queue",) * named + ("end", "pid", "state", "lag", "rate", "messages", "p50", "p99", "CPU", "command")
    rows: list[list[str | Text]] = []
    styles = []
    for queue in queues:
        for end in queue.ends:
            rows.append([*([Text(queue.label)] * named), *_end_row(queue, end)])
            styles.append(_style(end))
    return Rows(names, {"queue", "end", "state", "command"}, rows, styles, head=named, tail=True)


def _end_row(queue: QueueSnapshot, end: End) -> list[str | Text]:
    name = "writer"
    if end.side == "reader":
        name = f"reader {end.rank}"
    return [
        name,
        str(end.pid or NONE),
        state(end),
        lag(end, queue),
        rate(end.messages_per_s),
        count(end.messages),
        duration(end.latency_p50_s),
        duration(end.latency_p99_s),
        share(end.cpu_share),
        Text(end.command),
    ]


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


def processes_rows(processes: Iterable[StartedProcess]) -> Rows:
    """Return the table of the processes that aioshm has started."""
    names = ("started by", "process", "pid", "state", "requests", "steps/s", "name")
    rows: list[list[str | Text]] = []
    styles = []
    for each in processes:
        rows.append(
            [
                Text(started_by(each)),
                f"{each.kind} {each.rank}".removesuffix(" -1"),
                str(each.pid),
                progress(each),
                count(each.requests),
                rate(each.steps_per_s).removesuffix("/s"),
                Text(each.name),
            ]
        )
        styles.append(BAD * (not each.makes_progress))
    return Rows(names, {"started by", "process", "state", "name"}, rows, styles, head=True, tail=True)


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
