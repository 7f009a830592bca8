"""What it costs that readers come and go: one joins and another one is killed (SIGKILL) every 50 ms under full traffic.

One process writes as fast as it can, with a queue's defaults, and two read that, or one where there are two CPUs; in
turns, nobody comes or goes, or a new reader takes a vacant place and the one that has been there for longest is killed
as soon as the new one has a message. The newcomers are processes that wait for that, with everything imported, and
nothing run yet. How long one takes to join is from its ``create_from_handle`` to its first message; also without the
time that its thread waited for a CPU, or the writer's while this one slept, for there are more that run than CPUs: what
a newcomer takes where each has one. How long the writer stands still is the time
of the calls of its event loop that admit a reader, or learn of a death, in which the writer could not send between two
messages: with such time, and without. Where nobody comes or goes a timer of the same loop calls as often what takes as
long where nothing disturbs it, which is the control: how much longer that takes is no fault of readers. Every message
that a reader receives is checked to be the next one.

What places cost that nobody has is measured in one process, with both readers in turn: a CPU that other processes have
would make more of a difference than the places do.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

from aioshm import Handle, MessageQueue, Options, QueueClosed
from aioshm.queue.ends.writing import WritingEnd
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

LIFELINE_CALLS = ("_accept", "read", "_step")
"""The calls of a writer's loop in which readers are admitted and deaths are noticed; see `aioshm.lifeline.listener`."""
CONTROL_CALLS = 6
"""How many calls of the control there are in one period: about as many as there are of those."""


@dataclass
class Pause:
    """How long the writer stood still between two messages, and without the time that its thread waited for a CPU."""

    after: int
    took_us: float
    running_us: float


@dataclass(frozen=True)
class Sent:
    """What the writer did while it was asked to send.

    Attributes:
        messages_per_s: As it says.
        pauses: How long the calls lasted that admit readers, learn of deaths, or are the control.
        died: When each death was known, by pid.
    """

    messages_per_s: float
    pauses: list[Pause]
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
    pauses: dict[str, list[Pause]] = {CHURN: [], QUIET: []}
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
                writer.order(case)
                killed: dict[int, float] = {}
                if case == CHURN:
                    joined_ms += (joins := await _churn(fresh, readers, killed))
                else:
                    await asyncio.sleep(events * PERIOD_S)
                writer.order("stop")
                sent: Sent = await writer.reply()
                result = report.result(case, "aioshm", READERS)
                pauses[case] += sent.pauses
                still_us = [pause.running_us for pause in sent.pauses]
                result.add(
                    messages_per_s=sent.messages_per_s,
                    still_p50_us=percentile(still_us, 50),
                    still_p99_us=percentile(still_us, 99),
                    still_max_us=max(still_us),
                    still_with_waits_p99_us=percentile([pause.took_us for pause in sent.pauses], 99),
                )
                if case == CHURN:
                    noticed = [(sent.died[pid] - at) * 1e3 for pid, at in killed.items() if pid in sent.died]
                    result.add(
                        join_p50_ms=percentile([join.took_ms for join in joins], 50),
                        join_p99_ms=percentile([join.took_ms for join in joins], 99),
                        join_running_p50_ms=percentile([join.running_ms for join in joins], 50),
                        join_running_p99_ms=percentile([join.running_ms for join in joins], 99),
                        join_cpu_p50_ms=percentile([join.cpu_ms for join in joins], 50),
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
    still_us = [pause.running_us for pause in pauses[CHURN]]
    text = f"the writer stands still for a reader that comes or goes, p99 of {len(still_us)} times"
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
        assert isinstance(queue.end, WritingEnd)
        loop.sent, loop.may_send = message, queue.end.ring.free
        while (case := await boss.order()) is not None:
            stop = asyncio.ensure_future(boss.order())
            loop.pauses, first, began = [], count, time.monotonic()
            control = asyncio.ensure_future(_control()) if case == QUIET else None
            while not stop.done():
                for _ in range(BATCH):
                    message["n"] = count
                    await queue.enqueue(message)
                    count += 1
            rate = (count - first) / (time.monotonic() - began)
            await asyncio.sleep(2 * PERIOD_S)  # the last death is noticed
            if control is not None:
                control.cancel()
            boss.reply(Sent(rate, loop.pauses or [Pause(0, 0.0, 0.0)], died))
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


async def _control() -> None:
    """Let the loop call as often what takes about as long as a step of a reader's, and is none."""
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(PERIOD_S / CONTROL_CALLS)
        loop.call_soon(control)


def control() -> None:
    """Pass a descriptor through a new pair of sockets."""
    one, other = socket.socketpair()
    with one, other:
        socket.send_fds(one, [b"x" * 64], [one.fileno()])
        _, fds, _, _ = socket.recv_fds(other, 64, 1)
        os.close(fds[0])


class _Timed:
    """An event loop that notes how long the calls last in which readers come and go, between two messages."""

    sent: dict[str, Any]  # the latest message
    pauses: list[Pause]
    may_send: Callable[[], bool]
    run_queue: RunQueue | None = None

    def add_reader(self, fd: Any, callback: Callable[..., object], *args: Any) -> Any:
        """Watch a descriptor."""
        return super().add_reader(fd, self._watched(callback), *args)  # type: ignore[misc]

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Any = None) -> Any:
        """Call in the next turn."""
        return super().call_soon(self._watched(callback), *args, context=context)  # type: ignore[misc]

    def _watched(self, callback: Callable[..., object]) -> Callable[..., object]:
        if callback is not control and getattr(callback, "__name__", "") not in LIFELINE_CALLS:
            return callback
        return functools.partial(self._timed, callback)

    def _timed(self, callback: Callable[..., object], *args: Any) -> None:
        if self.run_queue is None:
            self.run_queue = RunQueue().__enter__()
        count, alone = self.sent["n"], not self.may_send()  # it waits for its readers to read, whoever comes or goes
        waited, began = self.run_queue.waited_s(), time.perf_counter()
        callback(*args)
        took = time.perf_counter() - began
        running = max(0.0, took - (self.run_queue.waited_s() - waited))
        if alone or not self.pauses or self.pauses[-1].after != count:
            self.pauses.append(Pause(count, 0.0, 0.0))
        self.pauses[-1].took_us += took * 1e6
        self.pauses[-1].running_us += running * 1e6


def timed_loop(factory: Callable[[], asyncio.AbstractEventLoop]) -> asyncio.AbstractEventLoop:
    """Return a loop of the kind that a factory makes, which keeps that note."""
    model = factory()
    model.close()
    note: dict[str, Any] = {"sent": {"n": 0}, "pauses": [], "may_send": bool}
    loop: asyncio.AbstractEventLoop = type("TimedLoop", (_Timed, type(model)), note)()
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
