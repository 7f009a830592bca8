"""Ends of queues that go wrong in known lines: ``python planted.py ROLE NAME NUMBER``; they print when they begin."""

from __future__ import annotations

import asyncio
import sys
import time
from itertools import repeat
from pathlib import Path

from aioshm import MessageQueue


async def write(name: str, readers: int) -> None:
    async with MessageQueue(readers, readers, name=name) as mq:
        await mq.wait_until_ready()
        print("ready", flush=True)
        while True:
            await mq.enqueue_many([b"x" * 100] * 5000)  # more than there are slots
            await asyncio.sleep(1)


async def read(name: str, rank: int) -> None:
    async with MessageQueue.attach(name, rank) as mq:
        print("ready", flush=True)
        async for _ in mq:
            WORK[sys.argv[1]]()


def work_slowly() -> None:
    time.sleep(0.02)  # the line: slow


def block_the_loop() -> None:
    all(sum(range(100)) for _ in repeat(0))  # the line: blocked


WORK = {"read": int, "read slowly": work_slowly, "read and block": block_the_loop}


def line_of(what: str) -> int:
    """Return the number of the marked line."""
    text = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(text, 1) if line.endswith(f"# the line: {what}"))


if __name__ == "__main__":
    asyncio.run((write if sys.argv[1] == "write" else read)(sys.argv[2], int(sys.argv[3])))
