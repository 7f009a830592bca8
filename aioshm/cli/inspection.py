"""``aioshm ls``, ``inspect``, ``who``, ``dump`` and ``export``: queues and processes of this host, from outside."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from aioshm.cli import tables
from aioshm.cli.app import UNUSABLE, CommandFailed, print_json, run_interruptibly
from aioshm.deferred import import_extra
from aioshm.errors import AioshmError
from aioshm.observe.messages import MessageHeader, last_messages
from aioshm.observe.processes import CALLED, StartedProcess, StartedProcesses
from aioshm.observe.scan import QueueNotFound, Watch, chosen
from aioshm.observe.snapshot import QueueSnapshot
from aioshm.observe.suspects import GRAVE, WINDOW_S, Report, Suspect
from aioshm.observe.suspects import who as find_suspects
from aioshm.process.proc import is_own_process
from aioshm.process.stacks import LOOP_WAITS, Frame, ProcessReport, Stack, spied_report
from aioshm.zeromq.hosts import bracketed

if TYPE_CHECKING:
    from prometheus_client.registry import CollectorRegistry

Queue = Annotated[str, typer.Argument(help="Its name, its id or the beginning of that, or the pid of one of its ends.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Interval = Annotated[float, typer.Option(min=0.0, max=60.0, help="Seconds that rates are measured for.")]

_AROUND = 2
"""Frames that are shown on either side of the user's line."""

PORT = 9464
"""The port of OpenTelemetry's exporters for Prometheus."""


def ls(as_json: AsJson = False, interval: Interval = 0.2) -> None:
    """List every live queue of the user, and the engines, workers and other processes that aioshm has started."""
    with _one_line(), Watch() as watch:
        started = StartedProcesses()
        started.look()
        found = _look_twice(watch, interval)
        processes = started.settle()
        if as_json:
            print_json(tables.report(queues=found, processes=processes, skipped=watch.skipped))
            return
        console = tables.console()
        if found:
            console.print(tables.queues_table(found))
        else:
            console.print(tables.NO_QUEUE)
        if processes:
            console.print()
            console.print(tables.processes_table(processes), crop=False)
        if watch.skipped:
            console.print(f"processes of other users not looked at: {watch.skipped}", style="dim")


def inspect(queue: Queue, as_json: AsJson = False, interval: Interval = 0.2) -> None:
    """Show a queue and each of its ends."""
    with _one_line(), Watch() as watch:
        one = chosen(queue, _look_twice(watch, interval))
        if as_json:
            print_json(tables.report(queue=one))
            return
        console = tables.console()
        for name, text in tables.facts_of(one).items():
            tables.print_folded(console, f"{name:<11}{text}", bold=name)
        console.print()
        console.print(tables.ends_table([one], named=False))


def who(
    queue: Annotated[
        str | None, typer.Argument(help="A queue, an engine or worker, or the pid of any process; none: all.")
    ] = None,
    as_json: AsJson = False,
    window: Annotated[float, typer.Option(min=0.01, max=60.0, help="Seconds to watch for.")] = WINDOW_S,
    stacks: Annotated[bool, typer.Option("--stacks", help="Show the whole stacks of all threads.")] = False,
) -> None:
    """Name engines and workers without progress, and processes that hold a queue up, with state and line of code."""
    with _one_line():
        started = StartedProcesses()
        started.look()
        reports: tuple[Report, ...] = ()
        process: ProcessReport | None = None
        unknown: QueueNotFound | None = None
        try:
            reports = find_suspects(queue, window_s=window)
        except QueueNotFound as error:
            unknown = error
        processes = started.settle()
        found = [each for each in processes if _is_asked_for(each, queue)]
        described = [(each, started.report(each)) for each in found]
        if unknown is not None and queue is not None and queue.isdigit() and is_own_process(int(queue)):
            # An engine, say, whose messages go over sockets.
            process = next((report for _, report in described), None) or spied_report(int(queue))
        elif unknown is not None and not found:
            raise unknown
        if as_json:
            content = [msgspec.structs.asdict(each) | msgspec.structs.asdict(report) for each, report in described]
            print_json(tables.report(queues=reports, process=process, processes=content))
            return
        screen = _Screen(whole=stacks)
        if process is not None:
            screen.show_process(process, found)
        else:
            for each, seen in sorted(described, key=lambda pair: _urgency(pair[0])):
                screen.show_started(each, seen)
        held_up = [report for report in reports if report.held_up]
        for report in sorted(held_up, key=_severity):
            screen.show_queue(report)
        if queue is not None:
            for report in reports:
                if not report.held_up:
                    screen.show_healthy(report)
            if len({each.parent for each in found}) > 1:
                screen.show(f"several programs have a {queue}: aioshm who PID")
        elif reports or processes:
            queues = len(reports) - len(held_up)
            others = len(processes) - len(found)
            screen.show(f"healthy: {queues} queue{'s' * (queues != 1)}, {others} process{'es' * (others != 1)}")
        else:
            screen.show(tables.NO_QUEUE)
        screen.end()


def _is_asked_for(process: StartedProcess, key: str | None) -> bool:
    if key is None:
        return not process.makes_progress
    return key in (process.name, str(process.pid))


def dump(
    queue: Queue,
    last: Annotated[int, typer.Option("--last", "-n", min=1, help="How many messages.")] = 10,
    bodies: Annotated[bool, typer.Option("--bodies", help="Show the first bytes of each; nothing is decoded.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the headers of the latest messages of a queue."""
    with _one_line(), Watch() as watch:
        one = chosen(queue, watch.look())
        messages = last_messages(watch.ring(one), last, bodies=bodies)
        if as_json:
            print_json(tables.report(queue=one.label, messages=messages))
            return
        console = tables.console()
        if not messages:
            console.print(f"{one.label}: no message was published yet")
            return
        console.print(_messages_table(messages, bodies))


def _look_twice(watch: Watch, interval: float) -> tuple[QueueSnapshot, ...]:
    watch.look()
    time.sleep(interval)
    return watch.look()


# export


def export(
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to serve at; 0: one that is free.")] = PORT,
    host: Annotated[str, typer.Option(help="Address to bind; anybody who reaches it may read.")] = "127.0.0.1",
    once: Annotated[bool, typer.Option("--once", help="Print the metrics once, and end.")] = False,
) -> None:
    """Serve metrics of every queue of this user on this host to Prometheus."""
    with _one_line():
        client = import_extra("prometheus_client", "prometheus", "aioshm export needs prometheus_client")
        from aioshm.observe.prometheus import HostCollector

        collector = HostCollector()
    registry = client.CollectorRegistry()
    registry.register(collector)
    try:
        if once:
            sys.stdout.write(client.generate_latest(registry).decode())
        else:
            run_interruptibly(_serve(client, registry, host, port))
    finally:
        collector.close()


async def _serve(client: Any, registry: CollectorRegistry, host: str, port: int) -> None:
    """Serve in a thread until this is cancelled."""
    try:
        server, thread = client.start_http_server(port, host, registry)
    except OSError as error:
        raise CommandFailed(f"cannot serve at {host}:{port}: {error.strerror or error}", UNUSABLE) from error
    try:
        typer.echo(f"metrics of the queues of this host: http://{bracketed(host)}:{server.server_port}/metrics")
        sys.stdout.flush()
        await asyncio.Event().wait()
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def _one_line() -> Iterator[None]:
    """Turn errors into one line on stderr."""
    try:
        yield
    except (AioshmError, ImportError, ValueError) as error:
        raise CommandFailed(str(error), UNUSABLE) from None


# who


def _urgency(process: StartedProcess) -> tuple[bool, bool, bool, float]:
    """Sort processes: stalled ones first, likely culprits before their peers, then stopped ones, then all others."""
    return process.makes_progress, process.state == "stopped", process.waits_for_peers, -process.seconds


def _severity(report: Report) -> tuple[int, int]:
    """Sort queues that are held up: the worst kind of trouble first, then the longest backlog."""
    return GRAVE.index(report.suspects[0].kind), -report.queue.header.backlog


class _Screen:
    """Prints reports: the code of each process once, and one hint at stacks that cannot be seen."""

    def __init__(self, *, whole: bool) -> None:
        self._console = tables.console()
        self._whole = whole
        self._has_cut = False
        self._pids: set[int] = set()  # those with code on the screen
        self._hints: set[str] = set()

    def show(self, text: str, indent: str = "", bold: str = "") -> None:
        tables.print_folded(self._console, text, indent, bold=bold)

    def show_queue(self, report: Report) -> None:
        label = report.queue.label
        for suspect in report.suspects:
            name = f"reader {suspect.rank}"
            if suspect.side == "writer":
                name = "the writer"
            if suspect.pid:
                name += f", pid {suspect.pid} ({suspect.command})"
            self.show(f"{label}: {name}: {suspect.text}", bold=label)
            if suspect.pid and suspect.state != "gone":
                self._show_code(suspect.pid, suspect.state, suspect)

    def show_healthy(self, report: Report) -> None:
        label = report.queue.label
        per_s = report.queue.writer.messages_per_s or 0.0
        texts = [f"{tables.count(per_s)} messages/s, {tables.count(report.queue.writer.lag)} unread"]
        texts += [f"the {suspect.side} {suspect.text}" for suspect in report.suspects]
        self.show(f"{label}: no end holds the queue up ({'; '.join(texts)})", bold=label)

    def show_process(self, report: ProcessReport, started: Iterable[StartedProcess]) -> None:
        process = report.process
        name = f"pid {process.pid}"
        self.show(f"{name} ({process.command}) has no queue: {process.state}{_in_kernel(report)}", bold=name)
        for each in started:
            self.show(_progress(each), "  ")
        self._show_code(process.pid, "", report)

    def show_started(self, process: StartedProcess, report: ProcessReport) -> None:
        text = f"{process.name}, pid {process.pid} (of {tables.started_by(process)}): {_progress(process)}"
        self.show(text, bold=process.name)
        self._show_code(process.pid, report.process.state, report)

    def end(self) -> None:
        if self._has_cut:
            self.show("the whole stacks of all threads: --stacks")

    def _show_code(self, pid: int, state: str, report: Suspect | ProcessReport) -> None:
        if pid in self._pids:
            return
        self._pids.add(pid)
        if state:
            self.show(f"{state}{_in_kernel(report)}", "  ")
        if report.line is not None:
            self.show(f"at {report.line}", "  ", bold=str(report.line))
        for stack, frames in self._chosen_frames(report):
            self.show(stack.name + " (runs)" * stack.is_running, "  ")
            for frame in frames:
                self.show(str(frame), "    ", bold=str(frame) * frame.own)
        self._show_hint(report)

    def _chosen_frames(self, report: Suspect | ProcessReport) -> Iterator[tuple[Stack, tuple[Frame, ...]]]:
        """Choose all frames, or those around the user's line."""
        if self._whole:
            yield from ((stack, stack.frames) for stack in report.stacks)
            return
        ordered = sorted(report.stacks, key=lambda stack: (report.line not in stack.frames, not stack.is_main))
        for stack in ordered[:1]:
            middle = 0
            if report.line in stack.frames:
                middle = stack.frames.index(report.line)
            frames = stack.frames[max(0, middle - _AROUND) : middle + _AROUND + 1]
            self._has_cut = self._has_cut or len(frames) < sum(len(each.frames) for each in report.stacks)
            yield stack, frames

    def _show_hint(self, report: Suspect | ProcessReport) -> None:
        """Show how to see more; the same for several processes once."""
        kind = report.hint
        if not report.stacks:
            kind = "no stack"
        if not report.hint or kind in self._hints:
            return
        self.show(report.hint, "  ")
        if kind in ("no stack", LOOP_WAITS):
            self._hints.add(kind)


def _in_kernel(report: Suspect | ProcessReport) -> str:
    return f"; in the kernel: {report.wait_channel}" * bool(report.wait_channel)


def _progress(process: StartedProcess) -> str:
    noun = "request"
    if process.kind in CALLED:
        noun = "call"
    text = f"{tables.progress(process)}, {process.requests} {noun}{'s' * (process.requests != 1)}"
    return text + ", waits for its peers" * process.waits_for_peers


# dump


def _messages_table(messages: list[MessageHeader], bodies: bool) -> tables.Table[MessageHeader]:
    columns: list[tables.Column[MessageHeader]] = [
        tables.Column("message", lambda message: str(message.seq)),
        tables.Column("kind", lambda message: message.kind, left=True),
        tables.Column("codec", lambda message: message.codec or tables.NONE, left=True),
        tables.Column("size", lambda message: tables.size(message.bytes)),
        tables.Column("buffers", lambda message: str(message.buffers)),
        tables.Column("where", lambda message: message.where, left=True),
        tables.Column("age", lambda message: tables.duration(message.age_s)),
        tables.Column("unread by", lambda message: ", ".join(map(str, message.unread_by)) or tables.NONE, left=True),
    ]
    if bodies:
        columns.append(tables.Column("begins with", _preview, left=True))
    return tables.Table(columns, messages, tail=True)


def _preview(message: MessageHeader) -> str:
    if message.preview_hex is None:
        return "(not in the ring)"
    if message.preview_text is None:
        return bytes.fromhex(message.preview_hex).hex(" ")
    return repr(message.preview_text)
