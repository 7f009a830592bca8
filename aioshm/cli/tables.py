"""The tables of the commands, from rows that are dicts; how numbers are written."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from textwrap import wrap
from typing import Final, TypeAlias

from rich.console import Console
from rich.text import Text

from aioshm.observe.processes import StartedProcess
from aioshm.observe.queues import End, QueueSnapshot
from aioshm.observe.suspects import LONG_LAG
from aioshm.process.placement import show_ranges

Row: TypeAlias = dict[str, str | Text]
"""The cells of one row, by the names of their columns; of a number as a str."""

NONE: Final = "-"
_BAD = "bold red"
_POOR = "yellow"
_INDENT = "  "
_SHORTEST_PATH = 20
"""Paths of fewer characters are whole on the narrowest console."""
_RIGHT = {"readers", "backlog", "rate", "writer", "bytes/s", "age", "memory", "pid", "lag", "messages", "p50", "p99"}
_RIGHT |= {"CPU", "requests", "steps/s", "message", "size", "buffers"}
"""Columns that are justified to the right."""


def table(rows: Sequence[Row], width: int, *, head: bool = False, tail: bool = False) -> Iterator[Text]:
    """Yield the lines of a table that fit a console of this width, where no name is cut.

    If the table is too wide, the cells of the first column (if ``head``) have lines of their own above their rows, or,
    where that is not enough, those of the last column (if ``tail``) lines below, or both.
    """
    names = list(rows[0])
    cells = [[Text(name, "bold") for name in names]]
    cells += [[Text.assemble(row[name]) for name in names] for row in rows]
    widths = [max(cell.cell_len for cell in column) for column in zip(*cells, strict=True)]
    first = 0
    last = len(widths)
    if head and _total(widths[1:]) <= width < _total(widths):
        first = 1
    elif tail and _total(widths) > width:
        last -= 1
    if head and _total(widths[:last]) > width:
        first = 1
    above = ""
    for number, row in enumerate(cells):
        if first and number and row[0].plain != above:
            above = row[0].plain
            yield Text(folded(above, width, "", _INDENT))
        padded = [_justified(names[n], row[n], widths[n]) for n in range(first, last)]
        line = Text(_INDENT).join(padded)
        line.rstrip()
        yield line
        if not number:
            yield Text("\u2500" * _total(widths[first:last]))
        elif last < len(row):
            yield Text(folded(row[-1].plain, width, _INDENT, _INDENT), "dim")


def _justified(name: str, cell: Text, width: int) -> Text:
    space = Text(" " * (width - cell.cell_len))
    if name in _RIGHT:
        return space + cell
    return cell + space


def _total(widths: Collection[int]) -> int:
    return sum(widths) + len(_INDENT) * (len(widths) - 1)


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


def print_folded(console: Console, text: str, indent: str = "", *, bold: str = "") -> None:
    """Print a text in lines that fit, with a hanging indent; the part ``bold`` is bold."""
    shown = Text(folded(text, console.width, indent, indent + _INDENT))
    start = shown.plain.find(bold)
    if bold and start >= 0:
        shown.stylize("bold", start, start + len(bold))
    console.print(shown, soft_wrap=True)


def queue_row(queue: QueueSnapshot) -> Row:
    """Return the row of a queue."""
    readers = str(sum(end.membership == "attached" for end in queue.readers))
    if queue.header.writer.remote_readers:
        readers += f" + {queue.header.writer.remote_readers} remote"
    writer = Text(f"{queue.writer.pid} {'closed' * (queue.writer.membership == 'closed')}".rstrip())
    if queue.writer.hangs:
        writer = Text(f"{queue.writer.pid} {queue.writer.state}", _BAD)
    return {
        "queue": queue.label,
        "readers": readers,
        "backlog": _lag(queue.writer, queue),
        "rate": rate(queue.writer.messages_per_s),
        "writer": writer,
        "bytes/s": size(queue.bytes_per_s),
        "age": duration(queue.header.writer.age_s),
        "memory": size(queue.memory_bytes + queue.overflow_bytes),
    }


def end_rows(queue: QueueSnapshot) -> list[Row]:
    """Return the rows of the ends of a queue; readers that never came have one row."""
    came = [end for end in queue.ends if end.membership != "absent"]
    rows = [_end_row(queue, end) for end in came]
    absent = [end for end in queue.ends if end.membership == "absent"]
    if absent:
        rows.append({**_end_row(queue, absent[0]), "end": f"reader {show_ranges([end.rank for end in absent])}"})
    return rows


def _end_row(queue: QueueSnapshot, end: End) -> Row:
    return {
        "queue": queue.label,
        "end": f"{end.side} {end.rank}".removesuffix(" -1"),
        "pid": str(end.pid or NONE),
        "state": _state(end),
        "lag": _lag(end, queue),
        "rate": rate(end.messages_per_s),
        "messages": count(end.messages),
        "p50": duration(end.latency_p50_s),
        "p99": duration(end.latency_p99_s),
        "CPU": share(end.cpu_share),
        "command": end.command,
    }


def _state(end: End) -> Text:
    """Return the state of an end: of its wait, of its process, or of its membership."""
    if not end.there:
        return Text(end.membership, "dim")
    text = end.waits
    if end.hangs or not text:
        text = end.state or "not there"
    if end.membership == "held":
        text += " (held)"
    return Text(text, _BAD * end.hangs)


def _lag(end: End, queue: QueueSnapshot) -> Text:
    """Return the lag of an end, coloured by its share of the ring's slots."""
    full = end.lag / max(1, queue.header.slots)
    style = ""
    if full >= 1 or (queue.header.writer.parked and end.lag):
        style = _BAD
    elif full > LONG_LAG:
        style = _POOR
    return Text(count(end.lag), style)


def process_row(process: StartedProcess) -> Row:
    """Return the row of a process that aioshm has started."""
    return {
        "started by": started_by(process),
        "process": f"{process.kind} {process.rank}".removesuffix(" -1"),
        "pid": str(process.pid),
        "state": Text(progress(process), _BAD * (not process.makes_progress)),
        "requests": count(process.requests),
        "steps/s": rate(process.steps_per_s).removesuffix("/s"),
        "name": process.name,
    }


def started_by(process: StartedProcess) -> str:
    """Return the program and the pid of the process that has started a process."""
    return f"{process.program} (pid {process.parent})"


def progress(process: StartedProcess) -> str:
    """Return the state of a process that aioshm has started: ``idle``, ``busy for 3.2 s``, ``stalled for 70 s``."""
    if process.state in ("busy", "stalled"):
        return f"{process.state} for {duration(process.seconds)}"
    return process.state


def _three_digits(number: float) -> str:
    return f"{number:.3g}" if abs(number) < 999.5 else f"{number:.0f}"


def count(number: float) -> str:
    """Return a short number: ``0.3``, ``999``, ``12.3k``, ``4.56M``."""
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= unit * 10 or (abs(number) >= unit and unit > 1e3):
            return f"{_three_digits(number / unit)}{name}"
    return f"{number:.1g}" if abs(number) < 1 else f"{number:.0f}"


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
            return f"{_three_digits(seconds / unit)} {name}"
    return f"{seconds * 1e9:.0f} ns"


def share(part: float | None) -> str:
    """Return a share: ``12%``."""
    return NONE if part is None else f"{part * 100:.0f}%"
