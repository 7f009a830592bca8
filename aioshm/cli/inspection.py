"""Commands that look from outside: ``ls``, ``inspect``, ``who``, ``dump``, ``top`` and ``export``."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NoReturn, TypeAlias, get_args

import msgspec
import typer
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from aioshm.cli.app import UNUSABLE, CommandFailed, interrupted, print_json, run_interruptibly
from aioshm.cli.tables import (
    NONE,
    Row,
    count,
    duration,
    end_rows,
    folded,
    print_folded,
    process_row,
    progress,
    queue_row,
    size,
    started_by,
    table,
)
from aioshm.deferred import import_extra
from aioshm.observe.messages import MessageHeader, last_messages
from aioshm.observe.processes import CALLED, StartedProcess, StartedProcesses
from aioshm.observe.queues import QueueNotFound, QueueSnapshot, Watch, chosen
from aioshm.observe.suspects import GRAVE, WINDOW_S, Report, Suspect
from aioshm.observe.suspects import who as find_suspects
from aioshm.process.proc import is_own_process
from aioshm.process.stacks import Frame, ProcessReport, Stack, spied_report
from aioshm.zeromq.hosts import bracketed

if TYPE_CHECKING:
    from prometheus_client.registry import CollectorRegistry

Queue = Annotated[str, typer.Argument(help="Its name, its id or the beginning of that, or the pid of one of its ends.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Interval = Annotated[float, typer.Option(min=0.0, max=60.0, help="Seconds that rates are measured for.")]

Key: TypeAlias = Literal["name", "rate", "backlog", "age", "memory", "cpu"]
KEYS: tuple[Key, ...] = get_args(Key)
"""The orders of ``top``; the first letters choose them."""

PORT = 9464
"""The port of OpenTelemetry's exporters for Prometheus."""

_JSON_VERSION: Final = 1
"""The version of the JSON of ``--json``, see docs/howto/inspection.md. Additions do not change the version."""
_NO_QUEUE = "no queue of this user is open on this host"
_AROUND = 2
"""Frames that are shown on either side of the user's line."""
_ONCE_S = 0.25
_ESCAPE = "\x1b"


def _report(**content: Any) -> dict[str, Any]:
    return {"version": _JSON_VERSION, **content}


def _console() -> Console:
    """Return a console of 80 columns where that is no terminal, unless ``COLUMNS`` says so."""
    return Console(highlight=False)


def _print_table(console: Console, rows: Sequence[Row], *, head: bool = False, tail: bool = False) -> None:
    for line in table(rows, console.width, head=head, tail=tail):
        console.print(line, soft_wrap=True)


def _look_twice(watch: Watch, interval: float) -> tuple[QueueSnapshot, ...]:
    watch.look()
    time.sleep(interval)
    return watch.look()


def ls(as_json: AsJson = False, interval: Interval = 0.2) -> None:
    """List every live queue of the user, and the engines, workers and other processes that aioshm has started."""
    watch = Watch()
    started = StartedProcesses()
    started.look()
    queues = _look_twice(watch, interval)
    processes = started.settle()
    if as_json:
        print_json(_report(queues=queues, processes=processes, skipped=watch.skipped))
        return
    console = _console()
    if queues:
        _print_table(console, list(map(queue_row, queues)), head=True)
    else:
        console.print(_NO_QUEUE)
    if processes:
        console.print()
        _print_table(console, list(map(process_row, processes)), head=True, tail=True)
    if watch.skipped:
        console.print(f"processes of other users not looked at: {watch.skipped}", style="dim")


def inspect(queue: Queue, as_json: AsJson = False, interval: Interval = 0.2) -> None:
    """Show a queue and each of its ends."""
    one = chosen(queue, _look_twice(Watch(), interval))
    if as_json:
        print_json(_report(queue=one))
        return
    console = _console()
    for name, text in _facts(one).items():
        print_folded(console, f"{name:<11}{text}", bold=name)
    console.print()
    rows = end_rows(one)
    for row in rows:
        del row["queue"]
    _print_table(console, rows, tail=True)


def _facts(queue: QueueSnapshot) -> dict[str, str]:
    header = queue.header
    layout = header.layout
    writer = header.writer
    chunks = ", ".join(f"{pool.chunks} of {size(pool.room)}" for pool in layout.pools)
    facts = {
        "queue": header.name or "(it has no name)",
        "id": header.queue_id,
        "age": duration(writer.age_s),
        "codec": queue.codec,
        "ring": f"{header.slots:,} slots of {size(header.inline_bytes)}; chunks: {chunks}",
        "memory": f"{size(queue.memory_bytes)} of {size(layout.total_bytes)} in use",
        "overflow": f"{queue.overflow_segments} segments, {size(queue.overflow_bytes)}; {writer.overflows:,} messages",
        "published": f"{writer.messages:,} messages, {size(writer.bytes)}",
        "backlog": f"{header.backlog:,} messages",
        "open in": ", ".join(map(str, queue.holders)),
    }
    if writer.remote_readers:
        facts["remote"] = f"{writer.remote_readers} readers; the writer's stats() knows more about them"
    return facts


def dump(
    queue: Queue,
    last: Annotated[int, typer.Option("--last", "-n", min=1, help="How many messages.")] = 10,
    bodies: Annotated[bool, typer.Option("--bodies", help="Show the first bytes of each; nothing is decoded.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the headers of the latest messages of a queue."""
    watch = Watch()
    one = chosen(queue, watch.look())
    messages = last_messages(watch.ring(one), last, bodies=bodies)
    if as_json:
        print_json(_report(queue=one.label, messages=messages))
    elif messages:
        _print_table(_console(), [_message_row(message, bodies) for message in messages], tail=True)
    else:
        _console().print(f"{one.label}: no message was published yet")


def _message_row(message: MessageHeader, bodies: bool) -> Row:
    row: Row = {
        "message": str(message.seq),
        "kind": message.kind,
        "codec": message.codec or NONE,
        "size": size(message.bytes),
        "buffers": str(message.buffers),
        "where": message.where,
        "age": duration(message.age_s),
        "unread by": ", ".join(map(str, message.unread_by)) or NONE,
    }
    if bodies:
        row["begins with"] = "(not in the ring)"
        if message.preview_hex is not None:
            row["begins with"] = bytes.fromhex(message.preview_hex).hex(" ")
        if message.preview_text is not None:
            row["begins with"] = repr(message.preview_text)
    return row


# who


def who(
    queue: Annotated[
        str | None, typer.Argument(help="A queue, an engine or worker, or the pid of any process; none: all.")
    ] = None,
    as_json: AsJson = False,
    window: Annotated[float, typer.Option(min=0.01, max=60.0, help="Seconds to watch for.")] = WINDOW_S,
    stacks: Annotated[bool, typer.Option("--stacks", help="Show the whole stacks of all threads.")] = False,
) -> None:
    """Name engines and workers without progress, and processes that hold a queue up, with state and line of code."""
    started = StartedProcesses()
    started.look()
    reports: tuple[Report, ...] = ()
    unknown: QueueNotFound | None = None
    try:
        reports = find_suspects(queue, window_s=window)
    except QueueNotFound as error:
        unknown = error
    processes = started.settle()
    found = [each for each in processes if queue in (each.name, str(each.pid))]
    if queue is None:
        found = [each for each in processes if not each.makes_progress]
    described = [(each, started.report(each)) for each in found]
    process: ProcessReport | None = None
    if unknown is not None and queue is not None and queue.isdecimal() and is_own_process(int(queue)):
        # An engine, say, whose messages go over sockets.
        process = next((report for _, report in described), None) or spied_report(int(queue))
    elif unknown is not None and not found:
        raise unknown
    if as_json:
        content = [msgspec.structs.asdict(each) | msgspec.structs.asdict(report) for each, report in described]
        print_json(_report(queues=reports, process=process, processes=content))
        return
    screen = _Screen(whole=stacks)
    if process is not None:
        screen.show_process(process, found)
    else:
        for each, report in sorted(described, key=lambda pair: _urgency(pair[0])):
            text = f"{each.name}, pid {each.pid} (of {started_by(each)}): {_doing(each)}"
            screen.show(text, bold=each.name)
            screen.show_code(each.pid, report.process.state, report)
    held_up = [report for report in reports if report.held_up]
    for held in sorted(held_up, key=_severity):
        screen.show_queue(held)
    if queue is not None:
        for healthy in reports:
            if not healthy.held_up:
                screen.show_healthy(healthy)
        if len({each.parent for each in found}) > 1:
            screen.show(f"several programs have a {queue}: aioshm who PID")
    elif reports or processes:
        n_queues = len(reports) - len(held_up)
        others = len(processes) - len(found)
        screen.show(f"healthy: {n_queues} queue{'s' * (n_queues != 1)}, {others} process{'es' * (others != 1)}")
    else:
        screen.show(_NO_QUEUE)
    if screen.has_cut:
        screen.show("the whole stacks of all threads: --stacks")


def _urgency(process: StartedProcess) -> tuple[bool, bool, bool, float]:
    """Sort processes: stalled ones first, likely culprits before their peers, then stopped ones, then all others."""
    return process.makes_progress, process.state == "stopped", process.waits_for_peers, -process.seconds


def _severity(report: Report) -> tuple[int, int]:
    """Sort queues that are held up: the worst kind of trouble first, then the longest backlog."""
    return GRAVE.index(report.suspects[0].kind), -report.queue.header.backlog


def _doing(process: StartedProcess) -> str:
    noun = "request"
    if process.kind in CALLED:
        noun = "call"
    text = f"{progress(process)}, {process.requests} {noun}{'s' * (process.requests != 1)}"
    return text + ", waits for its peers" * process.waits_for_peers


class _Screen:
    """Prints reports: the code of each process once, and each hint at stacks that cannot be seen once."""

    def __init__(self, *, whole: bool) -> None:
        self._console = _console()
        self._whole = whole
        self._shown: set[object] = set()  # pids of processes with code on the screen, and hints
        self.has_cut = False

    def show(self, text: str, indent: str = "", bold: str = "") -> None:
        print_folded(self._console, text, indent, bold=bold)

    def show_queue(self, report: Report) -> None:
        label = report.queue.label
        for suspect in report.suspects:
            name = f"reader {suspect.rank}"
            if suspect.side == "writer":
                name = "the writer"
            if suspect.pid:
                name += f", pid {suspect.pid}"
            if suspect.command:
                name += f" ({suspect.command})"
            self.show(f"{label}: {name}: {suspect.text}", bold=label)
            if suspect.pid and suspect.state != "gone":
                self.show_code(suspect.pid, suspect.state, suspect)

    def show_healthy(self, report: Report) -> None:
        label = report.queue.label
        writer = report.queue.writer
        texts = [f"{count(writer.messages_per_s or 0.0)} messages/s, {count(writer.lag)} unread"]
        texts += [f"the {suspect.side} {suspect.text}" for suspect in report.suspects]
        self.show(f"{label}: no end holds the queue up ({'; '.join(texts)})", bold=label)

    def show_process(self, report: ProcessReport, started: Sequence[StartedProcess]) -> None:
        process = report.process
        name = f"pid {process.pid}"
        self.show(f"{name} ({process.command}) has no queue: {process.state}{_in_kernel(report)}", bold=name)
        for each in started:
            self.show(_doing(each), "  ")
        self.show_code(process.pid, "", report)

    def show_code(self, pid: int, state: str, report: Suspect | ProcessReport) -> None:
        if pid in self._shown:
            return
        self._shown.add(pid)
        if state:
            self.show(f"{state}{_in_kernel(report)}", "  ")
        if report.line is not None:
            self.show(f"at {report.line}", "  ", bold=str(report.line))
        for stack, frames in self._chosen_frames(report):
            self.show(stack.name + " (runs)" * stack.is_running, "  ")
            for frame in frames:
                self.show(str(frame), "    ", bold=str(frame) * frame.own)
        if report.hint and report.hint not in self._shown:
            self._shown.add(report.hint)
            self.show(report.hint, "  ")

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
            self.has_cut = self.has_cut or len(frames) < sum(len(each.frames) for each in report.stacks)
            yield stack, frames


def _in_kernel(report: Suspect | ProcessReport) -> str:
    return f"; in the kernel: {report.wait_channel}" * bool(report.wait_channel)


# top


def top(
    sort: Annotated[str, typer.Option(help=f"By {', '.join(KEYS)}.")] = "name",
    interval: Annotated[float, typer.Option(min=0.05, max=3600.0, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one page, and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Show every live queue of this user on this host, its ends, and engines and workers, again and again."""
    if sort not in KEYS:
        raise CommandFailed(f"--sort must be one of {', '.join(KEYS)}, not {sort!r}", UNUSABLE)
    key = next(key for key in KEYS if key == sort)
    console = _console()
    is_screen = not (once or as_json) and sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()
    is_screen = is_screen and not console.is_dumb_terminal
    if once:
        interval = min(interval, _ONCE_S)
    watch = Watch()
    started = StartedProcesses()
    queues: Sequence[QueueSnapshot] = ()
    processes: Sequence[StartedProcess] = ()
    with contextlib.suppress(KeyboardInterrupt), _terminable(), contextlib.ExitStack() as stack:
        pause = 0.0
        if is_screen:
            stack.enter_context(_single_keys(sys.stdin.fileno()))
            live = stack.enter_context(Live(console=console, screen=True, auto_refresh=False))
        else:  # rates need two looks
            watch.look()
            started.look()
            pause = interval
        while not _quits(pressed := _wait(pause, is_screen)):
            pause = interval
            if pressed is not None:
                key = next((key for key in KEYS if key[0] == pressed[-1].lower()), key)
            if pressed is None or not queues:  # the first key may come before the first look
                queues = watch.look()
                processes = started.settle() if once else started.look()
            queues = ordered(queues, key)
            if as_json:
                report = _report(queues=queues, processes=processes, skipped=watch.skipped)
                print(msgspec.json.encode(report).decode(), flush=True)
            elif is_screen:
                live.update(Group(_keys(key), _page(console.width, queues, processes, watch.skipped)), refresh=True)
            else:
                console.print(_page(console.width, queues, processes, watch.skipped), soft_wrap=True)
                sys.stdout.flush()
            if once:
                return


def _quits(pressed: str | None) -> bool:
    return pressed is not None and ("q" in pressed or pressed in (_ESCAPE, ""))


def _wait(seconds: float, is_screen: bool) -> str | None:
    """Wait for keys, if there is a screen, and return them; return None after so many seconds."""
    if not is_screen:
        time.sleep(seconds)
    elif select.select([sys.stdin], [], [], seconds)[0]:
        return os.read(sys.stdin.fileno(), 64).decode(errors="replace")
    return None


def ordered(queues: Sequence[QueueSnapshot], key: Key) -> list[QueueSnapshot]:
    """Sort queues by name, or the largest first."""

    def rank(queue: QueueSnapshot) -> float:
        return {
            "rate": queue.writer.messages_per_s or 0.0,
            "backlog": queue.header.backlog,
            # Snapshots differ in time: the moment of creation is compared.
            "age": queue.header.writer.age_s - queue.taken_ns / 1e9,
            "memory": queue.memory_bytes + queue.overflow_bytes,
            "cpu": sum(end.cpu_share or 0.0 for end in queue.ends),
        }[key]

    if key == "name":
        return sorted(queues, key=lambda queue: (not queue.header.name, queue.label))
    return sorted(queues, key=rank, reverse=True)


def _keys(sort: Key) -> Text:
    keys = Text("  ").join(Text(f"{key[0]} {key}", "dim") for key in KEYS)
    keys.highlight_words([f"{sort[0]} {sort}"], "not dim bold")
    return Text("aioshm top   sort: ") + keys + Text("   q quit")


def _page(width: int, queues: Sequence[QueueSnapshot], started: Sequence[StartedProcess], skipped: int) -> Group:
    """Return the tables of queues, of engines and workers, and of ends."""
    parts = [Text(_NO_QUEUE)]
    if queues:
        parts = [Text(), *table(list(map(queue_row, queues)), width, head=True)]
    if started:
        parts += [Text(), *table(list(map(process_row, started)), width, head=True, tail=True)]
    if queues:
        rows = [row for queue in queues for row in end_rows(queue)]
        parts += [Text(), *table(rows, width, head=True, tail=True)]
    note = f"queues: {len(queues)}; engines and workers: {len(started)}; "
    note += f"processes of other users not looked at: {skipped}"
    return Group(*parts, Text(), Text(folded(note, width), style="dim"))


@contextlib.contextmanager
def _single_keys(fd: int) -> Iterator[None]:
    """Read keys without a line end, and without echo."""
    before = termios.tcgetattr(fd)
    tty.setcbreak(fd)
    try:
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Restore the terminal on SIGTERM, too."""

    def end(_number: int, _frame: FrameType | None) -> NoReturn:
        raise interrupted(signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# export


def export(
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to serve at; 0: one that is free.")] = PORT,
    host: Annotated[str, typer.Option(help="Address to bind; anybody who reaches it may read.")] = "127.0.0.1",
    once: Annotated[bool, typer.Option("--once", help="Print the metrics once, and end.")] = False,
) -> None:
    """Serve metrics of every queue of this user on this host to Prometheus."""
    client = import_extra("prometheus_client", "prometheus", "aioshm export needs prometheus_client")
    from aioshm.observe.metrics import HostCollector

    registry = client.CollectorRegistry()
    registry.register(HostCollector())
    if once:
        sys.stdout.write(client.generate_latest(registry).decode())
    else:
        run_interruptibly(_serve(client, registry, host, port))


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
