"""A contestant on stage: a process for its writer and one for each reader, all lines open, waiting for orders."""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.compare.contestant import Contestant, End, Job, Port
from benchmarks.compare.loops import Order, obey, obey_awaited
from benchmarks.compare.workload import Workload
from benchmarks.crew import Boss, Crew, Hand


@dataclass(frozen=True)
class Troupe:
    """A contestant with its lines open.

    Attributes:
        contestant: Which.
        writer: The process that sends.
        readers: Those that receive, by rank.
    """

    contestant: Contestant
    writer: Hand
    readers: Sequence[Hand]

    async def perform(self, write: Order, read: Order) -> tuple[Any, list[Any]]:
        """Have the writer and the readers do something together; return what each answers."""
        for reader in self.readers:
            reader.order(read)
        self.writer.order(write)
        # Together: who fails says so at once, while the others would wait for it for ever.
        answers = await _all([hand.reply() for hand in [self.writer, *self.readers]])
        return answers[0], answers[1:]


@asynccontextmanager
async def on_stage(
    contestant: Contestant, workload: Workload, n_reader: int, *, both_ways: bool = False
) -> AsyncIterator[Troupe]:
    """Start a contestant's processes and open its lines; leaving the block closes them and ends the processes.

    Raises:
        BenchmarkError: A process fails, dies or does not end.
    """
    with Crew(loop_factory()) as crew:
        troupe = await _start(crew, contestant, workload, n_reader, both_ways)
        yield troupe
        await crew.dismiss([troupe.writer, *troupe.readers])


async def _start(crew: Crew, contestant: Contestant, workload: Workload, n_reader: int, both_ways: bool) -> Troupe:
    job = Job(workload.codec, n_reader, workload.nbytes, workload.slots, workload.chunk_bytes)
    line = contestant.line(job)
    back = contestant.line(job) if both_ways else None
    cores = _cores(1 + n_reader)
    role = play_awaited if contestant.awaited else play
    writer_part = Part(workload, line.writer, back.readers[0] if back else None, True, cores[0])
    writer = crew.start(f"writer of {contestant.name}", role, writer_part)
    readers = [
        crew.start(
            f"reader {rank} of {contestant.name}",
            role,
            Part(workload, back.writer if back else None, end, False, cores[1 + rank]),
        )
        for rank, end in enumerate(line.readers)
    ]
    for end in [line.writer, *line.readers, *([back.writer, *back.readers] if back else [])]:
        end.leave()
    await _all([hand.reply() for hand in [writer, *readers]])
    return Troupe(contestant, writer, readers)


@dataclass(frozen=True)
class Part:
    """What a process has to know.

    Attributes:
        workload: What is sent.
        sending: The end to send by.
        receiving: The end to receive by.
        sends_first: Which of the two is opened first.
        core: Which core to stay on.
    """

    workload: Workload
    sending: End | None
    receiving: End | None
    sends_first: bool
    core: int | None

    def ends(self) -> list[End | None]:
        """Return the ends in the order in which they are opened."""
        return [self.sending, self.receiving] if self.sends_first else [self.receiving, self.sending]

    def ports(self, opened: list[Any]) -> tuple[Port | None, Port | None]:
        """Hold the process to its core, and return the port to send by and the one to receive by."""
        if self.core is not None:
            _pin(self.core)
        out, back = opened if self.sends_first else reversed(opened)
        return out, back


def play(boss: Boss, part: Part) -> None:
    """Role: open the ends, then obey orders, without an event loop."""
    out, back = part.ports([end and end.open() for end in part.ends()])
    boss.reply("ready")
    while (order := boss.plain_order()) is not None:
        boss.reply(obey(order, part.workload, out, back))
    for port in [out, back]:
        if port is not None:
            port.close()


async def play_awaited(boss: Boss, part: Part) -> None:
    """Role: open the ends, then obey orders."""
    opened = []
    for end in part.ends():
        opening = end and end.open()
        opened.append(await opening if inspect.isawaitable(opening) else opening)
    out, back = part.ports(opened)
    boss.reply("ready")
    while (order := await boss.order()) is not None:
        boss.reply(await obey_awaited(order, part.workload, out, back))
    for port in [out, back]:
        closing = port.close() if port is not None else None
        if inspect.isawaitable(closing):
            await closing


async def _all(waits: Sequence[Any]) -> list[Any]:
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """Return what makes the loops of awaited contestants: uvloop's, where that is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop


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
