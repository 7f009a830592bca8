"""A writer with remote readers in a process of its own: ``python remote_child.py ROLE ARGUMENTS...``.

It says on standard output, line by line, what it has done. Its readers may be those of ``child.py``.
"""

from __future__ import annotations

import asyncio
import sys
import time

import psutil
from remotes import wide_writer

from aioshm import MessageQueue

BLOCK = 30  # messages, which are timed together


def say(text: str) -> None:
    print(text, flush=True)


def _message(number: int, size: int) -> tuple[int, bytes]:
    return number, bytes([number % 256]) * size


async def _writer(timeout: str, readers: str = "1") -> MessageQueue:
    writer = wide_writer(0, int(readers), remote_timeout=float(timeout))
    say(writer.export_handle().to_json())
    await writer.wait_until_ready(20)
    return writer


async def close(timeout: str, count: str, size: str) -> None:
    """Write messages and close."""
    async with await _writer(timeout) as writer:
        for number in range(int(count)):
            await writer.enqueue(_message(number, int(size)))
    say("closed")


async def stream(timeout: str, size: str) -> None:
    """Write messages until somebody ends it."""
    writer = await _writer(timeout)
    number = 0
    while True:
        await writer.enqueue(_message(number, int(size)))
        number += 1


async def measure(window: str, size: str, warm_up: str, count: str) -> None:
    """Write messages; say how long each took where it was quickest, and by how many bytes later ones made this grow."""
    process = psutil.Process()
    writer = wide_writer(0, 1, remote_window_bytes=int(window))
    say(writer.export_handle().to_json())
    async with writer:
        await writer.wait_until_ready(20)
        paces = []
        for first in range(0, int(warm_up), BLOCK):
            began = time.monotonic()
            for number in range(first, first + BLOCK):
                await writer.enqueue(_message(number, int(size)))
            paces.append((time.monotonic() - began) / BLOCK)
        say(f"{min(paces)}")  # others may have the CPUs meanwhile
        before = largest = process.memory_info().rss
        for number in range(int(warm_up), int(warm_up) + int(count)):
            await writer.enqueue(_message(number, int(size)))
            largest = max(largest, process.memory_info().rss)
    say(f"{largest - before}")


def main() -> None:
    asyncio.run(globals()[sys.argv[1]](*sys.argv[2:]))


if __name__ == "__main__":
    main()
