"""Workers that hang, each in its own way; the comment HERE marks the line that a report has to name."""

from __future__ import annotations

import asyncio
import ctypes
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from aioshm import progress

LONG_S = 100


def hang_in_a_lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()  # HERE


def hang_with_the_gil_held() -> None:
    ctypes.PyDLL(None).sleep(LONG_S)  # HERE


def hang_with_the_gil_released() -> None:
    time.sleep(LONG_S)  # HERE


def wait_for_a_later_job(pool: ThreadPoolExecutor) -> None:
    pool.submit(time.time).result()  # HERE


def line_of(function: Callable[..., object]) -> str:
    """Return the marked line of a function, as reports name it."""
    lines = Path(__file__).read_text().splitlines()
    first = function.__code__.co_firstlineno
    number = next(number for number, line in enumerate(lines, 1) if number > first and line.endswith("# HERE"))
    return f"{Path(__file__).name}:{number} in {function.__name__}"


class Hanging:
    def __init__(self, rank: int, flag: str = "") -> None:
        if flag and Path(flag).exists():
            time.sleep(LONG_S)
        self.rank = rank
        self.pool = ThreadPoolExecutor(1)

    def which(self) -> int:
        return self.rank

    def hang(self, way: Callable[[], None]) -> None:
        way()

    async def hang_awaited(self, way: Callable[[], None]) -> None:
        await asyncio.sleep(0)
        way()

    def hang_later(self, way: Callable[[], None]) -> None:
        """Block the loop outside of any call."""
        asyncio.get_running_loop().call_later(0.1, way)

    async def hang_in_an_executor(self, way: Callable[[ThreadPoolExecutor], None]) -> None:
        await asyncio.get_running_loop().run_in_executor(self.pool, way, self.pool)

    async def wait_forever(self) -> None:
        await asyncio.Event().wait()

    def yield_and_hang(self, way: Callable[[], None]) -> Iterator[int]:
        yield self.rank
        way()

    def sleep(self, seconds: float) -> int:
        time.sleep(seconds)
        return self.rank

    async def sleep_awaited(self, seconds: float) -> int:
        await asyncio.sleep(seconds)
        return self.rank

    def count(self, most: int, seconds: float) -> Iterator[int]:
        for number in range(most):
            time.sleep(seconds)
            yield number

    async def count_awaited(self, most: int, seconds: float) -> AsyncIterator[int]:
        for number in range(most):
            await asyncio.sleep(seconds)
            yield number

    def sleep_as_expected(self, seconds: float) -> int:
        with progress.expect(LONG_S):
            time.sleep(seconds)
        return self.rank

    async def sleep_as_expected_awaited(self, seconds: float) -> int:
        with progress.expect(LONG_S):
            await asyncio.sleep(seconds)
        return self.rank
