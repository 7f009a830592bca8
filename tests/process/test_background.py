"""Blocking calls in threads of their own."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
import threading
import time

import pytest
from support import eventually

from aioshm.process.background import in_thread, run_apart


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3), KeyboardInterrupt()], ids=repr)
async def test_errors_come_out_as_they_are(error: BaseException) -> None:
    def fail() -> None:
        raise error

    # Not awaited as a task, which would let these end the loop.
    with pytest.raises(type(error)) as caught:
        await in_thread(fail)
    assert caught.value is error
    with pytest.raises(type(error)) as caught:
        run_apart(fail, 20, TimeoutError())
    assert caught.value is error


async def test_a_stop_iteration_ends_no_generator() -> None:
    with pytest.raises(RuntimeError, match="StopIteration"):
        await in_thread(lambda: next(iter(())))


async def test_what_comes_after_a_cancellation_is_given_back() -> None:
    go_on = threading.Event()
    given_back: list[str] = []

    def work() -> str:
        go_on.wait(20)
        return "a resource"

    call = asyncio.ensure_future(in_thread(work, given_back.append))
    await asyncio.sleep(0.01)
    call.cancel()
    started = time.monotonic()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert time.monotonic() - started < 1
    go_on.set()
    while not given_back:
        await asyncio.sleep(0.001)
    assert given_back == ["a resource"]


async def test_what_comes_together_with_a_cancellation_is_given_back() -> None:
    taken: list[int] = []
    given_back: list[int] = []

    async def caller() -> None:
        taken.append(await in_thread(lambda: 1, given_back.append))

    for turns in range(20):
        call = asyncio.ensure_future(caller())
        await asyncio.sleep(0)
        time.sleep(0.002)  # it is done, and the loop does not know yet
        for _ in range(turns % 4):
            await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait({call})
    while len(taken) + len(given_back) < 20:
        await asyncio.sleep(0.001)
    assert taken
    assert given_back


def test_what_comes_after_the_loop_is_given_back() -> None:
    go_on = threading.Event()
    given_back: list[bool] = []

    async def leave() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(in_thread(lambda: go_on.wait(20), given_back.append), 0.01)

    asyncio.run(leave())
    go_on.set()
    eventually(lambda: given_back == [True])


def test_nobody_who_leaves_is_held_up() -> None:
    script = """
        import asyncio, threading
        from aioshm.process.background import in_thread

        async def main():
            try:
                await asyncio.wait_for(in_thread(threading.Event().wait), 0.05)
            except TimeoutError:
                print("left")

        asyncio.run(main())
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=20, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "left\n", "")


def test_run_apart_returns_or_gives_up() -> None:
    assert run_apart(lambda: threading.current_thread().name, 20, TimeoutError()) != threading.current_thread().name
    stuck = threading.Event()
    overdue = TimeoutError("too late")
    with pytest.raises(TimeoutError) as caught:
        run_apart(stuck.wait, 0.01, overdue)
    assert caught.value is overdue
    stuck.set()


async def test_run_apart_has_no_event_loop_there() -> None:
    assert run_apart(lambda: asyncio.run(asyncio.sleep(0, "ran")), 20, TimeoutError()) == "ran"
