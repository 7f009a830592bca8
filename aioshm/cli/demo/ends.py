"""The two ends of the demo's queue: send the script, or receive and check it, and measure both."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from time import monotonic, monotonic_ns, process_time_ns

import msgspec

from aioshm.cli.demo.script import PACE_S, Mismatch, Phase
from aioshm.queue import MessageQueue

_DRAIN_S = 0.0005  # between two looks whether every reader has caught up


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What one process measured in one phase.

    Attributes:
        phase: Its name.
        messages: How many there were.
        bytes: Their contents.
        seconds: A reader: from the first message to the last; the writer: until every reader had read the last.
        messages_per_s: None where a single message leaves nothing to measure.
        gb_per_s: In 10^9 bytes.
        p50_us: Median of the time from just before ``enqueue`` to just after ``dequeue``, where it was measured.
        p99_us: Its 99th percentile.
        cpu_share: CPU time of the process per second, making and checking the messages included.
    """

    phase: str
    messages: int
    bytes: int
    seconds: float
    messages_per_s: float | None
    gb_per_s: float | None
    p50_us: float | None
    p99_us: float | None
    cpu_share: float | None


async def send(queue: MessageQueue, script: Sequence[Phase]) -> list[Figures]:
    """Send every message of the script; each phase begins when every reader has read the one before.

    Raises:
        PeerDied: A reader died.
    """
    return [await _send_phase(queue, phase) for phase in script]


async def receive(queue: MessageQueue, script: Sequence[Phase]) -> list[Figures]:
    """Receive and check every message of the script, and that none follows.

    Raises:
        Mismatch: A message is not what it must be.
        PeerDied: The writer died.
        QueueClosed: The writer gave up.
    """
    figures = [await _receive_phase(queue, phase) for phase in script]
    async for _ in queue:
        raise Mismatch(f"message {sum(map(len, script))} came after the last one")
    return figures


async def _send_phase(queue: MessageQueue, phase: Phase) -> Figures:
    began, began_cpu, due = monotonic_ns(), process_time_ns(), monotonic()
    for index in range(len(phase)):
        if phase.paced:
            await asyncio.sleep(due + index * PACE_S - monotonic())
        await queue.enqueue(phase.make(index, monotonic_ns()))
    while queue.stats().backlog:  # noqa: ASYNC110 (no call waits for the readers to catch up)
        await asyncio.sleep(_DRAIN_S)
    return _figures(phase, 0, monotonic_ns() - began, process_time_ns() - began_cpu, [])


async def _receive_phase(queue: MessageQueue, phase: Phase) -> Figures:
    latencies = []
    began = began_cpu = 0
    for index in range(len(phase)):
        message = await queue.dequeue()
        arrived = monotonic_ns()
        if index == 0:
            began, began_cpu = arrived, process_time_ns()
        phase.check(index, message)
        if phase.paced:
            latencies.append(arrived - message[1])
    # The clock has run since the first message, so that one does not count.
    return _figures(phase, 1, monotonic_ns() - began, process_time_ns() - began_cpu, sorted(latencies))


def _figures(phase: Phase, skipped: int, ns: int, cpu_ns: int, latencies: Sequence[int]) -> Figures:
    sizes = [phase.size(index) for index in range(len(phase))]
    timed = sizes[skipped:]
    measured = bool(timed and ns)
    return Figures(
        phase=phase.name,
        messages=len(sizes),
        bytes=sum(sizes),
        seconds=ns / 1e9,
        messages_per_s=len(timed) / ns * 1e9 if measured else None,
        gb_per_s=sum(timed) / ns if measured else None,
        p50_us=_percentile(latencies, 50),
        p99_us=_percentile(latencies, 99),
        cpu_share=cpu_ns / ns if measured else None,
    )


def _percentile(ordered: Sequence[int], percent: int) -> float | None:
    """Return a percentile in microseconds, by the nearest rank."""
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)] / 1000 if ordered else None
