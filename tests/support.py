"""What several tests need."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


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
