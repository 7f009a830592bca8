"""A writer whose readers are killed: ``python places_child.py write IP TIMEOUT POLICY STOP``."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

from remotes import wide_writer

from aioshm import QueueClosed


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


if __name__ == "__main__":
    asyncio.run(globals()[sys.argv[1]](*sys.argv[2:]))
