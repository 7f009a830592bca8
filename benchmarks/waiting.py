"""Waiting for a file descriptor on any event loop."""

from __future__ import annotations

import asyncio


async def readable(*fds: int) -> None:
    """Return once one of these file descriptors can be read."""
    loop = asyncio.get_running_loop()
    ready = loop.create_future()

    def wake() -> None:
        if not ready.done():
            ready.set_result(None)

    for fd in fds:
        loop.add_reader(fd, wake)
    try:
        await ready
    finally:
        for fd in fds:
            loop.remove_reader(fd)
