"""What either end of a queue keeps of a million messages, and what its ring takes, which only ever has small ones.

What is kept is the growth of the process' memory, which should be none. A writer and a reader, in processes of their
own, are measured after a warm-up and then again and again while the messages pass; the growth is that of the largest
figure after the first. Resident memory (RSS) counts the pages of the ring that this end has touched, private memory
(USS) does not; those pages alone are what /proc/self/smaps has for the mappings of the ring, which has its default
sizes. How many messages pass does not depend on ``--seconds``.
"""

from __future__ import annotations

import gc
import re
import sys
import time
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import psutil

from benchmarks.contestants import CONTESTANTS
from benchmarks.framework.contest import Contest
from benchmarks.framework.harness import Settings, main, progress
from benchmarks.framework.loops import Order, Ports
from benchmarks.framework.report import Report
from benchmarks.framework.stage import Stage
from benchmarks.framework.workload import KIB, plain_bytes, small_dict

MESSAGES = 1_000_000
WARM_UP = 50_000
QUICK_MESSAGES = 2_000
QUICK_WARM_UP = 500
POINTS = 10
"""How often the memory is looked at after the warm-up."""

MAX_GROWTH_KIB = 1024
MAX_RING_KIB = 6 * 1024

SMAPS = Path("/proc/self/smaps")
RINGS = re.compile(r"^[0-9a-f]+-[0-9a-f]+ .*(?:/memfd:aioshm\b|/dev/shm/aioshm-)")
RESIDENT = re.compile(r"^Rss: +([0-9]+) kB$")

ENDS = ("aioshm writer", "aioshm reader")

CASES = [small_dict("pickle"), small_dict("msgpack"), plain_bytes(64)]


@dataclass(frozen=True)
class Memory:
    """What a process has, in bytes.

    Attributes:
        rss: Resident memory.
        uss: What of it is private.
        ring: What of it is the ring's; None where the system does not tell.
    """

    rss: int
    uss: int
    ring: int | None


async def run(settings: Settings, report: Report) -> None:
    """Measure, and hold the results against the promises."""
    messages, warm_up = (QUICK_MESSAGES, QUICK_WARM_UP) if settings.quick else (MESSAGES, WARM_UP)
    contestants = [one for one in CONTESTANTS if one.name == "aioshm"]
    for repetition in range(settings.repeat):
        for work in CASES:
            name = f"{work.name.partition(',')[0]}, {work.codec}"
            progress(f"{name}, repetition {repetition + 1} of {settings.repeat}")
            async with Contest(settings, report, contestants, [work]) as contest:
                await contest.each(partial(_measure, report, name, messages, warm_up))
    for end in ENDS:
        growth = [r.worst("rss_growth_kib") for r in report.results if r.contestant == end]
        what = f"over {messages:,} messages, most of all cases and repetitions"
        text = f"growth of the {end}'s resident memory {what}"
        report.hold(text, max(growth, default=None), "KiB", MAX_GROWTH_KIB)
        ring = [r.worst("ring_kib") for r in report.results if r.contestant == end and "ring_kib" in r.figures]
        report.hold(f"what the ring takes of the {end}'s memory", max(ring, default=None), "KiB", MAX_RING_KIB)


async def _measure(report: Report, case: str, messages: int, warm_up: int, stage: Stage) -> None:
    before = await _memory(stage, 0, warm_up)
    after = []
    began = time.perf_counter()
    for first, end in pairwise(warm_up + messages * point // POINTS for point in range(POINTS + 1)):
        after.append(await _memory(stage, first, end))
    seconds = time.perf_counter() - began
    for name, at_first, found in zip(ENDS, before, zip(*after, strict=True), strict=True):
        report.result(case, name).add(
            rss_growth_kib=max(memory.rss - at_first.rss for memory in found) / KIB,
            private_growth_kib=max(memory.uss - at_first.uss for memory in found) / KIB,
            rss_at_first_kib=at_first.rss / KIB,
            rss_at_last_kib=found[-1].rss / KIB,
            messages_per_s=messages / seconds,
            **({} if found[-1].ring is None else {"ring_kib": found[-1].ring / KIB}),
        )


async def _memory(stage: Stage, first: int, end: int) -> tuple[Memory, Memory]:
    """Let the messages of these numbers pass; return what the writer and the reader have then."""
    written, [read] = await stage.perform(Order(send_and_tell, (first, end)), Order(receive_and_tell, (first, end)))
    return written, read


async def send_and_tell(ports: Ports, first: int, end: int) -> Memory:
    """Send the messages of these numbers; return this process' memory."""
    send = ports.send
    for message in ports.work.numbered(range(first, end)):
        await send(message)
    return own_memory()


async def receive_and_tell(ports: Ports, first: int, end: int) -> Memory:
    """Receive the messages of these numbers; return this process' memory."""
    receive, check = ports.receive, ports.work.check
    for number in range(first, end):
        check(await receive(), number)
    return own_memory()


def own_memory() -> Memory:
    """Return what this process has, without what is garbage already."""
    gc.collect()
    found = psutil.Process().memory_full_info()
    return Memory(found.rss, found.uss, ring_memory())


def ring_memory() -> int | None:
    """Return how much of this process' memory is the rings' that it has mapped; None where the system does not tell."""
    try:
        lines = SMAPS.read_text().splitlines()
    except OSError:
        return None
    total, in_ring = 0, False
    for line in lines:
        if not line[:1].isupper():  # where a mapping begins
            in_ring = RINGS.match(line) is not None
        elif in_ring and (resident := RESIDENT.match(line)) is not None:
            total += int(resident[1]) * KIB
    return total


if __name__ == "__main__":
    sys.exit(main("memory", __doc__, run, repeat=1, seconds=1.0))
