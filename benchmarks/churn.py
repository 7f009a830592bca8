"""Readers that come and go: one joins and another one is killed (SIGKILL) every 50 ms under full traffic.

One process writes as fast as it can, with a queue's defaults. Two processes read, or one where there are two CPUs. A
new reader takes a vacant rank, and the oldest reader is killed as soon as the new one has a message. The newcomers are
spawned processes that have imported everything, and have run nothing yet. Joining lasts from ``create_from_handle`` to
the first message. The writer's pause is the time that its event loop spends, between two messages, in calls that admit
readers or notice deaths; time in which its thread waits for a CPU does not count. Every message that a reader receives
is checked to be the next one.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from aioshm import Handle, MessageQueue, Options, QueueClosed
from aioshm.process.placement import usable_cpus
from aioshm.queue.ends.writer import Writer
from benchmarks.framework.crew import BenchmarkError, Boss, Crew, Hand
from benchmarks.framework.harness import Settings, main, progress
from benchmarks.framework.report import Report, percentile
from benchmarks.framework.workload import SMALL_DICT

PERIOD_S = 0.05
LEAST_EVENTS = 3
READERS = max(1, min(2, usable_cpus() - 1))  # with the writer, as many busy processes as there are CPUs
PLACES = 4
BATCH = 64
READY_TIMEOUT_S = 60.0

CASE = f"one comes and one is killed every {PERIOD_S * 1e3:g} ms"
JOIN_MS = 10.0
PAUSE_US = 500.0

LIFELINE_CALLS = ("_accept", "read", "_step")
"""The calls of a writer's loop that admit readers and notice deaths; see `aioshm.lifeline.listener`."""


@dataclass
class Pause:
    """How long the writer's calls took between two messages."""

    after: int
    took_us: float = 0.0


@dataclass(frozen=True)
class Sent:
    """The writer's figures of one repetition."""

    messages_per_s: float
    pauses_us: list[float]  # of calls that admit readers and notice deaths
    died: dict[int, float]  # when each death was known, by pid


async def run(settings: Settings, report: Report) -> None:
    """Measure, and hold the results against the promises."""
    events = max(LEAST_EVENTS, int(settings.seconds / PERIOD_S))
    joined_ms: list[float] = []
    pauses_us: list[float] = []
    with Crew(functools.partial(timed_loop, settings.loop_factory)) as crew:
        writer = crew.start("writer", write)
        handle = await writer.reply()
        readers = [crew.start(f"first reader {number}", read, handle) for number in range(READERS)]
        for hand in readers:
            await hand.reply()
            hand.order("join")
        await writer.reply()
        for hand in readers:
            await hand.reply()
        for number in range(settings.repeat):
            progress(f"{number + 1} of {settings.repeat}: {events} readers come and go")
            fresh = [crew.start(f"reader {number}.{n}", read, handle, spawned=True) for n in range(events)]
            for hand in fresh:
                await hand.reply()
            writer.order("send")
            killed: dict[int, float] = {}
            joins = await _churn(fresh, readers, killed)
            writer.order("stop")
            sent: Sent = await writer.reply()
            joined_ms += joins
            pauses_us += sent.pauses_us
            noticed = [(sent.died[pid] - at) * 1e3 for pid, at in killed.items() if pid in sent.died]
            report.result(CASE, "aioshm", READERS).add(
                messages_per_s=sent.messages_per_s,
                join_p50_ms=percentile(joins, 50),
                join_p99_ms=percentile(joins, 99),
                pause_p50_us=percentile(sent.pauses_us, 50),
                pause_p99_us=percentile(sent.pauses_us, 99),
                noticed_p99_ms=percentile(noticed, 99),
            )
        for hand in readers:
            await _check(hand)
    report.hold(f"joining, p99 of {len(joined_ms)}", percentile(joined_ms, 99), "ms", JOIN_MS)
    text = f"the writer's pause for a reader that comes or goes, p99 of {len(pauses_us)}"
    report.hold(text, percentile(pauses_us, 99), "us", PAUSE_US)


async def _churn(fresh: list[Hand], readers: list[Hand], killed: dict[int, float]) -> list[float]:
    """Order each fresh reader to join, then kill the oldest; return the milliseconds that joining took."""
    joined_ms, due = [], time.monotonic()
    for hand in fresh:
        due += PERIOD_S
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        hand.order("join")
        joined_ms.append(await hand.reply())
        readers.append(hand)
        oldest = readers.pop(0)
        await _check(oldest)
        assert oldest.process.pid is not None
        killed[oldest.process.pid] = time.monotonic()
        oldest.process.kill()
    return joined_ms


async def _check(hand: Hand) -> None:
    """Raise the failure of a reader, which replies to nothing otherwise."""
    if hand.has_replied():
        await hand.reply()
        raise BenchmarkError(f"{hand.process.name} has ended by itself")


async def write(boss: Boss) -> None:
    """Role: send from each order until the next one."""
    logging.getLogger("aioshm.queue").setLevel(logging.ERROR)  # each death is a warning
    options = Options(on_reader_death="evict", max_readers=PLACES)
    async with MessageQueue(READERS, READERS, options=options) as queue:
        boss.reply(queue.export_handle())
        await queue.wait_until_ready(READY_TIMEOUT_S)
        loop: Any = asyncio.get_running_loop()
        died: dict[int, float] = {}
        watching = asyncio.ensure_future(_watch(queue, died))
        message: dict[str, Any] = SMALL_DICT.make()
        await queue.enqueue(message)
        boss.reply("ready")
        count = 1
        assert isinstance(queue.end, Writer)
        loop.sent, loop.may_send = message, queue.end.ring.free
        while await boss.order() is not None:
            stop = asyncio.ensure_future(boss.order())
            loop.pauses, first, began = [], count, time.monotonic()
            while not stop.done():
                for _ in range(BATCH):
                    message["n"] = count
                    await queue.enqueue(message)
                    count += 1
            rate = (count - first) / (time.monotonic() - began)
            await asyncio.sleep(2 * PERIOD_S)  # the last death is noticed
            boss.reply(Sent(rate, [pause.took_us for pause in loop.pauses] or [0.0], died))
        watching.cancel()


async def _watch(queue: MessageQueue, died: dict[int, float]) -> None:
    async for change in queue.membership():
        if type(change).__name__ == "ReaderDied":
            died[change.pid] = time.monotonic()  # type: ignore[union-attr]


async def read(boss: Boss, handle: Handle) -> None:
    """Role: join when that is ordered, answer how many milliseconds it took, and read."""
    boss.reply("imported")
    await boss.order()
    try:
        began = time.perf_counter()
        queue = MessageQueue.create_from_handle(handle)
        number = (await queue.dequeue())["n"]
        boss.reply((time.perf_counter() - began) * 1e3)
        async with queue:
            async for message in queue:
                number += 1
                if message["n"] != number:
                    raise BenchmarkError(f"message {message['n']} came, where {number} was to be next")
    except QueueClosed:
        pass
    await asyncio.Event().wait()


class _Timed:
    """An event loop that notes how long the calls last in which readers come and go, between two messages."""

    sent: dict[str, Any]  # the latest message
    pauses: list[Pause]
    may_send: Callable[[], bool]

    def add_reader(self, fd: Any, callback: Callable[..., object], *args: Any) -> Any:
        """Watch a descriptor."""
        return super().add_reader(fd, self._watched(callback), *args)  # type: ignore[misc]

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Any = None) -> Any:
        """Call in the next turn."""
        return super().call_soon(self._watched(callback), *args, context=context)  # type: ignore[misc]

    def _watched(self, callback: Callable[..., object]) -> Callable[..., object]:
        if getattr(callback, "__name__", "") not in LIFELINE_CALLS:
            return callback
        return functools.partial(self._timed, callback)

    def _timed(self, callback: Callable[..., object], *args: Any) -> None:
        # While the ring is full the writer waits for its readers anyway: then each call is a pause of its own.
        count, alone = self.sent["n"], not self.may_send()
        waited, began = waited_for_cpu_s(), time.perf_counter()
        callback(*args)
        took = time.perf_counter() - began
        if alone or not self.pauses or self.pauses[-1].after != count:
            self.pauses.append(Pause(count))
        self.pauses[-1].took_us += max(0.0, took - (waited_for_cpu_s() - waited)) * 1e6


def timed_loop(factory: Callable[[], asyncio.AbstractEventLoop]) -> asyncio.AbstractEventLoop:
    """Return a loop of the kind that a factory makes, which notes those calls."""
    model = factory()
    model.close()
    note: dict[str, Any] = {"sent": {"n": 0}, "pauses": [], "may_send": bool}
    loop: asyncio.AbstractEventLoop = type("TimedLoop", (_Timed, type(model)), note)()
    return loop


@functools.cache
def _schedstat() -> int | None:
    try:
        return os.open("/proc/thread-self/schedstat", os.O_RDONLY)
    except OSError:
        return None


def waited_for_cpu_s() -> float:
    """Return how long this thread was runnable while others had the CPU; 0 where the kernel does not count it."""
    fd = _schedstat()
    return 0.0 if fd is None else int(os.pread(fd, 100, 0).split()[1]) / 1e9


if __name__ == "__main__":
    sys.exit(main("churn", __doc__, run, repeat=3, seconds=4.0))
