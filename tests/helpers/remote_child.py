"""A writer with remote readers in a process of its own: ``python remote_child.py ROLE ARGUMENTS...``.

It says on standard output, line by line, what it has done. Its readers may be those of ``child.py``.
"""

from __future__ import annotations

import asyncio
import sys

from remotes import wide_writer

from aioshm import MessageQueue


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


def main() -> None:
    asyncio.run(globals()[sys.argv[1]](*sys.argv[2:]))


if __name__ == "__main__":
    main()
