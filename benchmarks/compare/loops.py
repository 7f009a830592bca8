"""The measuring loops, each written twice: for contestants that are awaited, and for those that are not.

What they do themselves for a message is a store and two comparisons, so that they measure the contestant.
"""

from __future__ import annotations

import asyncio
import gc
import random
import resource
import time
from dataclasses import dataclass
from typing import Any

from benchmarks.compare.contestant import Port
from benchmarks.compare.workload import Workload

JITTER = 0.02
"""The standard deviation of a cadence's gaps, as a share of the period."""

SPIN_S = 0.0003
"""How long before a message is due its sender stops sleeping: longer than a sleep may take too long."""

TAIL = 71
"""What a tensor's last element is."""


@dataclass(frozen=True)
class Order:
    """What a process shall do next.

    Attributes:
        what: ``"send"``, ``"read"``, ``"ask"``, ``"answer"``, ``"tick"`` or ``"listen"``.
        warm_up: Messages before the clock starts.
        count: Messages by the clock.
        period_s: Between the messages of ``"tick"``.
    """

    what: str
    warm_up: int
    count: int
    period_s: float = 0.0


@dataclass(frozen=True)
class Heard:
    """What one listener at a cadence found.

    Attributes:
        late_us: How long after it was sent each message was there.
        cpu_percent: Of a core, by the whole process from the first of these messages to the last.
    """

    late_us: list[float]
    cpu_percent: float


def obey(order: Order, workload: Workload, out: Port | None, back: Port | None) -> Any:
    """Do it, and return the answer.

    Args:
        order: What to do.
        workload: What is sent.
        out: The end that sends, if this process has one.
        back: The end that receives, if this process has one.
    """
    gc.collect()
    gc.freeze()
    if order.what in {"send", "tick"}:
        sending = _Sending(order, workload, _there(out))
        return sending.stream() if order.what == "send" else sending.tick()
    if order.what in {"read", "listen"}:
        receiving = _Receiving(order, workload, _there(back))
        return receiving.read() if order.what == "read" else receiving.listen()
    trips = _RoundTrips(order, workload, _there(out), _there(back))
    return trips.ask() if order.what == "ask" else trips.answer()


async def obey_awaited(order: Order, workload: Workload, out: Port | None, back: Port | None) -> Any:
    """Do as `obey`, with a contestant that is awaited."""
    gc.collect()
    gc.freeze()
    if order.what in {"send", "tick"}:
        sending = _Sending(order, workload, _there(out))
        return await (sending.stream_awaited() if order.what == "send" else sending.tick_awaited())
    if order.what in {"read", "listen"}:
        receiving = _Receiving(order, workload, _there(back))
        return await (receiving.read_awaited() if order.what == "read" else receiving.listen_awaited())
    trips = _RoundTrips(order, workload, _there(out), _there(back))
    return await (trips.ask_awaited() if order.what == "ask" else trips.answer_awaited())


def _there(port: Port | None) -> Port:
    assert port is not None
    return port


class _Sending:
    def __init__(self, order: Order, workload: Workload, port: Port) -> None:
        self._order, self._workload, self._send = order, workload, port.call

    def stream(self) -> None:
        send, message, key, mask = self._send, self._workload.make(), self._workload.key, self._workload.mask
        for number in range(self._order.warm_up + self._order.count):
            message[key] = number & mask
            send(message)

    async def stream_awaited(self) -> None:
        send, message, key, mask = self._send, self._workload.make(), self._workload.key, self._workload.mask
        for number in range(self._order.warm_up + self._order.count):
            message[key] = number & mask
            await send(message)

    def tick(self) -> None:
        send, message, key = self._send, self._workload.make(), self._workload.key
        for due in self._due():
            _sleep_until(due)
            message[key] = time.monotonic_ns()
            send(message)

    async def tick_awaited(self) -> None:
        send, message, key = self._send, self._workload.make(), self._workload.key
        for due in self._due():
            await asyncio.sleep(0)  # whatever its loop has still to do for the last message
            _sleep_until(due)
            message[key] = time.monotonic_ns()
            await send(message)

    def _due(self) -> list[float]:
        order, rng = self._order, random.Random(self._order.count)
        due, now = [], time.perf_counter() + 0.05
        for _ in range(order.warm_up + order.count):
            now += max(0.0, rng.gauss(order.period_s, JITTER * order.period_s))
            due.append(now)
        return due


class _Receiving:
    def __init__(self, order: Order, workload: Workload, port: Port) -> None:
        self._order, self._workload, self._receive = order, workload, port.call

    def read(self) -> float:
        """Return the seconds from the last message of the warm-up to the last one."""
        began = 0.0
        for numbers in self._numbers():
            began = time.perf_counter()
            self._read(numbers)
        return time.perf_counter() - began

    def _read(self, numbers: range) -> None:
        work, receive = self._workload, self._receive
        key, mask, body, length, is_tensor = work.key, work.mask, work.body, work.length, work.codec == "tensor"
        for number in numbers:
            message = receive()
            part = message if body is None else message[body]
            if message[key] != number & mask or len(part) != length or (is_tensor and part[-1] != TAIL):
                raise work.wrong(message, number)

    async def read_awaited(self) -> float:
        began = 0.0
        for numbers in self._numbers():
            began = time.perf_counter()
            await self._read_awaited(numbers)
        return time.perf_counter() - began

    async def _read_awaited(self, numbers: range) -> None:
        work, receive = self._workload, self._receive
        key, mask, body, length, is_tensor = work.key, work.mask, work.body, work.length, work.codec == "tensor"
        for number in numbers:
            message = await receive()
            part = message if body is None else message[body]
            if message[key] != number & mask or len(part) != length or (is_tensor and part[-1] != TAIL):
                raise work.wrong(message, number)

    def _numbers(self) -> tuple[range, range]:
        """Return the numbers of the warm-up's messages, and those of the others."""
        warm_up = self._order.warm_up
        return range(warm_up), range(warm_up, warm_up + self._order.count)

    def listen(self) -> Heard:
        order, work, receive = self._order, self._workload, self._receive
        key, body, length = work.key, work.body, work.length
        sent, arrived = [], []
        watch = _CpuWatch()
        for number in range(order.warm_up + order.count):
            message = receive()
            arrived.append(time.monotonic_ns())
            sent.append(message[key])
            if len(message if body is None else message[body]) != length:
                raise work.wrong(message, number)
            if number + 1 == order.warm_up:
                watch = _CpuWatch()
        return _heard(order, sent, arrived, watch.percent())

    async def listen_awaited(self) -> Heard:
        order, work, receive = self._order, self._workload, self._receive
        key, body, length = work.key, work.body, work.length
        sent, arrived = [], []
        watch = _CpuWatch()
        for number in range(order.warm_up + order.count):
            message = await receive()
            arrived.append(time.monotonic_ns())
            sent.append(message[key])
            if len(message if body is None else message[body]) != length:
                raise work.wrong(message, number)
            if number + 1 == order.warm_up:
                watch = _CpuWatch()
        return _heard(order, sent, arrived, watch.percent())


class _RoundTrips:
    def __init__(self, order: Order, workload: Workload, out: Port, back: Port) -> None:
        self._order, self._workload, self._send, self._receive = order, workload, out.call, back.call

    def ask(self) -> list[float]:
        """Return how long each took, in microseconds."""
        order, work, send, receive = self._order, self._workload, self._send, self._receive
        message, key, mask, length, clock, times = work.make(), work.key, work.mask, work.length, time.perf_counter, []
        for number in range(order.warm_up + order.count):
            message[key] = number & mask
            began = clock()
            send(message)
            answer = receive()
            times.append((clock() - began) * 1e6)
            if answer[key] != number & mask or len(answer) != length:
                raise work.wrong(answer, number)
        return times[order.warm_up :]

    async def ask_awaited(self) -> list[float]:
        order, work, send, receive = self._order, self._workload, self._send, self._receive
        message, key, mask, length, clock, times = work.make(), work.key, work.mask, work.length, time.perf_counter, []
        for number in range(order.warm_up + order.count):
            message[key] = number & mask
            began = clock()
            await send(message)
            answer = await receive()
            times.append((clock() - began) * 1e6)
            if answer[key] != number & mask or len(answer) != length:
                raise work.wrong(answer, number)
        return times[order.warm_up :]

    def answer(self) -> None:
        order, work, send, receive = self._order, self._workload, self._send, self._receive
        key, mask, length = work.key, work.mask, work.length
        for number in range(order.warm_up + order.count):
            message = receive()
            if message[key] != number & mask or len(message) != length:
                raise work.wrong(message, number)
            send(message)

    async def answer_awaited(self) -> None:
        order, work, send, receive = self._order, self._workload, self._send, self._receive
        key, mask, length = work.key, work.mask, work.length
        for number in range(order.warm_up + order.count):
            message = await receive()
            if message[key] != number & mask or len(message) != length:
                raise work.wrong(message, number)
            await send(message)


class _CpuWatch:
    """What this process, all its threads, takes from now on."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), _cpu_seconds()

    def percent(self) -> float:
        return 100 * (_cpu_seconds() - self._cpu) / (time.perf_counter() - self._wall)


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _sleep_until(due: float) -> None:
    left = due - time.perf_counter() - SPIN_S
    if left > 0:
        time.sleep(left)
    while time.perf_counter() < due:
        pass


def _heard(order: Order, sent: list[int], arrived: list[int], cpu_percent: float) -> Heard:
    late = [(there - went) / 1e3 for went, there in zip(sent, arrived, strict=True)]
    return Heard(late[order.warm_up :], cpu_percent)
