"""What several tests need."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any


def eventually(condition: Callable[[], object], what: str = "the condition", within_s: float = 10.0) -> None:
    """Wait until something holds; fail, naming it, if it does not in time."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come about within {within_s} s"
        time.sleep(0.005)


async def until(condition: Callable[[], object], what: str = "the condition", within_s: float = 10.0) -> None:
    """Let the loop run until something holds; fail, naming it, if it does not in time."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come about within {within_s} s"
        await asyncio.sleep(0.001)


async def cancelled_after(call: Coroutine[Any, Any, Any], turns: int) -> Any:
    """Run a call, cancelling it after so many turns of the loop; return its result or None."""
    task = asyncio.ensure_future(call)
    for _ in range(turns):
        if task.done():
            break
        await asyncio.sleep(0)
    task.cancel()
    with suppress(asyncio.CancelledError):
        return await task
    return None


class Bystander:
    """A task that wants every turn of the loop.

    Attributes:
        turns: How many it has had.
    """

    def __init__(self) -> None:
        self.turns = 0

    async def run(self) -> None:
        while True:
            self.turns += 1
            await asyncio.sleep(0)


@asynccontextmanager
async def bystander() -> AsyncIterator[Bystander]:
    """Let a task run beside the block and count its turns."""
    other = Bystander()
    running = asyncio.ensure_future(other.run())
    try:
        yield other
    finally:
        running.cancel()
