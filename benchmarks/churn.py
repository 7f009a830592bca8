"""What it costs that readers come and go: one joins and another one is killed (SIGKILL) every 50 ms under full traffic.

One process writes as fast as it can, with a queue's defaults, and two read that, or one where there are two CPUs; in
turns, nobody comes or goes, or a new reader takes a vacant place and the one that has been there for longest is killed
as soon as the new one has a message. The newcomers are processes that wait for that, with everything imported, and
nothing run yet. How long one takes to join is from its ``create_from_handle`` to its first message; also without the
time that its thread waited for a CPU, or the writer's while this one slept, for there are more that run than CPUs: what
a newcomer takes where each has one. How long the writer stands still is the time
of each call of its event loop that admits a reader, or learns of a death, without such time. Every message that a
reader receives is checked to be the next one.

What places cost that nobody has is measured in one process, with both readers in turn: a CPU that other processes have
would make more of a difference than the places do.
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
from statistics import median
from typing import Any

from aioshm import Handle, MessageQueue, Options, QueueClosed
from aioshm.wait.cpus import usable_cpus
from benchmarks.framework.crew import BenchmarkError, Boss, Crew, Hand
from benchmarks.framework.harness import Settings, main, progress
from benchmarks.framework.report import Report, percentile
from benchmarks.framework.run_queue import RunQueue
from benchmarks.framework.workload import SMALL_DICT

PERIOD_S = 0.05
LEAST_EVENTS = 3
READERS = max(1, min(2, usable_cpus() - 1))  # with the writer, as many busy processes as there are CPUs
PLACES = 4
SEATED = 2  # readers of the ring that has places for many
MANY_PLACES = 256
BATCH = 64
TURN_MESSAGES = 2048
READY_TIMEOUT_S = 60.0

QUIET, CHURN = "nobody comes or goes", f"one comes and one is killed every {PERIOD_S * 1e3:g} ms"
RATIO = 0.9
JOIN_MS = 5.0
STILL_US = 200.0
PLACES_RATIO = 1.03

LIFELINE_CALLS = ("_accept", "read")
"""The calls of a writer's loop in which readers are admitted and deaths are noticed; see `aioshm.lifeline.listener`."""


@dataclass(frozen=True)
class Sent:
    """What the writer did while it was asked to send.

    Attributes:
        messages_per_s: As it says.
        still_us: How long each call lasted that admitted a reader or learned of a death.
        died: When each death was known, by pid.
    """

    messages_per_s: float
    still_us: list[float]
    died: dict[int, float]


@dataclass(frozen=True)
class Joined:
    """How long a reader took to join, all in all, without the waits for a CPU, and how much CPU time that was."""

    took_ms: float
    running_ms: float
    cpu_ms: float


async def run(settings: Settings, report: Report) -> None:
    """Measure with churn and without, and with many places and few."""
    messages = TURN_MESSAGES // 8 if settings.quick else TURN_MESSAGES
    joined_ms: list[Joined] = []
    still_us: list[float] = []
    with Crew(functools.partial(timed_loop, settings.loop_factory)) as crew:
        writer = crew.start("writer", write)
        handle, pid = await writer.reply()
        readers = [crew.start(f"first reader {number}", read, handle, pid) for number in range(READERS)]
        for hand in readers:
            await hand.reply()
            hand.order("join")
        await writer.reply()
        for hand in readers:
            await _joined(hand)
        for number in range(settings.repeat):
            events = max(LEAST_EVENTS, int(settings.seconds / PERIOD_S))
            fresh = [crew.start(f"reader {number}.{n}", read, handle, pid, spawned=True) for n in range(events)]
            for hand in fresh:
                await hand.reply()
            for case in (QUIET, CHURN) if number % 2 else (CHURN, QUIET):
                progress(f"{number + 1} of {settings.repeat}: {case}")
                writer.order("go")
                killed: dict[int, float] = {}
                if case == CHURN:
                    joined_ms += (joins := await _churn(fresh, readers, killed))
                else:
                    await asyncio.sleep(events * PERIOD_S)
                writer.order("stop")
                sent: Sent = await writer.reply()
                result = report.result(case, "aioshm", READERS)
                result.add(messages_per_s=sent.messages_per_s)
                if case == CHURN:
                    still_us += sent.still_us
                    noticed = [(sent.died[pid] - at) * 1e3 for pid, at in killed.items() if pid in sent.died]
                    result.add(
                        join_p50_ms=percentile([join.took_ms for join in joins], 50),
                        join_p99_ms=percentile([join.took_ms for join in joins], 99),
                        join_running_p50_ms=percentile([join.running_ms for join in joins], 50),
                        join_running_p99_ms=percentile([join.running_ms for join in joins], 99),
                        join_cpu_p50_ms=percentile([join.cpu_ms for join in joins], 50),
                        still_p50_us=percentile(sent.still_us, 50),
                        still_p99_us=percentile(sent.still_us, 99),
                        still_max_us=max(sent.still_us),
                        noticed_p50_ms=percentile(noticed, 50),
                        noticed_p99_ms=percentile(noticed, 99),
                    )
        for hand in readers:
            await _check(hand)
    with_churn, without = (report.result(case, "aioshm", READERS).figures["messages_per_s"] for case in (CHURN, QUIET))
    ratio = median(one / other for one, other in zip(with_churn, without, strict=True))
    report.hold("messages/s while readers come and go, against the same without", ratio, "x", RATIO, at_least=True)
    took_ms = percentile([join.took_ms for join in joined_ms], 99)
    report.hold(f"joining, p99 of {len(joined_ms)}", took_ms, "ms", JOIN_MS)
    running_ms = percentile([join.running_ms for join in joined_ms], 99)
    report.hold("the same without waits for a CPU", running_ms, "ms", JOIN_MS)
    text = f"the writer stands still for a reader that comes or goes, p99 of {len(still_us)} calls"
    report.hold(text, percentile(still_us, 99), "us", STILL_US)
    await _compare_places(settings, report, messages)


# Churn


async def _churn(fresh: list[Hand], readers: list[Hand], killed: dict[int, float]) -> list[Joined]:
    """Let each of the fresh ones join, and kill the oldest then; return how long they took."""
    joined_ms, due = [], time.monotonic()
    for hand in fresh:
        due += PERIOD_S
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        hand.order("join")
        joined_ms.append(await _joined(hand))
        readers.append(hand)
        oldest = readers.pop(0)
        await _check(oldest)
        assert oldest.process.pid is not None
        killed[oldest.process.pid] = time.monotonic()
        oldest.process.kill()
    return joined_ms


async def _joined(hand: Hand) -> Joined:
    joined: Joined = await hand.reply()
    return joined


async def _check(hand: Hand) -> None:
    """Raise what has gone wrong in a reader, which says nothing otherwise."""
    if hand.has_replied():
        await hand.reply()
        raise BenchmarkError(f"{hand.process.name} has ended by itself")


async def write(boss: Boss) -> None:
    """Role: send from each order until the next one."""
    logging.getLogger("aioshm.queue").setLevel(logging.ERROR)  # each death is a warning
    options = Options(on_reader_death="evict", max_readers=PLACES)
    async with MessageQueue(READERS, READERS, options=options) as queue:
        boss.reply((queue.export_handle(), os.getpid()))
        await queue.wait_until_ready(READY_TIMEOUT_S)
        loop: Any = asyncio.get_running_loop()
        died: dict[int, float] = {}
        watching = asyncio.ensure_future(_watch(queue, died))
        message: dict[str, Any] = {"n": 0, "l": list(range(16)), "a": "some text", "b": 1.5}
        await queue.enqueue(message)
        boss.reply("ready")
        count = 1
        while await boss.order() is not None:
            stop = asyncio.ensure_future(boss.order())
            loop.took_us, first, began = [], count, time.monotonic()
            while not stop.done():
                for _ in range(BATCH):
                    message["n"] = count
                    await queue.enqueue(message)
                    count += 1
            rate = (count - first) / (time.monotonic() - began)
            await asyncio.sleep(2 * PERIOD_S)  # the last death is noticed
            boss.reply(Sent(rate, loop.took_us or [0.0], died))
        watching.cancel()


async def _watch(queue: MessageQueue, died: dict[int, float]) -> None:
    async for change in queue.membership():
        if type(change).__name__ == "ReaderDied":
            died[change.pid] = time.monotonic()  # type: ignore[union-attr]


async def read(boss: Boss, handle: Handle, writer_pid: int) -> None:
    """Role: join when that is ordered, say how long it took, and read."""
    boss.reply("imported")
    await boss.order()
    try:
        with RunQueue() as here, RunQueue(writer_pid) as there:
            waited, kept, cpu, began = here.waited_s(), there.waited_s(), time.thread_time(), time.perf_counter()
            queue = MessageQueue.create_from_handle(handle)
            number = (await queue.dequeue())["n"]
            took, cpu = time.perf_counter() - began, time.thread_time() - cpu
            waited, kept = here.waited_s() - waited, there.waited_s() - kept
            running = took - waited - min(kept, max(0.0, took - waited - cpu))
            boss.reply(Joined(took * 1e3, running * 1e3, cpu * 1e3))
        async with queue:
            async for message in queue:
                number += 1
                if message["n"] != number:
                    raise BenchmarkError(f"message {message['n']} came, where {number} was to be next")
    except QueueClosed:
        pass
    await asyncio.Event().wait()


class _Timed:
    """An event loop that notes how long calls last in which readers come and go."""

    took_us: list[float]

    def add_reader(self, fd: Any, callback: Callable[..., object], *args: Any) -> Any:
        """Watch a descriptor."""
        if getattr(callback, "__name__", "") in LIFELINE_CALLS:
            callback = functools.partial(self._timed, callback)
        return super().add_reader(fd, callback, *args)  # type: ignore[misc]

    def _timed(self, callback: Callable[..., object], *args: Any) -> None:
        with RunQueue() as run_queue:
            waited, began = run_queue.waited_s(), time.perf_counter()
            callback(*args)
            took = time.perf_counter() - began
            self.took_us.append(max(0.0, took - (run_queue.waited_s() - waited)) * 1e6)


def timed_loop(factory: Callable[[], asyncio.AbstractEventLoop]) -> asyncio.AbstractEventLoop:
    """Return a loop of the kind that a factory makes, which keeps that note."""
    model = factory()
    model.close()
    loop: asyncio.AbstractEventLoop = type("TimedLoop", (_Timed, type(model)), {"took_us": []})()
    return loop


# Places that nobody has


async def _compare_places(settings: Settings, report: Report, messages: int) -> None:
    case = f"{SEATED} readers in one process"
    turns = 3 if settings.quick else max(20, int(20 * settings.repeat * settings.seconds))
    progress(f"{case}: {turns} turns with {SEATED} and with {MANY_PLACES} places")
    names = {SEATED: f"{SEATED} places", MANY_PLACES: f"{MANY_PLACES} places"}
    queues = {places: await _queue_of(places) for places in names}
    took: dict[int, list[float]] = {places: [] for places in names}
    try:
        for turn in range(turns):
            for places in sorted(names, reverse=bool(turn % 2)):
                took[places].append(await _pass(*queues[places], messages))
    finally:
        for writer, readers in queues.values():
            for end in (*readers, writer):
                await end.aclose()
    for places, name in names.items():
        report.result(case, name, SEATED).add(us_per_message=median(took[places]))
    ratio = median(many / few for many, few in zip(took[MANY_PLACES], took[SEATED], strict=True))
    text = f"time per message with {MANY_PLACES} places and {SEATED} readers, against {SEATED} places"
    report.hold(text, ratio, "x", PLACES_RATIO)


async def _queue_of(places: int) -> tuple[MessageQueue, list[MessageQueue]]:
    writer = MessageQueue(SEATED, SEATED, options=Options(max_readers=places))
    readers = [MessageQueue.create_from_handle(writer.export_handle()) for _ in range(SEATED)]
    await asyncio.gather(*(end.wait_until_ready(READY_TIMEOUT_S) for end in (writer, *readers)))
    return writer, readers


async def _pass(writer: MessageQueue, readers: list[MessageQueue], messages: int) -> float:
    """Return how many microseconds a message takes: sending it, and receiving it twice."""
    began = time.perf_counter()
    for message in SMALL_DICT.numbered(range(messages)):
        writer.enqueue_nowait(message)
    for reader in readers:
        for number in range(messages):
            SMALL_DICT.check(reader.dequeue_nowait(), number)
    took = time.perf_counter() - began
    await asyncio.sleep(0)
    return took / messages * 1e6


if __name__ == "__main__":
    sys.exit(main("churn", __doc__, run, repeat=3, seconds=4.0))
