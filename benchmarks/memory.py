"""What either end of a queue keeps of a million messages: the growth of its process' memory, which should be none.

A writer and a reader, in processes of their own, are measured after a warm-up and then again and again while the
messages pass; the growth is that of the largest figure after the first. Resident memory (RSS) counts the pages of the
ring that this end has touched, private memory (USS) does not. How many messages pass does not depend on ``--seconds``.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from dataclasses import dataclass
from itertools import pairwise

import psutil

from aioshm import Handle, MessageQueue
from aioshm.codec import get_codec
from benchmarks.crew import Boss, Crew, Hand
from benchmarks.harness import Settings, main, progress
from benchmarks.payloads import KIB, SHORT_BYTES, SMALL_DICT, Payload
from benchmarks.report import Promise, Report

MESSAGES = 1_000_000
WARM_UP = 50_000
QUICK_MESSAGES = 2_000
QUICK_WARM_UP = 500
POINTS = 10
"""How often the memory is looked at after the warm-up."""

MAX_GROWTH_KIB = 1024

WRITER, READER = "aioshm writer", "aioshm reader"

READY_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Case:
    """What is sent, and how it is encoded."""

    payload: Payload
    codec: str

    @property
    def name(self) -> str:
        return f"{self.payload.name}, {self.codec}"


CASES = [Case(SMALL_DICT, "pickle"), Case(SMALL_DICT, "msgpack"), Case(SHORT_BYTES, "raw")]


@dataclass(frozen=True)
class Pass:
    """An order: let the messages of these numbers pass, and reply with `Memory`."""

    first: int
    end: int


@dataclass(frozen=True)
class Memory:
    """What a process has, in bytes."""

    rss: int
    uss: int


async def run(settings: Settings, report: Report) -> None:
    """Measure, and hold the results against the promises."""
    cases = [case for case in CASES if _is_known(case.codec)]
    for repetition in range(settings.repeat):
        for case in cases:
            progress(f"{case.name}, repetition {repetition + 1} of {settings.repeat}")
            with Crew(settings.loop_factory) as crew:
                await _run_case(crew, case, report, quick=settings.quick)
    for end in (WRITER, READER):
        growth = max(report.result(case.name, end).worst("rss_growth_kib") for case in cases)
        report.promises.append(
            Promise(
                f"growth of the {end}'s resident memory over {QUICK_MESSAGES if settings.quick else MESSAGES:,} "
                f"messages, most of all cases and repetitions (at most {MAX_GROWTH_KIB} KiB)",
                growth,
                "KiB",
                MAX_GROWTH_KIB,
            )
        )


async def _run_case(crew: Crew, case: Case, report: Report, *, quick: bool) -> None:
    messages, warm_up = (QUICK_MESSAGES, QUICK_WARM_UP) if quick else (MESSAGES, WARM_UP)
    hands = {WRITER: crew.start(WRITER, write, case), READER: crew.start(READER, read, case)}
    hands[READER].order(await hands[WRITER].reply())  # the handle
    await _memory(hands, None)
    before = await _memory(hands, Pass(0, warm_up))
    after: dict[str, list[Memory]] = {end: [] for end in hands}
    began = time.perf_counter()
    for first, end in pairwise(warm_up + messages * point // POINTS for point in range(POINTS + 1)):
        for name, memory in (await _memory(hands, Pass(first, end))).items():
            after[name].append(memory)
    seconds = time.perf_counter() - began
    await crew.dismiss(list(hands.values()))
    for name, found in after.items():
        report.result(case.name, name).add(
            rss_growth_kib=max(memory.rss - before[name].rss for memory in found) / KIB,
            private_growth_kib=max(memory.uss - before[name].uss for memory in found) / KIB,
            rss_at_first_kib=before[name].rss / KIB,
            rss_at_last_kib=found[-1].rss / KIB,
            messages_per_s=messages / seconds,
        )


async def _memory(hands: dict[str, Hand], order: Pass | None) -> dict[str, Memory]:
    """Give an order to both ends, unless they have theirs, and return what both reply."""
    if order is not None:
        for hand in hands.values():
            hand.order(order)
    return dict(zip(hands, await asyncio.gather(*(hand.reply() for hand in hands.values())), strict=True))


def _is_known(codec: str) -> bool:
    try:
        get_codec(codec)
    except (ValueError, ImportError):
        return False
    return True


def _own_memory() -> Memory:
    gc.collect()  # what is garbage already is not kept
    found = psutil.Process().memory_full_info()
    return Memory(found.rss, found.uss)


async def write(boss: Boss, case: Case) -> None:
    """Role: send what is ordered, and reply with this process' memory."""
    payload = case.payload
    queue = MessageQueue(1, 1, max_chunk_bytes=payload.chunk_bytes, max_chunks=payload.slots, codec=case.codec)
    boss.reply(queue.export_handle())
    await queue.wait_until_ready(READY_TIMEOUT_S)
    boss.reply(_own_memory())
    while (order := await boss.order()) is not None:
        for number in range(order.first, order.end):
            await queue.enqueue(payload.message(number))
        boss.reply(_own_memory())
    await queue.aclose()


async def read(boss: Boss, case: Case) -> None:
    """Role: receive what is ordered, and reply with this process' memory."""
    handle = await boss.order()
    assert isinstance(handle, Handle)
    queue = MessageQueue.create_from_handle(handle, 0)
    await queue.wait_until_ready(READY_TIMEOUT_S)
    boss.reply(_own_memory())
    while (order := await boss.order()) is not None:
        for number in range(order.first, order.end):
            case.payload.check(await queue.dequeue(), number)
        boss.reply(_own_memory())
    await queue.aclose()


if __name__ == "__main__":
    sys.exit(main("memory", __doc__, run, repeat=1, seconds=1.0))
