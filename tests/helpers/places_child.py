"""Ends of a queue on two hosts, for tests that kill readers: ``python places_child.py ROLE ARGUMENTS...``."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

from remotes import wide_writer

from aioshm import MessageQueue, QueueClosed


def say(what: object) -> None:
    print(what, flush=True)


async def write(ip: str, timeout: str, policy: Any, stop: str) -> None:
    """Say the handle, send numbers until there is a file, and say how many those were."""
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


async def read(handle: str, journal: str) -> None:
    """Write down what comes, at whichever place is vacant."""
    with open(journal, "ab", buffering=0) as file:
        async with MessageQueue.create_from_handle(handle) as reader:
            async for number in reader:
                file.write(f"{os.getpid()} {number}\n".encode())


if __name__ == "__main__":
    asyncio.run(globals()[sys.argv[1]](*sys.argv[2:]))
