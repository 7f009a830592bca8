"""What a busy queue does to another task on the reader's event loop: a ticker, once a millisecond.

The queue is either never empty, or it is empty again and again, because the reader is just quicker than the writer.
How late the ticker is depends on the machine too. So it is measured on an idle loop, and on one that is busy without
any queue, as well. And the time for which the kernel let the thread wait for a CPU (``/proc/thread-self/schedstat``,
see the kernel's sched-stats.rst) is taken off: what is left, the own lateness, is due to the loop and what runs on it.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from benchmarks.cast import Cast, on_stage
from benchmarks.crew import BenchmarkError, Boss, Crew, Hand
from benchmarks.harness import Settings, main, percentile, progress
from benchmarks.payloads import SMALL_DICT, Payload
from benchmarks.report import Promise, Report
from benchmarks.rivals import ReaderEnd, WriterEnd

PERIOD_S = 0.001
MAX_LATE_MS = 5.0

IDLE_LOOP = "idle loop"
BUSY_LOOP = "busy loop, no queue"
SATURATED = "saturated reader"
KEEPING_UP = "reader keeps up"
NO_QUEUE = "-"

MAX_GAP_S = 40e-6
"""A reader that keeps up gets its messages at intervals that grow up to this, from far shorter than a wake-up takes."""

_BATCH = 64  # messages between the sender's looks at whether it is over


@dataclass(frozen=True)
class Tick:
    """An order: run the ticker for so long, and reply with `Ticks`.

    Attributes:
        seconds: How long.
        beside: What else the loop does: one of the cases.
    """

    seconds: float
    beside: str


@dataclass(frozen=True)
class Ticks:
    """How late the ticker was, tick by tick.

    Attributes:
        late_ms: By the clock.
        own_ms: Without the time that the thread waited for a CPU.
        messages: What the reader received meanwhile.
    """

    late_ms: list[float]
    own_ms: list[float]
    messages: int


async def run(settings: Settings, report: Report) -> None:
    """Measure, and hold the result against the promise."""
    rivals = [rival for rival in settings.rivals if not rival.blocks]  # nothing else runs on a loop that blocks
    if not rivals:
        raise BenchmarkError("these contestants leave their loop no time for anything else")
    with Crew(settings.loop_factory) as crew:
        async with AsyncExitStack() as stack:
            casts = [
                await stack.enter_async_context(on_stage(crew, rival, read_beside_ticker, [SMALL_DICT]))
                for rival in rivals
            ]
            for repetition in range(settings.repeat):
                progress(f"repetition {repetition + 1} of {settings.repeat}")
                for case in [IDLE_LOOP, BUSY_LOOP]:
                    casts[0].hands[0].order(Tick(settings.seconds, case))
                    _note(report, case, NO_QUEUE, await _ticks(casts[0].hands[0]), settings.seconds)
                for case in [SATURATED, KEEPING_UP]:
                    for cast in casts:
                        ticks = await _ticks_while_sending(cast, case, settings.seconds)
                        _note(report, case, cast.name, ticks, settings.seconds)
    for case in [SATURATED, KEEPING_UP]:
        ours = report.find(case, "aioshm")
        if ours:
            report.promises.append(
                Promise(
                    f"own lateness of a 1 ms ticker, {case}, worst of all repetitions (at most {MAX_LATE_MS:g} ms)",
                    ours.worst("own_max_ms"),
                    "ms",
                    MAX_LATE_MS,
                )
            )


def _note(report: Report, case: str, contestant: str, ticks: Ticks, seconds: float) -> None:
    report.result(case, contestant).add(
        late_p50_ms=percentile(ticks.late_ms, 50),
        late_p99_ms=percentile(ticks.late_ms, 99),
        late_max_ms=max(ticks.late_ms),
        own_p99_ms=percentile(ticks.own_ms, 99),
        own_max_ms=max(ticks.own_ms),
        messages_per_s=ticks.messages / seconds,
    )


async def _ticks_while_sending(cast: Cast, case: str, seconds: float) -> Ticks:
    """Send while the ticker runs; not longer, or one that is starved would never finish."""
    hand, send = cast.hands[0], cast.senders[0].send
    hand.order(Tick(seconds, case))
    ends = time.perf_counter() + seconds
    number = 0
    while (left := ends - time.perf_counter()) > 0 and not hand.has_replied():
        gap = MAX_GAP_S * (1 - left / seconds) if case == KEEPING_UP else 0.0
        for _ in range(_BATCH):
            await send(SMALL_DICT.message(number))
            number += 1
            _pause(gap)
        await asyncio.sleep(0)
    await send(None)
    return await _ticks(hand)


def _pause(seconds: float) -> None:
    if seconds:
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            pass


async def _ticks(hand: Hand) -> Ticks:
    ticks = await hand.reply()
    assert isinstance(ticks, Ticks)
    return ticks


async def read_beside_ticker(
    boss: Boss, ends: Sequence[ReaderEnd], _back: Sequence[WriterEnd], payloads: Sequence[Payload]
) -> None:
    """Role: run the ticker beside whatever is asked for."""
    receiver = await ends[0].open()
    boss.reply("ready")
    messages = 0

    async def drain() -> None:
        nonlocal messages
        while (message := await receiver.receive()) is not None:
            payloads[0].check(message, messages)
            messages += 1

    while (order := await boss.order()) is not None:
        messages = 0
        ticker = asyncio.create_task(_tick(order.seconds))
        reading = asyncio.create_task(drain()) if order.beside in {SATURATED, KEEPING_UP} else None
        spinning = asyncio.create_task(_spin()) if order.beside == BUSY_LOOP else None
        late_ms, own_ms = await ticker
        boss.reply(Ticks(late_ms, own_ms, messages))
        if reading is not None:
            await reading
        if spinning is not None:
            spinning.cancel()
    await receiver.aclose()


async def _spin() -> None:
    while True:  # noqa: ASYNC110 - there is nothing to wait for
        await asyncio.sleep(0)


async def _tick(seconds: float) -> tuple[list[float], list[float]]:
    """Return how late each tick was, in milliseconds: by the clock, and without the time spent waiting for a CPU."""
    late_ms, own_ms = [], []
    with _RunQueue() as run_queue:
        ends = time.perf_counter() + seconds
        while (began := time.perf_counter()) < ends:
            waited_before = run_queue.waited_s()
            await asyncio.sleep(PERIOD_S)
            late = max(0.0, time.perf_counter() - began - PERIOD_S)
            waited = run_queue.waited_s() - waited_before
            late_ms.append(late * 1e3)
            own_ms.append(max(0.0, late - waited) * 1e3)
    return late_ms, own_ms


class _RunQueue:
    """Tells how long this thread has been runnable while others had the CPU. Always 0 where the kernel does not say."""

    def __enter__(self) -> _RunQueue:
        try:
            self._fd: int | None = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        except OSError:
            self._fd = None
        return self

    def __exit__(self, *_: object) -> None:
        if self._fd is not None:
            os.close(self._fd)

    def waited_s(self) -> float:
        """Return it, in seconds."""
        if self._fd is None:
            return 0.0
        return int(os.pread(self._fd, 100, 0).split()[1]) / 1e9


if __name__ == "__main__":
    sys.exit(main("fairness", __doc__, run, repeat=5, seconds=2.0))
