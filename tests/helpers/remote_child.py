"""A writer with a remote reader in a process of its own: ``python remote_child.py ROLE ARGUMENTS...``.

It says on standard output, line by line, what it has done. Its readers may be those of ``child.py``.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import Iterable

from remotes import wide_writer


def say(text: str) -> None:
    print(text, flush=True)


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


if __name__ == "__main__":
    asyncio.run(globals()[sys.argv[1]](*sys.argv[2:]))
