"""What several tests need."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

HELPERS = Path(__file__).parent / "helpers"
"""The folder of the scripts that tests run as processes."""


def eventually(condition: Callable[[], object], what: str = "the condition", within_s: float = 30.0) -> None:
    """Wait until something holds; fail, naming it, if it does not in time."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come about within {within_s} s"
        time.sleep(0.005)


async def until(condition: Callable[[], object], what: str = "the condition", within_s: float = 30.0) -> None:
    """Let the loop run until something holds; fail, naming it, if it does not in time."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come about within {within_s} s"
        await asyncio.sleep(0.001)


def raising(error: BaseException) -> Callable[..., Any]:
    """Return a function that raises an error, whatever its arguments are."""

    def call(*_: object, **__: object) -> Any:
        raise error

    return call


def examples(count: int) -> int:
    """Return how many examples hypothesis is to try: so many, or fewer where its profile has fewer: `make test`."""
    from hypothesis import settings  # not in the processes that tests start

    return count * settings.default.max_examples // 100  # the latter is what it has without a profile


def tell_to_end(process: asyncio.subprocess.Process) -> None:
    """Send SIGTERM to a process unless it is over; its own method would take its exit code away from the loop."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGTERM)


@contextmanager
def descriptor_limit(soft: int) -> Iterator[None]:
    """Refuse this process descriptors from this number on, though it may have lower ones closed."""
    before, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, hard))


@contextmanager
def private_segments() -> Iterator[str]:
    """Name the segments of this process so that nothing beside it removes them as orphans; give the names' prefix."""
    import pytest  # not in the processes that tests start

    from aioshm.ring import segment

    prefix = f"private-{os.getpid()}-"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segment, "NAME_PREFIX", prefix)
        yield prefix


async def cancelled(task: asyncio.Future[Any]) -> None:
    """Cancel a task, and see that it ends so."""
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


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
    """A task that wants every turn of the loop, and counts the ``turns`` that it had."""

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


def forked(check: Callable[[Any], bool], kept: Any) -> Callable[[], bool]:
    """Fork a child that waits; return a function that lets the child check ``kept``, once, and returns the answer."""
    go, told = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        said = b"\0"
        try:
            os.read(go[0], 1)
            said = b"\1" if check(kept) else said
        finally:  # never into the parent's tests
            os.write(told[1], said)
            os._exit(0)

    def answer() -> bool:
        os.write(go[1], b"x")
        said = os.read(told[0], 1)
        os.waitpid(pid, 0)
        for fd in (*go, *told):
            os.close(fd)
        return said == b"\1"

    return answer
