"""One contestant on stage: its lines open, the writer here, the readers in processes of their own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import zip_longest

from benchmarks.crew import BenchmarkError, Crew, Hand, Role
from benchmarks.payloads import Payload
from benchmarks.rivals import Line, Receiver, Rival, Sender


@dataclass(frozen=True)
class Cast:
    """A contestant with its lines open.

    Attributes:
        name: The contestant's.
        hands: Its readers, by rank.
        senders: One for each kind of message.
        receivers: The lines back from the only reader, one for each kind, if there are any.
    """

    name: str
    hands: Sequence[Hand]
    senders: Sequence[Sender]
    receivers: Sequence[Receiver]


@asynccontextmanager
async def on_stage(
    crew: Crew, rival: Rival, role: Role, payloads: Sequence[Payload], *, n_reader: int = 1, both_ways: bool = False
) -> AsyncIterator[Cast]:
    """Start a contestant's readers and open its lines; leaving the block closes them and ends the readers.

    Args:
        crew: Which the readers join.
        rival: The contestant.
        role: What the readers do: ``async def role(boss, reader_ends, writer_ends_of_lines_back, payloads)``. Having
            opened all ends, kind by kind, it replies.
        payloads: The kinds of messages; each has a line of its own.
        n_reader: Readers.
        both_ways: Whether there are lines back.
    """
    lines = [rival.line(payload, n_reader) for payload in payloads]
    lines_back = [rival.line(payload, 1) for payload in payloads] if both_ways else []
    writers_back = [line.writer for line in lines_back]
    hands = [
        crew.start(
            f"reader {rank} of {rival.name}", role, [line.readers[rank] for line in lines], writers_back, payloads
        )
        for rank in range(n_reader)
    ]
    for line in lines:
        for reader in line.readers:
            reader.leave()
    for writer in writers_back:
        writer.leave()
    async with AsyncExitStack() as stack:
        opening = asyncio.create_task(_open(stack, lines, lines_back))
        replies = [asyncio.create_task(hand.reply()) for hand in hands]
        try:
            await asyncio.gather(opening, *replies)  # a reader that fails or dies ends the wait
        finally:
            for task in [opening, *replies]:
                task.cancel()
            await asyncio.wait([opening, *replies])
        senders, receivers = opening.result()
        try:
            yield Cast(rival.name, hands, senders, receivers)
        except BenchmarkError:
            raise
        except Exception:
            for hand in hands:
                if hand.has_replied():
                    await hand.reply()  # raises, if that is why
            raise
        await crew.dismiss(hands)


async def _open(
    stack: AsyncExitStack, lines: Sequence[Line], lines_back: Sequence[Line]
) -> tuple[list[Sender], list[Receiver]]:
    senders: list[Sender] = []
    receivers: list[Receiver] = []
    for line, line_back in zip_longest(lines, lines_back):
        senders.append(await line.writer.open())
        stack.push_async_callback(senders[-1].aclose)
        if line_back is not None:
            receivers.append(await line_back.readers[0].open())
            stack.push_async_callback(receivers[-1].aclose)
    return senders, receivers
