"""SIGTERM as the end of a task, on the loop of the main thread."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from support import until

from aioshm.process.stopping import TERMINATED, Termination


def is_default() -> bool:
    return signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest_asyncio.fixture(autouse=True)
async def default_again() -> AsyncIterator[None]:
    assert is_default()
    yield
    assert is_default()


async def test_task_that_waits_is_cancelled_by_sigterm() -> None:
    async def work() -> bool:
        termination = Termination()
        termination.arm()
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(100)
        except asyncio.CancelledError:
            return termination.take_back() and termination.came
        finally:
            termination.disarm()
        return False

    task = asyncio.create_task(work())
    assert await task
    assert task.cancelling() == 0


async def test_task_that_holds_up_the_loop_is_interrupted_once_by_sigterm() -> None:
    async def work() -> list[object]:
        termination = Termination()
        termination.arm()
        termination.interrupts = True
        found: list[object] = []
        try:
            signal.raise_signal(signal.SIGTERM)
        except SystemExit as end:
            termination.interrupts = False
            found = [end.code]
        await asyncio.sleep(0.01)  # no cancellation comes behind it
        signal.raise_signal(signal.SIGTERM)
        await asyncio.sleep(0.01)
        found.append(termination.take_back())
        termination.disarm()
        return found

    assert await asyncio.create_task(work()) == [TERMINATED, True]


async def test_sigterm_that_is_ignored_leaves_the_next_one_to_the_system() -> None:
    async def work() -> None:
        termination = Termination()
        termination.arm()
        termination.interrupts = termination.ignored = True
        signal.raise_signal(signal.SIGTERM)
        await until(is_default)
        assert not termination.came

    await asyncio.create_task(work())


async def test_cancellation_that_is_not_sigterms_is_not_taken_back() -> None:
    async def work() -> bool:
        termination = Termination()
        termination.arm()
        try:
            await asyncio.sleep(100)
        except asyncio.CancelledError:
            return termination.take_back()
        finally:
            termination.disarm()
        return True

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    assert not await task


@pytest.mark.one_loop
async def test_handler_of_the_program_is_left_alone() -> None:
    def handler(*_: object) -> None: ...

    before = signal.signal(signal.SIGTERM, handler)
    try:
        termination = Termination()
        termination.arm()
        assert signal.getsignal(signal.SIGTERM) is handler
        termination.disarm()
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
async def test_forked_child_is_ended_by_sigterm_and_its_parent_is_not() -> None:
    async def work() -> int:
        termination = Termination()
        termination.arm()
        termination.interrupts = True
        reader, writer = os.pipe()
        pid = os.fork()
        if not pid:
            os.write(writer, b"!")  # a signal that came before would be lost, as with any handler of Python's
            time.sleep(20)
            os._exit(0)
        os.read(reader, 1)
        os.close(reader)
        os.close(writer)
        os.kill(pid, signal.SIGTERM)
        status = os.waitpid(pid, 0)[1]
        await asyncio.sleep(0.01)  # a byte that the child has left for the loop is read
        assert not termination.came
        termination.disarm()
        return os.waitstatus_to_exitcode(status)

    assert await asyncio.create_task(work()) == -signal.SIGTERM
