"""A contestant on stage: a process for its writer and one for each reader, all lines open, waiting for orders.

Contestants that are called without await run in plain loops; those that are awaited run on an event loop. Each process
is held to a core of its own, where there are enough of them.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.contestants.contestant import Contestant, End, Port
from benchmarks.framework.crew import Boss, Crew, Hand
from benchmarks.framework.loops import Order, Ports, ports_for, without_awaits
from benchmarks.framework.workload import Workload


@dataclass(frozen=True)
class Stage:
    """A contestant with its lines open."""

    contestant: Contestant
    workload: Workload
    writer: Hand
    readers: Sequence[Hand]

    @property
    def name(self) -> str:
        """The contestant's name."""
        return self.contestant.name

    async def perform(self, write: Order, read: Order) -> tuple[Any, list[Any]]:
        """Give the writer and the readers an order each; return their answers.

        Raises:
            BenchmarkError: A process failed or died.
        """
        hands = [*self.readers, self.writer]
        for hand in hands:
            hand.order(write if hand is self.writer else read)
        *answers, written = await together([hand.reply() for hand in hands])
        return written, answers


@asynccontextmanager
async def on_stage(
    contestant: Contestant,
    workload: Workload,
    n_reader: int,
    loop_factory: Callable[[], asyncio.AbstractEventLoop],
    *,
    both_ways: bool = False,
) -> AsyncIterator[Stage]:
    """Start a contestant's processes and open its lines; leaving the block closes them and ends the processes.

    Raises:
        BenchmarkError: A process fails, dies or does not end.
    """
    with Crew(loop_factory) as crew:
        stage = await _start(crew, contestant, workload, n_reader, both_ways)
        yield stage
        await crew.dismiss([stage.writer, *stage.readers])


async def together(waits: Sequence[Any]) -> list[Any]:
    """Return all results; the first failure cancels the other waits, which might never end."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(frozen=True)
class Part:
    """The part of a process."""

    workload: Workload
    out: End | None
    back: End | None
    is_reader: bool  # whether the end to receive by is opened first
    core: int | None
    awaited: bool

    def in_order(self) -> list[End | None]:
        """Return the ends in the order in which they are opened."""
        return [self.back, self.out] if self.is_reader else [self.out, self.back]

    def ports(self, opened: Sequence[Port | None]) -> Ports:
        """Hold the process to its core, and return the ports of its loops."""
        if self.core is not None:
            _pin(self.core)
        out, back = opened[::-1] if self.is_reader else opened
        return ports_for(self.workload, out, back, self.awaited)


async def _start(crew: Crew, contestant: Contestant, workload: Workload, n_reader: int, both_ways: bool) -> Stage:
    sending, receiving = contestant.line(workload, n_reader)
    answering, answered = contestant.line(workload, 1) if both_ways else (None, [None])
    cores = _cores(1 + n_reader)
    role = play_awaited if contestant.awaited else play

    def start(name: str, number: int, out: End | None, back: End | None) -> Hand:
        part = Part(workload, out, back, number > 0, cores[number], contestant.awaited)
        return crew.start(f"{name} of {contestant.name}", role, part)

    writer = start("writer", 0, sending, answered[0])
    readers = [
        start(f"reader {rank}", 1 + rank, None if rank else answering, end) for rank, end in enumerate(receiving)
    ]
    for end in (sending, answering, *receiving, *answered):
        if end is not None:
            end.leave()
    await together([hand.reply() for hand in [writer, *readers]])
    return Stage(contestant, workload, writer, readers)


def play(boss: Boss, part: Part) -> None:
    """Role: open the ends, then obey orders, without an event loop."""
    opened: list[Any] = [end and end.open() for end in part.in_order()]
    ports = part.ports(opened)
    boss.reply("ready")
    while (order := boss.plain_order()) is not None:
        _tidy_up()
        boss.reply(without_awaits(order.loop)(ports, *order.args))
    for port in filter(None, opened):
        port.close()


async def play_awaited(boss: Boss, part: Part) -> None:
    """Role: open the ends, then obey orders."""
    opened: list[Any] = []
    for end in part.in_order():
        opening = end and end.open()
        opened.append(await opening if inspect.isawaitable(opening) else opening)
    ports = part.ports(opened)
    boss.reply("ready")
    while (order := await boss.order()) is not None:
        _tidy_up()
        boss.reply(await order.loop(ports, *order.args))
    for port in filter(None, opened):
        closing = port.close()
        if inspect.isawaitable(closing):
            await closing


def _tidy_up() -> None:
    """Keep the garbage collector from visiting old objects during the next order."""
    gc.collect()
    gc.freeze()


def _cores(wanted: int) -> list[int | None]:
    """Return a core for each process, or None for all of them where there are too few."""
    if not hasattr(os, "sched_getaffinity"):  # macOS
        return [None] * wanted
    usable = sorted(os.sched_getaffinity(0))
    return [*usable[:wanted]] if len(usable) >= wanted else [None] * wanted


def _pin(core: int) -> None:
    """Hold every thread of this process to one core. After opening: a contestant may inspect the machine before."""
    for thread in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):  # it has just ended
            os.sched_setaffinity(int(thread.name), {core})
