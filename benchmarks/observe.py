"""What it costs a queue that it is looked at: by ``aioshm top``, and by a scrape of ``aioshm export`` every second.

One process writes as fast as it can, with a queue's defaults, and one reads that. In turns nobody looks, ``top`` looks
every second and ``export`` is scraped every second, and nobody looks again: the two quiet parts beside each other are
the control, which says what the same varies by without any change. Who looks is stopped (SIGSTOP) meanwhile. What
looking takes of a CPU is measured, too: where there is no CPU left over, that is what the queue loses. Where the
control misses its bound, the machine was too restless to tell.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from subprocess import DEVNULL, PIPE, Popen

from aioshm import Handle, MessageQueue, QueueClosed
from benchmarks.framework.crew import BenchmarkError, Boss, Crew
from benchmarks.framework.harness import Settings, main, progress
from benchmarks.framework.report import Report
from benchmarks.framework.workload import SMALL_DICT

QUIET, LOOKED_AT, AGAIN = "nobody looks", "top, and a scrape every second", "nobody looks, again"
PERIOD_S = 1.0
BATCH = 64
RATIO = 0.99
READY_TIMEOUT_S = 60.0

LINES_OF_A_QUEUE = 20  # of a scrape, at least; some tell of the host


@dataclass
class Observers:
    """``aioshm top`` and ``aioshm export``, stopped unless they are to look.

    Attributes:
        top, export: The processes.
        url: Where to scrape.
    """

    top: Popen[str]
    export: Popen[str]
    url: str

    def go_on(self) -> None:
        """Let them look."""
        for process in (self.top, self.export):
            process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """Let them do nothing."""
        for process in (self.top, self.export):
            process.send_signal(signal.SIGSTOP)

    def cpu_s(self) -> float:
        """Return what CPU time they have used."""
        return sum(_cpu_s(process.pid) for process in (self.top, self.export))

    def scrape(self) -> int:
        """Return how many lines a scrape has."""
        with urllib.request.urlopen(self.url, timeout=30) as response:
            return len(response.read().splitlines())


@contextlib.contextmanager
def observers() -> Iterator[Observers]:
    """Start those who look; end them after the block."""
    command = [sys.executable, "-m", "aioshm"]
    with (
        Popen([*command, "top", "--interval", str(PERIOD_S), "--json"], stdout=DEVNULL, text=True) as top,
        Popen([*command, "export", "--port", "0"], stdout=PIPE, text=True) as export,
    ):
        try:
            assert export.stdout is not None
            words = export.stdout.readline().split()
            if not words:
                raise BenchmarkError("aioshm export has not begun to serve")
            yield Observers(top, export, words[-1])
        finally:
            for process in (top, export):
                process.kill()


async def run(settings: Settings, report: Report) -> None:
    """Measure in turns."""
    with Crew(settings.loop_factory) as crew, observers() as looking:
        writer = crew.start("writer", write)
        reader = crew.start("reader", read, await writer.reply())
        await reader.reply()
        await writer.reply()
        await _found(looking)  # what is done once is done before
        looking.stop()
        for number in range(settings.repeat):
            for case in (QUIET, LOOKED_AT, AGAIN) if number % 2 else (AGAIN, LOOKED_AT, QUIET):
                progress(f"{number + 1} of {settings.repeat}: {case}")
                figures, began, cpu_s = {}, time.monotonic(), 0.0
                writer.order("go")
                if case == LOOKED_AT:
                    looking.go_on()
                    cpu_s = looking.cpu_s()
                    lines = await _scrape(looking, settings.seconds)
                    cpu_s = looking.cpu_s() - cpu_s
                    looking.stop()
                    figures = {
                        "observers_cpu_percent": 100 * cpu_s / (time.monotonic() - began),
                        "scraped_lines": lines,
                    }
                else:
                    await asyncio.sleep(settings.seconds)
                writer.order("stop")
                figures["messages_per_s"] = await writer.reply()
                report.result(case, "aioshm").add(**figures)
    before, looked_at, after = (
        report.result(case, "aioshm").figures["messages_per_s"] for case in (QUIET, LOOKED_AT, AGAIN)
    )
    parts = list(zip(before, looked_at, after, strict=True))
    control = median(one / other for one, _, other in parts)
    report.hold("control: messages/s of one quiet part against the other", control, "x", RATIO, at_least=True)
    ratio = median(middle / ((one + other) / 2) for one, middle, other in parts)
    report.hold("messages/s while the queue is looked at, against the quiet", ratio, "x", RATIO, at_least=True)


async def _found(looking: Observers) -> None:
    """Scrape until the queue is in it."""
    end = time.monotonic() + READY_TIMEOUT_S
    while await asyncio.to_thread(looking.scrape) < LINES_OF_A_QUEUE:
        if time.monotonic() > end:
            raise BenchmarkError("aioshm export does not tell of the queue")
        await asyncio.sleep(PERIOD_S / 10)


async def _scrape(looking: Observers, seconds: float) -> int:
    """Scrape every second for so long; return how many lines there were the last time."""
    lines, end = 0, time.monotonic() + seconds
    while True:
        lines = await asyncio.to_thread(looking.scrape)
        left = end - time.monotonic()
        await asyncio.sleep(max(0.0, min(PERIOD_S, left)))
        if left <= PERIOD_S:
            return lines


def _cpu_s(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def write(boss: Boss) -> None:
    """Role: send from each order until the next one."""
    async with MessageQueue(1, 1) as queue:
        boss.reply(queue.export_handle())
        await queue.wait_until_ready(READY_TIMEOUT_S)
        boss.reply("ready")
        count = 0
        while await boss.order() is not None:
            stop, first, began = asyncio.ensure_future(boss.order()), count, time.monotonic()
            while not stop.done():
                for message in SMALL_DICT.numbered(range(count, count + BATCH)):
                    await queue.enqueue(message)
                count += BATCH
            boss.reply((count - first) / (time.monotonic() - began))


async def read(boss: Boss, handle: Handle) -> None:
    """Role: read, and look at each message."""
    async with MessageQueue.create_from_handle(handle, 0) as queue:
        await queue.wait_until_ready(READY_TIMEOUT_S)
        boss.reply("ready")
        number = 0
        with contextlib.suppress(QueueClosed):
            while True:
                SMALL_DICT.check(await queue.dequeue(), number)
                number += 1
    await asyncio.Event().wait()


if __name__ == "__main__":
    sys.exit(main("observe", __doc__, run, repeat=20, seconds=1.0))
