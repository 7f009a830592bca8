"""A writer with a remote reader in a process of its own: ``python remote_child.py ROLE ARGUMENTS...``.

It says on standard output, line by line, what it has done. Its readers may be those of ``child.py``.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from remotes import wide_writer

from aioshm import QueueClosed


def say(what: object) -> None:
    print(what, flush=True)


async def _write(timeout: str, size: str, numbers: Iterable[int]) -> None:
    async with wide_writer(0, 1, remote_timeout=float(timeout)) as writer:
        say(writer.export_handle().to_json())
        await writer.wait_until_ready(20)
        for number in numbers:
            await writer.enqueue((number, bytes([number % 256]) * int(size)))


async def close(timeout: str, count: str, size: str) -> None:
    """Write messages and close."""
    await _write(timeout, size, range(int(count)))
    say("closed")


async def stream(timeout: str, size: str) -> None:
    """Write messages until somebody ends it."""
    await _write(timeout, size, itertools.count())


async def bereaved(ip: str, timeout: str, policy: Any, stop: str) -> None:
    """Send numbers to readers that are killed until there is a file, and say how many those were."""
    options = {"remote_timeout": float(timeout), "on_reader_death": policy, "remote_window": 200}
    sent, done = 0, Path(stop)
    async with wide_writer(0, 1, connect_ip=ip, **options) as writer:
        say(writer.export_handle().to_json())
        while not done.exists():
            try:
                await writer.enqueue(sent, 0.1)
                sent += 1
            except (TimeoutError, QueueClosed):  # there is no reader just now
                pass
            await asyncio.sleep(0.001)
    say(sent)


if __name__ == "__main__":
    asyncio.run(globals()[sys.argv[1]](*sys.argv[2:]))
