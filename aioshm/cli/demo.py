"""``aioshm demo``: one writer and its readers, then the same through ``multiprocessing.Queue``; or engines."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import random
import secrets
import signal
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain, cycle, islice
from pathlib import Path
from statistics import median
from time import monotonic, monotonic_ns, sleep
from typing import Annotated, Any

import typer

import aioshm
from aioshm import Handle, MessageQueue, PeerDied, QueueClosed, engine
from aioshm.cli.app import UNUSABLE, CommandFailed, print_json, run_interruptibly
from aioshm.errors import AioshmError, EngineDead, ProcessDied

TEXT = Path(aioshm.errors.__file__).read_text().splitlines(keepends=True)
PACED = 250
PACE_S = 0.002
LINES = 20_000
ARRAYS = {1 << 12: 64, 1 << 16: 64, 1 << 20: 32, 1 << 22: 16, 1 << 24: 4, 1 << 25: 2}  # sizes in bytes, numbers

REQUESTS = 8  # for each engine; then a long one for each, while one engine is killed
STEP_S = 0.02

LOOP: Callable[[], asyncio.AbstractEventLoop] | None = None
with suppress(ImportError):
    import uvloop

    LOOP = uvloop.new_event_loop


def messages(times: int) -> Iterator[tuple[str, int, int, Any]]:
    """Yield phase, number, checksum and content: of paced lines, of lines without a pause, of arrays."""
    text = cycle([line.encode() for line in TEXT])
    paced = (("paced", line) for line in islice(text, PACED))
    unpaced = (("lines", line) for line in islice(text, LINES * times))
    arrays = (("arrays", array) for array in _arrays())
    for number, (phase, content) in enumerate(chain(paced, unpaced, arrays)):
        yield phase, number, zlib.crc32(content, number), content


def _arrays() -> Iterator[Any]:
    pool: Any = random.Random(6).randbytes(max(ARRAYS) + (1 << 20))
    with suppress(ImportError):
        import numpy as np

        pool = np.frombuffer(pool, np.uint8)
    for size, count in ARRAYS.items():
        for start in range(count):
            yield pool[start : start + size]


class Reader:
    """Checks and measures the messages that one process reads."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._messages = 0
        self._latencies_us: list[float] = []
        self._phases: dict[str, list[int]] = {}  # messages, bytes, first arrival, last arrival

    async def receive(self, handle: Handle) -> dict[str, Any]:
        """Receive from the queue until the writer closes it; compare each message with the sent one."""
        async with MessageQueue.create_from_handle(handle, self._rank) as queue:
            await queue.wait_until_ready(timeout=10)
            async for message in queue:
                self.check(message)
        return self.report()

    def check(self, message: tuple[str, int, int, int, Any]) -> None:
        """Check the next message."""
        arrived = monotonic_ns()
        phase, number, sent, checksum, content = message
        if (number, zlib.crc32(content, number)) != (self._messages, checksum):
            raise ValueError(f"message {self._messages} is not the one that was sent")
        self._messages += 1
        if phase == "paced":
            self._latencies_us.append((arrived - sent) / 1e3)
        counts = self._phases.setdefault(phase, [0, 0, arrived, 0])
        counts[0] += 1
        counts[1] += len(content)
        counts[3] = monotonic_ns()

    def report(self) -> dict[str, Any]:
        """Return the measurements."""
        n_lines, _, line_began, line_ended = self._phases["lines"]
        _, n_bytes, array_began, array_ended = self._phases["arrays"]
        lines_per_s = n_lines / (line_ended - line_began) * 1e9
        gb_per_s = n_bytes / (array_ended - array_began)
        latency_us = median(self._latencies_us)
        return {"messages": self._messages, "lines_per_s": lines_per_s, "gb_per_s": gb_per_s, "p50_us": latency_us}


async def _run(times: int, n_local: int, n_remote: int, say: Callable[[str], None]) -> dict[str, Any]:
    n_readers = n_local + n_remote
    async with (
        MessageQueue(n_readers, n_local, connect_ip="127.0.0.1") as queue,
        engine.WorkerGroup(
            Reader, n_readers, name="reader", shutdown_timeout=0.25, capture_stderr=False, loop_factory=LOOP
        ) as group,
    ):
        say(f"writer: pid {os.getpid()}; readers: pids {', '.join(map(str, group.pids))}")
        received = group.broadcast("receive", queue.export_handle())
        total = PACED + LINES * times + sum(ARRAYS.values())
        ours, _ = await asyncio.gather(received, _send(queue, times))
        if any(report["messages"] != total for report in ours):
            raise CommandFailed("messages are missing")
        say(f"MessageQueue: every reader checked all {total:,} messages")
        theirs = await group.call(0, _measure_multiprocessing, n_readers)
        say(f"multiprocessing.Queue: the same with {theirs[0]['messages']:,} messages")
    return {"messages": total, "readers": ours, "multiprocessing": theirs}


async def _send(queue: MessageQueue, times: int) -> None:
    """Send all messages, and close the queue."""
    with suppress(PeerDied, QueueClosed):  # all readers are gone: the group reports why
        await queue.wait_until_ready(timeout=10)
        began = monotonic()
        for phase, number, checksum, content in messages(times):
            if phase == "paced":
                await asyncio.sleep(began + number * PACE_S - monotonic())
            await queue.enqueue((phase, number, monotonic_ns(), checksum, content))
    await queue.aclose()


def _measure_multiprocessing(_: Reader, n_readers: int) -> list[dict[str, Any]]:
    fork = multiprocessing.get_context("fork")  # with "spawn", a killed process would leave named semaphores
    reports: Any = fork.SimpleQueue()
    queues: list[Any] = [fork.Queue() for _ in range(n_readers)]
    readers = [fork.Process(target=_read, args=(queue, reports)) for queue in queues]
    for reader in readers:
        reader.start()
    began = monotonic()
    for phase, number, checksum, content in messages(1):
        if phase == "paced":
            sleep(max(0, began + number * PACE_S - monotonic()))
        for queue in queues:
            queue.put((phase, number, monotonic_ns(), checksum, content))
    for queue, reader in zip(queues, readers, strict=True):
        queue.put(None)
        reader.join()
        if reader.exitcode:
            raise ProcessDied("reader of multiprocessing.Queue", reader.pid, reader.exitcode)
    return [reports.get() for _ in readers]


def _read(queue: Any, reports: Any) -> None:
    engine.die_with_parent()
    reader = Reader(0)
    for message in iter(queue.get, None):
        reader.check(message)
    reports.put(reader.report())


# Engines


class _Engine:
    def __init__(self) -> None:
        self._words: dict[str, list[str]] = {}

    def initialize(self, metadata: object) -> dict[str, Any]:
        return {}

    def add_request(self, request: dict[str, Any]) -> None:
        self._words[request["request_id"]] = request["line"].split()[::-1]

    def abort_requests(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            del self._words[request_id]

    async def step(self) -> list[dict[str, Any]]:
        await asyncio.sleep(STEP_S)
        words = []
        for request_id, left in self._words.items():
            word = left.pop()
            words.append({"request_id": request_id, "word": word, "finish_reason": None if left else "stop"})
        self._words = {request_id: left for request_id, left in self._words.items() if left}
        return words


def _run_engine(handshake_address: str, dp_rank: int, local_dp_rank: int) -> None:
    with asyncio.Runner(loop_factory=LOOP) as runner:
        runner.run(engine.run_engine_core(_Engine(), handshake_address, dp_rank))


async def _ask(client: engine.EngineClient, line: str, rank: int | None = None) -> float:
    """Send a request and check its words; return the milliseconds to the first word."""
    began = monotonic()
    stream = client.submit({"request_id": secrets.token_hex(8), "line": line}, engine=rank)
    words = [(await anext(stream))["word"]]
    first_ms = (monotonic() - began) * 1e3
    words += [output["word"] async for output in stream]
    if words != line.split():
        raise CommandFailed(f"engine {stream.engine} sent wrong words")
    return first_ms


async def _run_engines(n_engines: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Start engines, send requests, kill the last engine; return the measurements."""
    logging.getLogger("aioshm").addHandler(logging.NullHandler())  # the demo prints deaths itself
    places: dict[str, Any] = {}
    if sys.platform == "linux":  # abstract addresses leave no files if this process is killed
        handshake, requests, outputs = (f"ipc://@aioshm-{secrets.token_hex(8)}" for _ in range(3))
        places = {"handshake_address": handshake, "addresses": engine.EngineZmqAddresses([requests], [outputs])}
    async with engine.EngineSupervisor(
        _run_engine,
        n_engines,
        start_timeout=60,
        layout=engine.EngineLayout(coordinator=False, **places),
        startup=engine.StartupOptions(on_progress=lambda progress: say(str(progress).partition(";")[0])),
    ) as supervisor:
        client = supervisor.client
        lines = [line for line in TEXT if line.split()][: REQUESTS * n_engines]
        say(f"sending {len(lines)} requests")
        first_word_ms = median(await asyncio.gather(*(_ask(client, line) for line in lines)))
        words = sum(len(line.split()) for line in lines)
        say(f"all {words:,} words are right; first word after {first_word_ms:.1f} ms (median of {len(lines)})")

        victim = supervisor.engines[-1]
        assert victim.pid is not None
        streams = []
        for info in supervisor.engines:
            request = {"request_id": secrets.token_hex(8), "line": lines[0] * 1000}
            streams.append(client.submit(request, engine=info.rank))
        await asyncio.gather(*map(anext, streams))
        say(f"kill -9 {victim.pid}: engine {victim.rank}, with a request in flight")
        began = monotonic()
        os.kill(victim.pid, signal.SIGKILL)
        failing = streams.pop()
        try:
            while True:
                await anext(failing)
        except EngineDead as error:
            noticed_ms = (monotonic() - began) * 1e3
            say(f"the request failed after {noticed_ms:.1f} ms: {error}")
        await supervisor.wait_until_ready(60)
        back_s = monotonic() - began
        for stream in streams:
            await anext(stream)
            await stream.aclose()
        await _ask(client, lines[0], victim.rank)
        say(f"engine {victim.rank} answers again after {back_s:.2f} s; requests that continued: {len(streams)}")
    report = {"requests": len(lines), "words": words, "killed": victim.pid, "continued": len(streams)}
    return report | {"first_word_p50_ms": first_word_ms, "noticed_ms": noticed_ms, "back_s": back_s}


def demo(
    readers: Annotated[int, typer.Option(min=0, max=64, help="How many processes read.")] = 2,
    remote: Annotated[int, typer.Option(min=0, max=64, help="How many more read over TCP.")] = 0,
    times: Annotated[int, typer.Option("--repeat", min=1, help=f"How often to send {LINES:,} lines.")] = 1,
    engines: Annotated[int, typer.Option(min=0, max=16, help="Run engines instead; kill one.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Send text and arrays to other processes, which check every message; compare the speed."""

    def say(text: str) -> None:
        if not as_json:
            print(text, flush=True)

    if not (readers or remote or engines):
        raise CommandFailed("--readers must be at least 1 without --remote", UNUSABLE)
    if logging.lastResort is not None:
        logging.lastResort.addFilter(_is_no_death)
    core = "native" if aioshm.native_core else "portable"
    loop = "uvloop" if LOOP else "asyncio"
    say(f"aioshm {aioshm.__version__} ({core} core), {loop}")
    if engines:
        work = _run_engines(engines, say)
    else:
        say(f"1 writer, {readers} local readers, {remote} over TCP: {LINES * times:,} lines, then arrays up to 32 MiB")
        work = _run(times, readers, remote, say)
    try:
        report = run_interruptibly(work, LOOP)
    except AioshmError as error:
        if isinstance(error, (OSError, ValueError)):
            raise
        raise CommandFailed(str(error)) from None
    if as_json:
        print_json({"aioshm": aioshm.__version__, "core": core, "loop": loop, "verified": True, **report})
    elif not engines:
        _show_table(report["readers"], report["multiprocessing"])


def _is_no_death(record: logging.LogRecord) -> bool:
    """Drop the queues' warnings about deaths, which the demo prints itself. Stalls stay."""
    return " died" not in record.getMessage()


def _show_table(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    print(f"{'slowest reader':<26}{'MessageQueue':>16}{'multiprocessing.Queue':>26}")
    for title, name, worst, form in (
        ("lines per second", "lines_per_s", min, ",.0f"),
        ("arrays, GB/s", "gb_per_s", min, ".2f"),
        ("latency at 500/s, us", "p50_us", max, ",.0f"),
    ):
        our, their = (format(worst(report[name] for report in reports), form) for reports in (ours, theirs))
        print(f"{title:<26}{our:>16}{their:>26}")
