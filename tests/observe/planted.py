"""Ends of queues, and an engine, that go wrong in known lines: ``python planted.py ROLE NAME [RANK]``.

On standard output each says what it has come to. A line of standard input lets it go wrong.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

from aioshm import MessageQueue


async def write(name: str, readers: int) -> None:
    async with MessageQueue(readers, readers, name=name) as mq:
        await mq.wait_until_ready()
        print("ready", flush=True)
        while True:
            await mq.enqueue(b"x" * 100)
            await asyncio.sleep(0.001)


async def flood(name: str, readers: int) -> None:
    async with MessageQueue(readers, readers, name=name) as mq:
        await mq.wait_until_ready()
        print("ready", flush=True)
        while True:
            await mq.enqueue(b"x" * 100)


async def read(name: str, rank: int) -> None:
    async with MessageQueue.attach(name, rank) as mq:
        print("ready", flush=True)
        async for _ in mq:
            pass


async def read_slowly(name: str, rank: int) -> None:
    async with MessageQueue.attach(name, rank) as mq:
        print("ready", flush=True)
        async for _ in mq:
            work_slowly()


def work_slowly() -> None:
    time.sleep(0.02)  # the line: slow


async def read_and_block(name: str, rank: int) -> None:
    async with MessageQueue.attach(name, rank) as mq:
        await mq.dequeue()
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        block_the_loop()


def block_the_loop() -> None:
    print("wrong", flush=True)
    while True:
        sum(range(100))  # the line: blocked


ROLES = {
    "write": write,
    "flood": flood,
    "read": read,
    "read slowly": read_slowly,
    "read and block": read_and_block,
}


def line_of(what: str) -> int:
    """Return the number of the marked line."""
    text = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(text, 1) if line.endswith(f"# the line: {what}"))


if __name__ == "__main__":
    asyncio.run(ROLES[sys.argv[1]](sys.argv[2], int(sys.argv[3])))
