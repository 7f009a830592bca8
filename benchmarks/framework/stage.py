"""A contestant on stage: a process for its writer and one for each reader, all lines open, waiting for orders.

Contestants that are called without await run in plain loops; those that are awaited run on an event loop.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks.contestants.contestant import Contestant, End, Port
from benchmarks.framework.crew import Boss, Crew, Hand
from benchmarks.framework.loops import Order, Ports, ports_for, without_awaits
from benchmarks.framework.workload import Workload


@dataclass(frozen=True)
class Stage:
    """A contestant with its lines open.

    Attributes:
        contestant: Which.
        writer: The process that sends.
        readers: Those that receive, by rank.
    """

    contestant: Contestant
    writer: Hand
    readers: Sequence[Hand]

    @property
    def name(self) -> str:
        """The contestant's name."""
        return self.contestant.name

    async def perform(self, write: Order | None, read: Order | None) -> tuple[Any, list[Any]]:
        """Have the writer and the readers do something together; return what each answers.

        Raises:
            BenchmarkError: A process failed or died.
        """
        hands = []
        for order, those in ((read, self.readers), (write, [self.writer])):
            for hand in those if order is not None else []:
                hand.order(order)
                hands.append(hand)
        answers = dict(zip(hands, await together([hand.reply() for hand in hands]), strict=True))
        return answers.get(self.writer), [answers.get(reader) for reader in self.readers]


@asynccontextmanager
async def on_stage(
    contestant: Contestant,
    workloads: Sequence[Workload],
    n_reader: int,
    loop_factory: Callable[[], asyncio.AbstractEventLoop],
    *,
    both_ways: bool = False,
    pinned: bool = False,
) -> AsyncIterator[Stage]:
    """Start a contestant's processes and open its lines; leaving the block closes them and ends the processes.

    Args:
        contestant: Which.
        workloads: The kinds of messages; each has a line of its own.
        n_reader: Readers.
        loop_factory: What makes the event loops.
        both_ways: Whether there are lines back from the first reader.
        pinned: Whether each process is held to one core, where there are enough of them.

    Raises:
        BenchmarkError: A process fails, dies or does not end.
    """
    with Crew(loop_factory) as crew:
        stage = await _start(crew, contestant, workloads, n_reader, both_ways, pinned)
        yield stage
        await crew.dismiss([stage.writer, *stage.readers])


async def together(waits: Sequence[Any]) -> list[Any]:
    """Return what all of these return; the first that fails ends the wait for the others, which might take for ever."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(frozen=True)
class Part:
    """What a process has to know.

    Attributes:
        workloads: What is sent.
        ends: For each of them the end to send by and the end to receive by.
        receives_first: Which of the two is opened first.
        core: Which core to stay on.
        awaited: Whether the contestant is.
    """

    workloads: Sequence[Workload]
    ends: Sequence[tuple[End | None, End | None]]
    receives_first: bool
    core: int | None
    awaited: bool

    def in_order(self) -> list[End | None]:
        """Return the ends in the order in which they are opened."""
        return [end for pair in self.ends for end in (pair[::-1] if self.receives_first else pair)]

    def ports(self, opened: Sequence[Port | None]) -> list[Ports]:
        """Hold the process to its core, and return what its loops have at hand for each workload."""
        if self.core is not None:
            _pin(self.core)
        pairs = [pair[::-1] if self.receives_first else pair for pair in zip(opened[::2], opened[1::2], strict=True)]
        return [
            ports_for(work, out, back, self.awaited) for work, (out, back) in zip(self.workloads, pairs, strict=True)
        ]


async def _start(
    crew: Crew, contestant: Contestant, workloads: Sequence[Workload], n_reader: int, both_ways: bool, pinned: bool
) -> Stage:
    lines = [contestant.line(workload, n_reader) for workload in workloads]
    back = [contestant.line(workload, 1) for workload in workloads] if both_ways else []
    nothing: list[None] = [None] * len(lines)
    to_writer = [readers[0] for _, readers in back] or nothing
    to_send_back = [writer for writer, _ in back] or nothing
    cores = _cores(1 + n_reader) if pinned else [None] * (1 + n_reader)
    role = play_awaited if contestant.awaited else play

    def start(name: str, number: int, sending: Sequence[End | None], receiving: Sequence[End | None]) -> Hand:
        ends = list(zip(sending, receiving, strict=True))
        part = Part(workloads, ends, number > 0, cores[number], contestant.awaited)
        return crew.start(f"{name} of {contestant.name}", role, part)

    writer = start("writer", 0, [writer for writer, _ in lines], to_writer)
    readers = [
        start(f"reader {rank}", 1 + rank, nothing if rank else to_send_back, [ends[rank] for _, ends in lines])
        for rank in range(n_reader)
    ]
    for sending, receiving in chain(lines, back):
        for end in (sending, *receiving):
            end.leave()
    await together([hand.reply() for hand in [writer, *readers]])
    return Stage(contestant, writer, readers)


def play(boss: Boss, part: Part) -> None:
    """Role: open the ends, then obey orders, without an event loop."""
    opened: list[Any] = [end and end.open() for end in part.in_order()]
    ports = part.ports(opened)
    boss.reply("ready")
    while (order := boss.plain_order()) is not None:
        _tidy_up()
        boss.reply(without_awaits(order.loop)(ports[order.kind], *order.args))
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
        boss.reply(await order.loop(ports[order.kind], *order.args))
    for port in filter(None, opened):
        closing = port.close()
        if inspect.isawaitable(closing):
            await closing


def _tidy_up() -> None:
    """Have the garbage collector look at nothing during the next order that was there before."""
    gc.collect()
    gc.freeze()


def _cores(wanted: int) -> list[int | None]:
    """Return a core for each process, or None for all of them where there are too few."""
    if not hasattr(os, "sched_getaffinity"):  # macOS
        return [None] * wanted
    usable = sorted(os.sched_getaffinity(0))
    return [*usable[:wanted]] if len(usable) >= wanted else [None] * wanted


def _pin(core: int) -> None:
    """Hold every thread of this process to one core. After opening: a contestant may look at the machine before."""
    for thread in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):  # it has just ended
            os.sched_setaffinity(int(thread.name), {core})
