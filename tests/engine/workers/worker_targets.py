"""What the processes of the tests of worker groups run."""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any

LONG_S = 100


class Worker:
    def __init__(self, *args: Any, rank: int, log: str = "", **kwargs: Any) -> None:
        self.rank = rank
        self.made = args, kwargs
        self.log = Path(log, f"{rank}") if log else None
        self.calls: list[Any] = []

    def tell_made(self) -> Any:
        return self.rank, *self.made

    def pid(self) -> int:
        return os.getpid()

    def add(self, *numbers: int, times: int = 1) -> int:
        self.calls.append(numbers)
        return self.rank + sum(numbers) * times

    def history(self) -> list[Any]:
        return self.calls

    async def slowly(self, seconds: float, value: Any = None, rank: int | None = None) -> Any:
        if rank in (None, self.rank):
            await asyncio.sleep(seconds)
        return value

    def wait_for(self, path: str, value: Any, rank: int) -> Any:
        """Block until the file exists, in one worker."""
        while rank == self.rank and not Path(path).exists():
            time.sleep(0.005)
        return value

    async def say_and_wait(self, path: str) -> None:
        Path(path).touch()
        await asyncio.sleep(LONG_S)

    def say_and_block(self, path: str) -> None:
        Path(path).touch()
        time.sleep(LONG_S)

    def lose_sigterm(self, way: str) -> None:
        class Dropped:
            def __del__(self) -> None:
                signal.raise_signal(signal.SIGTERM)

        if way == "destructor":
            Dropped()
            return
        with suppress(BaseException):
            signal.raise_signal(signal.SIGTERM)

    def double(self, array: Any) -> Any:
        return array * 2

    def fail(self, rank: int | None = None) -> str:
        if rank in (None, self.rank):
            raise ValueError(f"rank {self.rank} does not like it")
        return "fine"

    def fail_in_a_strange_way(self, way: str) -> Any:
        if way == "cancelled":
            raise asyncio.CancelledError
        if way == "mute":
            raise Mute
        if way == "syntax":  # the traceback module cannot format this
            raise SyntaxError("bad", ("f", 1, 1, b"{% x %}"))
        if way == "result":
            return CancelsPickling()
        if way == "lambda":
            return lambda: None
        return FaultyAt("driver")

    def end(self, rank: int, how: str) -> None:
        if rank != self.rank:
            return
        print(f"rank {rank} goes", file=sys.stderr, flush=True)
        if how == "exit":
            sys.exit(0)
        elif how == "_exit":
            os._exit(3)
        os.kill(os.getpid(), signal.Signals[how])

    def hang_up(self, rank: int) -> None:
        """Close all connections to the driver, and hang, in one worker."""
        if rank == self.rank:
            os.closerange(3, 1024)
            time.sleep(LONG_S)

    async def end_or_wait(self, rank: int, how: str) -> None:
        self.end(rank, how)
        await asyncio.sleep(LONG_S)

    def close(self) -> None:
        if self.log is not None:
            self.log.write_text("closed")


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def complain(side: str) -> None:
    here = "driver" if multiprocessing.parent_process() is None else "worker"
    if side == here:
        raise LookupError(f"not in the {side}")


class FaultyAt:
    """Can be pickled, but not unpickled on one side."""

    def __init__(self, side: str) -> None:
        self.side = side

    def __reduce__(self) -> Any:
        return complain, (self.side,)


class CancelledAt(FaultyAt):
    """Raises CancelledError when it is unpickled."""

    def __reduce__(self) -> Any:
        return cancel, (self.side,)


class CancelsPickling:
    def __reduce__(self) -> Any:
        raise asyncio.CancelledError


def cancel(side: str) -> None:
    raise asyncio.CancelledError(f"not in the {side}")


def rank_of(worker: Worker, more: int) -> int:
    return worker.rank + more


async def cancellations(worker: Worker) -> int:
    task = asyncio.current_task()
    assert task is not None
    return task.cancelling()


async def loop_of(worker: Worker) -> str:
    return type(asyncio.get_running_loop()).__module__


def sigterm_while_scheduling(worker: Worker, sent: str) -> None:
    """Send SIGTERM to this process when asyncio schedules the next step of a task; create a file then."""

    def trace(frame: FrameType, event: str, _arg: object) -> object:
        caller = frame.f_back
        if event == "line" and frame.f_code.co_name == "call_soon" and caller and caller.f_code.co_name == "_run":
            sys.settrace(None)
            Path(sent).touch()
            signal.raise_signal(signal.SIGTERM)
        return tracing

    # The signal handler skips running functions of the user's modules: the tracing function must not count.
    tracing = FunctionType(trace.__code__, {**globals(), "__name__": "trace"}, closure=trace.__closure__)
    sys.settrace(tracing)


class Rankless:
    """A worker without a rank."""

    def __init__(self, factor: int = 2) -> None:
        self.factor = factor

    def multiply(self, number: int) -> int:
        return number * self.factor


async def made_slowly(rank: int) -> Worker:
    await asyncio.sleep(0.01)
    return Worker(rank=rank)


def fails_to_start(rank: int, failing: int, how: str = "raise") -> Worker:
    worker = Worker(rank=rank)
    if how == "raise":
        worker.fail(failing)
    elif how == "hang":
        time.sleep(LONG_S * (rank == failing))
    else:
        worker.end(failing, how)
    return worker


class Fragile(Worker):
    """Cannot be made while the file ``flag`` is there."""

    def __init__(self, *, rank: int, flag: str, how: str = "raise") -> None:
        super().__init__(rank=rank)
        if os.path.exists(flag):
            if how == "hang":
                time.sleep(LONG_S)
            raise ValueError(how if how != "raise" else "not now")


class Streaming(Worker):
    """Yields numbers, and says how its generators fare.

    Attributes:
        yielded: The last number that was made.
        ends: How generators were left.
        begun: What was called.
    """

    def say_and_block_once(self, path: str) -> Any:
        self.say_and_block(path)
        yield 1

    def __init__(self, *args: Any, rank: int, **kwargs: Any) -> None:
        super().__init__(*args, rank=rank, **kwargs)
        self.yielded = -1
        self.ends: list[str] = []
        self.begun: list[Any] = []
        self.event = asyncio.Event()

    def state(self) -> tuple[int, list[str]]:
        return self.yielded, self.ends

    def begin(self, what: Any) -> list[Any]:
        self.begun.append(what)
        return self.begun

    async def begin_slowly(self, what: Any, seconds: float = LONG_S) -> Any:
        self.begun.append(what)
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            self.begun.append(f"{what} cancelled")
            raise
        return what

    def watch(self) -> Any:
        while True:
            yield list(self.begun)

    @contextmanager
    def noting_the_end(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.ends.append(type(error).__name__)
            raise
        self.ends.append("done")

    def count(self, most: int | None = None, fail: bool = False, size: int = 0) -> Any:
        with self.noting_the_end():
            for number in self._numbers(most, fail):
                yield (number, bytearray(size)) if size else number

    async def count_slowly(self, most: int | None = None, seconds: float = 0.0, fail: bool = False) -> Any:
        with self.noting_the_end():
            await asyncio.sleep(seconds)
            for number in self._numbers(most, fail):
                yield number
                await asyncio.sleep(seconds)

    def _numbers(self, most: int | None, fail: bool) -> Iterator[int]:
        for number in itertools.count():
            if number == most:
                break
            self.yielded = number
            yield number
        if fail:
            self.fail()

    async def wait_and_count(self, most: int) -> Any:
        for number in range(most):
            await self.event.wait()
            self.event.clear()
            yield number

    def set_event(self) -> None:
        self.event.set()

    async def counting_later(self, most: int) -> Any:
        await asyncio.sleep(0)
        return range(most)

    def count_and_end(self, most: int, how: str) -> Any:
        yield from range(most)
        self.end(self.rank, how)

    def faulty_items(self, side: str) -> Any:
        yield 0
        yield FaultyAt(side) if side else (lambda: None)
        self.ends.append("went on")

    def close_badly(self) -> Any:
        try:
            yield 0
            yield 1
        finally:
            raise ValueError("it does not close well")


class OneHangs(Worker):
    """Worker 0 creates a file; the constructors of the others hang."""

    def __init__(self, *, rank: int, log: str) -> None:
        super().__init__(rank=rank, log=log)
        if rank:
            time.sleep(LONG_S)
        Path(log, "made").touch()


class ClosesSlowly(Worker):
    """Creates a file when closing begins."""

    seconds = 0.3

    def close(self) -> None:
        assert self.log is not None
        self.log.with_name("closing").touch()
        time.sleep(self.seconds)
        super().close()


class NeverCloses(ClosesSlowly):
    seconds = LONG_S
