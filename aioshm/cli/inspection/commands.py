"""``aioshm ls``, ``inspect``, ``who`` and ``dump``."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.text import Text

from aioshm.cli.inspection import tables, top
from aioshm.cli.outcome import UNUSABLE, CommandFailed, print_json
from aioshm.errors import AioshmError
from aioshm.observe.messages import MessageHeader, last_messages
from aioshm.observe.proc import is_own_process
from aioshm.observe.scan import QueueNotFound, Watch, Watched, chosen
from aioshm.observe.suspects import WINDOW_S, ProcessReport, Report, Suspect, process_report, who

Queue = Annotated[str, typer.Argument(help="Its name, its id or the beginning of that, or the pid of one of its ends.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Interval = Annotated[float, typer.Option(min=0.0, max=60.0, help="Seconds that rates are measured for.")]

_MOST_SHOWN = 30
"""Frames of a stack."""


def register(app: typer.Typer) -> None:
    """Add the commands to ``app``."""
    app.command("ls")(_ls)
    app.command("inspect")(_inspect)
    app.command("top")(top.command)
    app.command("who")(_who)
    app.command("dump")(_dump)


def _ls(as_json: AsJson = False, interval: Interval = 0.2) -> None:
    """List every live queue of this user on this host."""
    with _one_line(), Watch() as watch:
        found = _look_twice(watch, interval)
        if as_json:
            print_json(tables.report(queues=[top.as_json(each) for each in found], skipped=watch.skipped))
            return
        console = tables.console()
        if found:
            console.print(tables.queues_rows(found))
        else:
            console.print("no queue of this user is open on this host")
        if watch.skipped:
            console.print(f"processes of other users not looked at: {watch.skipped}", style="dim")


def _inspect(queue: Queue, as_json: AsJson = False, interval: Interval = 0.2) -> None:
    """Show a queue and each of its ends."""
    with _one_line(), Watch() as watch:
        found = _look_twice(watch, interval)
        one = chosen(queue, [each.queue for each in found])
        [watched] = [each for each in found if each.queue is one]
        if as_json:
            print_json(tables.report(queue=top.as_json(watched)))
            return
        console = tables.console()
        for name, text in tables.facts_of(one).items():
            tables.say(console, f"{name:<11}{text}", bold=name)
        console.print()
        console.print(tables.ends_rows([watched], queues=False))


def _who(
    queue: Annotated[str | None, typer.Argument(help="A queue, or any process; none: every queue.")] = None,
    as_json: AsJson = False,
    window: Annotated[float, typer.Option(min=0.01, max=60.0, help="Seconds to watch for.")] = WINDOW_S,
) -> None:
    """Name the process that holds a queue up, what it does, and its line of code."""
    with _one_line():
        try:
            reports, process = who(queue, window_s=window), None
        except QueueNotFound:
            if queue is None or not queue.isdigit() or not is_own_process(int(queue)):
                raise
            reports, process = (), process_report(int(queue))  # an engine, say, whose messages go over sockets
        if as_json:
            print_json(tables.report(queues=[_as_json(each) for each in reports], process=process))
            return
        console = tables.console()
        for report in reports:
            _show_report(console, report)
        if process is not None:
            _show_process(console, process)
        if not reports and process is None:
            console.print("no queue of this user is open on this host")


def _dump(
    queue: Queue,
    last: Annotated[int, typer.Option("--last", "-n", min=1, help="How many messages.")] = 10,
    bodies: Annotated[bool, typer.Option("--bodies", help="Show the first bytes of each; nothing is decoded.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the headers of the latest messages of a queue."""
    with _one_line(), Watch() as watch:
        found = watch.look()
        one = chosen(queue, [each.queue for each in found])
        messages = last_messages(watch.ring(one), last, bodies=bodies)
        if as_json:
            print_json(tables.report(queue=one.label, messages=[_message_json(each) for each in messages]))
            return
        console = tables.console()
        if not messages:
            console.print(f"{one.label}: no message was published yet")
            return
        console.print(_messages_rows(messages, bodies))


def _look_twice(watch: Watch, interval: float) -> tuple[Watched, ...]:
    watch.look()
    time.sleep(interval)
    return watch.look()


@contextmanager
def _one_line() -> Iterator[None]:
    """Turn errors into one line."""
    try:
        yield
    except (AioshmError, ValueError) as error:
        raise CommandFailed(str(error), UNUSABLE) from None


# who


def _as_json(report: Report) -> dict[str, Any]:
    return {
        "queue": report.queue.label,
        "id": report.queue.header.queue_id,
        "messages_per_s": report.messages_per_s,
        "held_up": any(suspect.grave for suspect in report.suspects),
        "suspects": report.suspects,
    }


def _show_report(console: Console, report: Report) -> None:
    label = report.queue.label
    if not any(suspect.grave for suspect in report.suspects):
        idle = f"; {report.suspects[0].text}" if report.suspects else ""
        rate = tables.count(report.messages_per_s)
        tables.say(console, f"{label}: nobody holds it up ({rate} messages/s{idle})", bold=label)
        return
    for suspect in report.suspects:
        end = "the writer" if suspect.rank < 0 else f"reader {suspect.rank}"
        name = f"{end}, pid {suspect.pid} ({suspect.command})" if suspect.pid else end
        tables.say(console, f"{label}: {name}: {suspect.text}", bold=label)
        if suspect.pid and suspect.state != "gone":
            tables.say(console, f"{suspect.state}{_in_kernel(suspect)}", "  ")
        _show_code(console, suspect)


def _show_process(console: Console, report: ProcessReport) -> None:
    process = report.process
    name = f"pid {process.pid}"
    text = f"{name} ({process.command}) has no queue: {process.state}{_in_kernel(report)}"
    tables.say(console, text, bold=name)
    _show_code(console, report)


def _in_kernel(report: Suspect | ProcessReport) -> str:
    return f"; in the kernel: {report.doing}" if str(report.doing) else ""


def _show_code(console: Console, report: Suspect | ProcessReport) -> None:
    if report.line is not None:
        tables.say(console, f"at {report.line}", "  ", bold=str(report.line))
    own = [stack for stack in report.stacks if stack.is_main or stack.is_running or any(f.own for f in stack.frames)]
    for stack in own or report.stacks:
        tables.say(console, f"{stack.name}{' (runs)' if stack.is_running else ''}", "  ")
        for frame in stack.frames[:_MOST_SHOWN]:
            tables.say(console, str(frame), "    ", bold=str(frame) if frame.own else "")
    if report.hint:
        tables.say(console, report.hint, "  ")


# dump


def _message_json(message: MessageHeader) -> dict[str, Any]:
    built: dict[str, Any] = msgspec.structs.asdict(message)
    preview = built.pop("preview")
    return built | {"preview_hex": None if preview is None else preview.hex(), "preview_text": message.text}


def _messages_rows(messages: list[MessageHeader], bodies: bool) -> tables.Rows:
    names = ("message", "kind", "codec", "size", "buffers", "where", "age", "unread by")
    rows: list[list[str | Text]] = []
    for message in messages:
        row: list[str | Text] = [
            f"{message.seq}",
            message.kind,
            message.codec or tables.NONE,
            tables.size(message.bytes),
            f"{message.buffers}",
            message.where,
            tables.duration(message.age_s),
            ", ".join(map(str, message.unread_by)) or tables.NONE,
        ]
        rows.append(row + [_preview(message)] * bodies)
    left = {"kind", "codec", "where", "unread by", "begins with"}
    return tables.Rows(names + ("begins with",) * bodies, left, rows, [""] * len(rows), tail=True)


def _preview(message: MessageHeader) -> str:
    if message.preview is None:
        return "(not in the ring)"
    return repr(message.text) if message.text is not None else message.preview.hex(" ")
