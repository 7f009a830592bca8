"""``aioshm demo``: one writer and its readers; then the same through ``multiprocessing.Queue``."""

from __future__ import annotations

import asyncio
import importlib.util
import multiprocessing
import os
import platform
import random
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import chain, cycle, repeat
from pathlib import Path
from statistics import quantiles
from time import monotonic, monotonic_ns
from typing import Annotated, Any, Literal, NamedTuple

import typer

import aioshm
from aioshm import Handle, MessageQueue, PeerDied, QueueClosed
from aioshm.cli.outcome import FAILED, UNUSABLE, CommandFailed, counted, loop_factory, print_json, run_interruptibly
from aioshm.engine import WorkerGroup, die_with_parent
from aioshm.errors import AioshmError, ProcessDied

LINES = 20_000
PACED = 250
PACE_S = 0.002
ARRAYS = {1 << 12: 64, 1 << 16: 64, 1 << 20: 32, 1 << 22: 16, 1 << 24: 4, 1 << 25: 2}
"""Sizes in bytes, and how many of each. The largest do not fit into a slot of the ring."""
ATTACH_S = 10.0

Say = Callable[..., None]


class Script(NamedTuple):
    """All messages of a run: paced lines, lines without a pause, arrays."""

    lines: list[bytes]
    times: int

    @property
    def total(self) -> int:
        """The number of messages."""
        return PACED + len(self.lines) * self.times + sum(ARRAYS.values())

    def messages(self) -> Iterator[tuple[str, int, int, Any]]:
        """Yield phase, number, checksum and content of each message."""
        text = cycle(self.lines)
        paced = zip(repeat("paced", PACED), text, strict=False)
        unpaced = zip(repeat("lines", len(self.lines) * self.times), text, strict=False)
        arrays = (("arrays", array) for array in _arrays())
        for number, (phase, content) in enumerate(chain(paced, unpaced, arrays)):
            yield phase, number, zlib.crc32(content, number), content


def _arrays() -> Iterator[Any]:
    generator = random.Random(6)
    sizes = [size for size, count in ARRAYS.items() for _ in range(count)]
    generator.shuffle(sizes)
    pool: Any = generator.randbytes(max(sizes) + (1 << 20))
    with suppress(ImportError):
        import numpy as np

        pool = np.frombuffer(pool, np.uint8)
    for size in sizes:
        start = generator.randrange(1 << 20)
        yield pool[start : start + size]


class Mismatch(Exception):
    """A reader received something else than was sent."""


class Checker:
    """Checks and measures the messages that one reader receives."""

    def __init__(self) -> None:
        self._messages = 0
        self._latencies_us: list[float] = []
        self._clocks: dict[str, list[int]] = {}  # first arrival, last arrival, bytes

    def check(self, message: tuple[str, int, int, int, Any]) -> None:
        """Check the next message."""
        arrived = monotonic_ns()
        phase, number, sent, checksum, content = message
        if (number, zlib.crc32(content, number)) != (self._messages, checksum):
            raise Mismatch(f"message {self._messages} is not the one that was sent")
        self._messages += 1
        if phase == "paced":
            self._latencies_us.append((arrived - sent) / 1e3)
        clock = self._clocks.setdefault(phase, [arrived, 0, 0])
        clock[1] = monotonic_ns()
        clock[2] += len(content)

    def report(self) -> dict[str, Any]:
        """Return the measurements."""
        first, last, _ = self._clocks["lines"]
        arrays_first, arrays_last, n_bytes = self._clocks["arrays"]
        percentiles = quantiles(self._latencies_us, n=100)
        return {
            "messages": self._messages,
            "lines_per_s": (self._messages - PACED - sum(ARRAYS.values())) / (last - first) * 1e9,
            "arrays_gb_per_s": n_bytes / (arrays_last - arrays_first),
            "p50_us": percentiles[49],
            "p99_us": percentiles[98],
        }


class Reader:
    """A worker process that reads the queue."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    async def receive(self, handle: Handle) -> dict[str, Any]:
        """Check messages until the writer closes the queue."""
        checker = Checker()
        async with MessageQueue.create_from_handle(handle, self._rank) as queue:
            await queue.wait_until_ready(timeout=ATTACH_S)
            async for message in queue:
                checker.check(message)
        return checker.report()


def _measure_multiprocessing(_: Reader, script: Script, n_readers: int) -> list[dict[str, Any]]:
    # With "spawn", a killed process would leave named semaphores behind.
    fork = multiprocessing.get_context("fork")
    reports: Any = fork.SimpleQueue()
    queues: list[Any] = [fork.Queue() for _ in range(n_readers)]
    readers = [fork.Process(target=_read, args=(queue, reports)) for queue in queues]
    for reader in readers:
        reader.start()
    began = monotonic()
    for phase, number, checksum, content in script.messages():
        if phase == "paced":
            time.sleep(max(0, began + number * PACE_S - monotonic()))
        for queue in queues:
            queue.put((phase, number, monotonic_ns(), checksum, content))
    for queue, reader in zip(queues, readers, strict=True):
        queue.put(None)
        reader.join()
        if reader.exitcode:
            raise ProcessDied("reader of multiprocessing.Queue", reader.pid, reader.exitcode)
    return [reports.get() for _ in readers]


def _read(queue: Any, reports: Any) -> None:
    die_with_parent()
    checker = Checker()
    for message in iter(queue.get, None):
        checker.check(message)
    reports.put(checker.report())


async def _run(script: Script, readers: int, remote: int, loop: str, say: Say) -> dict[str, Any]:
    n_readers = readers + remote
    async with (
        MessageQueue(n_readers, readers, connect_ip="127.0.0.1") as queue,
        WorkerGroup(
            Reader,
            n_readers,
            name="reader",
            shutdown_timeout=0.25,
            capture_stderr=False,
            loop_factory=loop_factory(loop),
        ) as group,
    ):
        say(f"writer: pid {os.getpid()}; readers: pids {', '.join(map(str, group.pids))}")
        received = group.collective_rpc("receive", (queue.export_handle(),))
        ours, _ = await asyncio.gather(received, _send(queue, script, say))
        if any(report["messages"] != script.total for report in ours):
            raise CommandFailed("messages are missing")
        say(f"MessageQueue: every reader checked all {script.total:,} messages")
        # A long run would take much longer here: multiprocessing.Queue gets the default number.
        sample = Script(script.lines, min(script.times, _default_times(script.lines)))
        theirs = await group.call(0, _measure_multiprocessing, sample, n_readers)
        say(f"multiprocessing.Queue: the same with {sample.total:,} messages")
    for rank, report in enumerate(ours):
        report["remote"] = rank >= readers
    return {"messages": script.total, "readers": ours, "multiprocessing": theirs}


async def _send(queue: MessageQueue, script: Script, say: Say) -> None:
    terminal = sys.stdout.isatty()
    with suppress(PeerDied, QueueClosed):  # every reader has gone; the group knows why
        await queue.wait_until_ready(timeout=ATTACH_S)
        began = said = monotonic()
        for phase, number, checksum, content in script.messages():
            if phase == "paced":
                await asyncio.sleep(began + number * PACE_S - monotonic())
            await queue.enqueue((phase, number, monotonic_ns(), checksum, content))
            if monotonic() > said + (0.2 if terminal else 5):
                said = monotonic()
                say(f"{number:,} of {script.total:,} messages sent", end="\r" if terminal else "\n")
    await queue.aclose()


def register(app: typer.Typer) -> None:
    """Add ``aioshm demo``."""
    app.command("demo")(_demo)


def _demo(
    text: Annotated[
        Path,
        typer.Option("--input", show_default="a file of aioshm", help="Text to send."),
    ] = Path(aioshm.errors.__file__),
    readers: Annotated[int, typer.Option(min=0, max=64, help="How many processes read.")] = 2,
    remote: Annotated[int, typer.Option(min=0, max=64, help="How many more read over TCP.")] = 0,
    times: Annotated[
        int | None,
        typer.Option("--repeat", min=1, show_default=f"{LINES:,} lines", help="How often."),
    ] = None,
    engines: Annotated[int, typer.Option(min=0, max=16, help="Run engines; kill one.")] = 0,
    loop: Annotated[Literal["auto", "asyncio", "uvloop"], typer.Option()] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Send text and arrays to other processes, which check every message; compare the speed."""
    readable = text.is_file() and os.access(text, os.R_OK)
    lines = text.read_bytes().splitlines(keepends=True) if readable else []
    if not lines:
        raise CommandFailed(f"--input {text} is not a readable file with text", UNUSABLE)
    if not readers + remote:
        raise CommandFailed("--readers must be at least 1 without --remote", UNUSABLE)
    if engines and (readers != 2 or remote or times):
        raise CommandFailed("--engines does not go with --readers, --remote, --repeat", UNUSABLE)
    with_uvloop = importlib.util.find_spec("uvloop") is not None
    if loop == "uvloop" and not with_uvloop:
        raise CommandFailed("--loop uvloop needs uvloop: pip install 'aioshm[uvloop]'", UNUSABLE)
    if loop == "auto":
        loop = "uvloop" if with_uvloop else "asyncio"

    say: Say = (lambda *_, **__: None) if as_json else partial(print, flush=True)
    report: dict[str, Any] = {
        "aioshm": aioshm.__version__,
        "core": "native" if aioshm.native_core else "portable",
        "python": platform.python_version(),
        "loop": loop,
        "input": os.fsencode(text.absolute()).decode(errors="replace"),  # a path need not be text
        "lines": len(lines),
    }
    say("aioshm {aioshm} ({core} core), Python {python}, {loop}\n{input}".format(**report))
    if engines:
        from aioshm.cli.demo_engines import run_engines  # here: its imports take a while

        run = run_engines(lines, engines, loop, say)
    else:
        script = Script(lines, times or _default_times(lines))
        more = f", {remote} over TCP (encrypted)" if remote else ""
        say(f"1 writer, {counted(readers, 'reader')}{more}")
        say(f"{len(lines):,} lines x {script.times:,}, then arrays up to 32 MiB")
        run = _run(script, readers, remote, loop, say)
    try:
        report |= run_interruptibly(run, loop)
    except (AioshmError, OSError, ValueError) as error:
        code = UNUSABLE if isinstance(error, (OSError, ValueError)) else FAILED
        raise CommandFailed(str(error).partition("\n")[0], code) from None
    if as_json:
        print_json({"verified": True, **report})
    elif not engines:
        _show_table(report["readers"], report["multiprocessing"])


def _show_table(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    print(f"{'slowest reader':<26}{'MessageQueue':>16}{'multiprocessing.Queue':>26}")
    for title, name, worst, form in (
        ("lines per second", "lines_per_s", min, ",.0f"),
        ("arrays, GB/s", "arrays_gb_per_s", min, ".2f"),
        ("median latency, us", "p50_us", max, ",.0f"),
        ("99th percentile, us", "p99_us", max, ",.0f"),
    ):
        our, their = (format(worst(each[name] for each in some), form) for some in (ours, theirs))
        print(f"{title:<26}{our:>16}{their:>26}")
    print(f"Latency: a line every {PACE_S * 1e3:.0f} ms, from before enqueue() to after dequeue().")


def _default_times(lines: list[bytes]) -> int:
    return -(-LINES // len(lines))
