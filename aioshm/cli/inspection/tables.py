"""Queues and their ends as tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from aioshm.cli.inspection import figures
from aioshm.observe.proc import HUNG
from aioshm.observe.snapshot import End, QueueSnapshot
from aioshm.observe.verdict import LONG_LAG
from aioshm.observe.watch import Watched

BAD = "bold red"
POOR = "yellow"


def queues_table(watched: Iterable[Watched]) -> Table:
    """Return the table of ``ls``."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("queue", "writer", "readers", "rate", "bytes/s", "backlog", "age", "memory"):
        table.add_column(name, justify="left" if name == "queue" else "right")
    for each in watched:
        queue, rates = each.queue, each.rates
        there = sum(end.membership == "attached" for end in queue.readers)
        remote = queue.header.writer.remote_readers
        table.add_row(
            Text(queue.label),
            process(queue.writer),
            f"{there}" + f" + {remote} remote" * bool(remote),
            figures.NONE if rates is None else f"{figures.count(rates.messages_per_s)}/s",
            figures.NONE if rates is None else figures.size(rates.bytes_per_s),
            backlog(queue),
            figures.duration(queue.header.writer.age_s),
            figures.size(queue.memory_bytes + queue.overflow_bytes),
        )
    return table


def ends_table(watched: Sequence[Watched], *, queues: bool) -> Table:
    """Return the table of the ends of queues, with or without the queues' names."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("queue",) * queues + ("end", "pid", "state", "waits", "messages", "rate", "lag", "p50", "p99", "CPU"):
        table.add_column(name, justify="left" if name in ("queue", "end", "state", "waits") else "right")
    table.add_column("command", no_wrap=True, overflow="ellipsis", max_width=60)
    for each in watched:
        for number, end in enumerate(each.queue.ends):
            row = _end_row(each, number, end)
            table.add_row(*([Text(each.queue.label)] * queues), *row, style=_row_style(end))
    return table


def _end_row(each: Watched, number: int, end: End) -> list[str | Text]:
    rates = each.rates
    speed = None if rates is None else (rates.read_per_s[number - 1] if number else rates.messages_per_s)
    return [
        "writer" if end.rank < 0 else f"reader {end.rank}",
        str(end.pid) if end.pid else figures.NONE,
        state(end),
        end.waits or figures.NONE,
        figures.count(end.messages),
        figures.NONE if speed is None else f"{figures.count(speed)}/s",
        backlog(each.queue) if end.rank < 0 else lag(each.queue, end),
        figures.duration(end.latency_p50_s),
        figures.duration(end.latency_p99_s),
        figures.share(None if rates is None else rates.cpu_share[number]),
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
    return Text(figures.count(number), style=BAD if full >= 1 or waits else POOR if full > LONG_LAG else "")


def _row_style(end: End) -> str:
    return BAD if is_bad(end) else "dim" if not end.there else ""


def facts_of(queue: QueueSnapshot) -> list[tuple[str, str]]:
    """Return what ``inspect`` says of a queue as a whole."""
    header, sizes = queue.header, queue.header.layout
    inline = f"{header.slots:,} slots of {figures.size(header.inline_bytes)}"
    chunks = ", ".join(f"{pool.chunks} of {figures.size(pool.room)}" for pool in sizes.pools)
    writer = header.writer
    return [
        ("queue", escape(header.name) or "(it has no name)"),
        ("id", header.queue_id),
        ("age", figures.duration(writer.age_s)),
        ("codec", escape(queue.codec)),
        ("ring", f"{inline}; chunks: {chunks}"),
        ("memory", f"{figures.size(queue.memory_bytes)} of {figures.size(sizes.total_bytes)} in use"),
        (
            "overflow",
            f"{queue.overflow_segments} segments, {figures.size(queue.overflow_bytes)}; {writer.overflows:,} messages",
        ),
        ("published", f"{writer.messages:,} messages, {figures.size(writer.bytes)}"),
        ("backlog", f"{header.backlog:,} messages"),
        ("remote", f"{writer.remote_readers} readers, of which only the writer's process knows more"),
        ("open in", ", ".join(map(str, queue.holders))),
    ]
