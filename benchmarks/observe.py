"""Messages per second that a queue loses to ``aioshm top`` and to a scrape of ``aioshm export`` every second.

One process writes as fast as it can, with a queue's defaults, and one reads, each on a CPU of its own; ``top`` draws on
a terminal, and the observers are processes of their own.

One per cent is less than a virtual machine varies by from one second to the next. So the observers look ten times a
second, for short parts of one long run, and are stopped (SIGSTOP) in the other parts. A block has six parts: looked at,
quiet, quiet again, and the same backwards, in an order that changes; parts of one block are compared. The loss, divided
by the CPU time that the observers took for it, times what they take when they look once a second, is the loss at one
look a second. The quiet parts against each other are the control. The intervals hold the truth in 95 of 100 runs; the
bound is held against the worse end.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import math
import os
import pty
import random
import signal
import struct
import sys
import termios
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from subprocess import DEVNULL, PIPE, Popen

from aioshm import Handle, MessageQueue, QueueClosed
from aioshm.observe.queues import Ring, find_rings
from aioshm.ring.header import read_header
from benchmarks.framework.crew import BenchmarkError, Boss, Crew
from benchmarks.framework.harness import Settings, main, progress
from benchmarks.framework.report import Report
from benchmarks.framework.workload import SMALL_DICT

LOOKED_AT, QUIET, AGAIN = "looked at, ten times a second", "nobody looks", "nobody looks, too"
AS_EVER = "looked at, once a second"
PERIOD_S, DENSER = 1.0, 10
PARTS_OF_COST = 40  # how much longer than a part the cost of one look a second is measured
BATCH = 64
MOST_LOST = 0.01
READY_TIMEOUT_S = 60.0
CPUCLOCK_SCHED = 2  # linux/posix-timers.h: with a process's number beside it the clock of its CPU time

LINES_OF_A_QUEUE = 20  # of a scrape, at least; others are of the host
TRIM, RESAMPLES = 0.2, 2000


@dataclass
class Observers:
    """The processes of ``aioshm top`` and ``aioshm export``, stopped between their parts."""

    processes: tuple[Popen[bytes], Popen[bytes]]
    port: int
    period_s: float

    def go_on(self) -> None:
        """Resume them."""
        for process in self.processes:
            process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """Stop them."""
        for process in self.processes:
            process.send_signal(signal.SIGSTOP)

    def cpu_s(self) -> float:
        """Return what CPU time they have used, and this process, which scrapes."""
        return sum(_cpu_s(process.pid) for process in self.processes) + time.process_time()

    async def look(self, seconds: float) -> int:
        """Resume them for so long, and scrape; return how many lines the last scrape had."""
        self.go_on()
        lines, end = 0, time.monotonic() + seconds
        while True:
            lines = await self.scrape()
            left = end - time.monotonic()
            await asyncio.sleep(max(0.0, min(self.period_s, left)))
            if left <= self.period_s:
                self.stop()
                return lines

    async def scrape(self) -> int:
        """Return how many lines a scrape has."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(b"GET /metrics HTTP/1.0\r\nHost: localhost\r\n\r\n")
            return (await reader.read(-1)).count(b"\n")
        finally:
            writer.close()


@contextlib.contextmanager
def observers(period_s: float) -> Iterator[Observers]:
    """Start the observers; end them after the block."""
    command = [sys.executable, "-m", "aioshm"]
    with (
        terminal() as screen,
        Popen([*command, "top", "--interval", str(period_s)], stdin=screen, stdout=screen, stderr=DEVNULL) as top,
        Popen([*command, "export", "--port", "0"], stdout=PIPE) as export,
    ):
        try:
            assert export.stdout is not None
            words = export.stdout.readline().split()
            if not words:
                raise BenchmarkError("aioshm export has not begun to serve")
            port = int(words[-1].rpartition(b":")[2].partition(b"/")[0])
            yield Observers((top, export), port, period_s)
        finally:
            for process in (top, export):
                process.kill()


@contextlib.contextmanager
def terminal() -> Iterator[int]:
    """Open a terminal of the usual size, and read what is drawn on it."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 160, 0, 0))
    drain = threading.Thread(target=_drain, args=(ours,), daemon=True)
    drain.start()
    try:
        yield theirs
    finally:
        os.close(theirs)
        drain.join()
        os.close(ours)


def _drain(fd: int) -> None:
    with contextlib.suppress(OSError):  # nobody has the terminal open any more
        while os.read(fd, 65536):
            pass


@dataclass
class Run:
    """The queue that is measured in parts of some seconds, and its observers."""

    ring: Ring
    looking: Observers
    seconds: float

    async def part(self, case: str) -> dict[str, float]:
        """Measure one part."""
        began, messages, cpu_s = self._mark()
        if case == LOOKED_AT:
            await self.looking.look(self.seconds)
        else:
            await asyncio.sleep(self.seconds)
        ended, published, spent_s = self._mark()
        seconds = ended - began
        return {
            "messages_per_s": (published - messages) / seconds,
            "observers_cpu_percent": 100 * (spent_s - cpu_s) / seconds,
        }

    def _mark(self) -> tuple[float, int, float]:
        """Return the time, the messages published, and the observers' CPU time; costs the same in every part."""
        written = read_header(self.ring.read(0, self.ring.layout.header_bytes)).writer.messages
        return time.monotonic(), written, self.looking.cpu_s()


async def run(settings: Settings, report: Report) -> None:
    """Measure in blocks, then what the observers take at one look a second."""
    orders = itertools.cycle(itertools.permutations((LOOKED_AT, QUIET, AGAIN)))
    blocks: list[dict[str, list[dict[str, float]]]] = []
    with Crew(settings.loop_factory) as crew:
        writer = crew.start("writer", write)
        reader = crew.start("reader", read, handle := await writer.reply())
        await reader.reply()
        await writer.reply()
        writer.order("go")
        ring = _ring_of(handle)
        with observers(PERIOD_S / DENSER) as looking:
            measured = Run(ring, looking, settings.seconds)
            await _found(looking)  # their first look takes longer
            looking.stop()
            for number in range(settings.repeat):
                progress(f"block {number + 1} of {settings.repeat}")
                order = next(orders)
                block: dict[str, list[dict[str, float]]] = {case: [] for case in order}
                for case in (*order, *reversed(order)):
                    block[case].append(await measured.part(case))
                for case, parts in block.items():
                    means = {figure: fmean(part[figure] for part in parts) for figure in parts[0]}
                    report.result(case, "aioshm").add(**means)
                blocks.append(block)
        with observers(PERIOD_S) as looking:
            await _found(looking)
            progress("one look a second")
            began, cpu_s = time.monotonic(), looking.cpu_s()
            lines = await looking.look(max(settings.seconds * PARTS_OF_COST, PERIOD_S))
            once = 100 * (looking.cpu_s() - cpu_s) / (time.monotonic() - began)
            report.result(AS_EVER, "aioshm").add(observers_cpu_percent=once, scraped_lines=lines)
    _conclude(report, blocks, once)


def _conclude(report: Report, blocks: list[dict[str, list[dict[str, float]]]], once: float) -> None:
    often = fmean(part["observers_cpu_percent"] for block in blocks for part in block[LOOKED_AT])
    scale = once / often
    estimate, low, high = interval_of([_lost(block, (QUIET, AGAIN), LOOKED_AT) for block in blocks])
    control, control_low, control_high = interval_of([_lost(block, (QUIET,), AGAIN) for block in blocks])
    report.remarks += [
        f"the observers take {often:.1f}% of a CPU at {DENSER} looks a second, {once:.2f}% at one",
        f"messages/s lost at {DENSER} looks a second: {estimate:.2%} ({low:.2%} to {high:.2%}); "
        f"control: {control:.2%} ({control_low:.2%} to {control_high:.2%})",
        f"messages/s lost at one look a second: {estimate * scale:.2%} ({low * scale:.2%} to {high * scale:.2%})",
    ]
    most = 100 * max(0.0, high * scale)
    report.hold("messages/s lost with top and a scrape every second, at most", most, "%", 100 * MOST_LOST)


def _lost(block: dict[str, list[dict[str, float]]], quiet: tuple[str, ...], other: str) -> float:
    """Return by what share the rate of a part is below that of quiet parts of one block."""
    below, above = (
        fmean(math.log(max(part["messages_per_s"], 1e-12)) for case in cases for part in block[case])
        for cases in ((other,), quiet)
    )
    return above - below


def trimmed_mean(values: Sequence[float]) -> float:
    """Return the mean without the stragglers at either end."""
    cut = int(len(values) * TRIM)
    return fmean(sorted(values)[cut : len(values) - cut])


def interval_of(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the trimmed mean of repetitions, and its interval by the percentile bootstrap."""
    pick = random.Random(0)
    means = sorted(trimmed_mean(pick.choices(values, k=len(values))) for _ in range(RESAMPLES))
    outside = int(RESAMPLES * 0.025)
    return trimmed_mean(values), means[outside], means[-1 - outside]


async def _found(looking: Observers) -> None:
    """Scrape until the queue is in it."""
    end = time.monotonic() + READY_TIMEOUT_S
    while await looking.scrape() < LINES_OF_A_QUEUE:
        if time.monotonic() > end:
            raise BenchmarkError("aioshm export does not tell of the queue")
        await asyncio.sleep(PERIOD_S / 10)


def _ring_of(handle: Handle) -> Ring:
    [found] = [ring for ring in find_rings()[0] if ring.queue_id == handle.queue_id.hex()]
    return found


def _cpu_s(pid: int) -> float:
    """Return the CPU time of a process, to the nanosecond, with that of its threads that have ended."""
    return time.clock_gettime(~pid << 3 | CPUCLOCK_SCHED)


def _stay_on(number: int) -> None:
    """Keep this process on one CPU, where there is one for each end."""
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) > 1:
        os.sched_setaffinity(0, {cpus[number]})


async def write(boss: Boss) -> None:
    """Role: send for ever."""
    _stay_on(0)
    async with MessageQueue(1, 1) as queue:
        boss.reply(queue.export_handle())
        await queue.wait_until_ready(READY_TIMEOUT_S)
        boss.reply("ready")
        await boss.order()
        for first in itertools.count(0, BATCH):
            for message in SMALL_DICT.numbered(range(first, first + BATCH)):
                await queue.enqueue(message)


async def read(boss: Boss, handle: Handle) -> None:
    """Role: read, and check each message."""
    _stay_on(1)
    async with MessageQueue.create_from_handle(handle, 0) as queue:
        await queue.wait_until_ready(READY_TIMEOUT_S)
        boss.reply("ready")
        number = 0
        with contextlib.suppress(QueueClosed):
            while True:
                SMALL_DICT.check(await queue.dequeue(), number)
                number += 1


if __name__ == "__main__":
    sys.exit(main("observe", __doc__, run, repeat=36, seconds=0.4))
