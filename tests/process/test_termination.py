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


@pytest_asyncio.fixture
async def termination() -> AsyncIterator[Termination]:
    """Give the termination of the test's task."""
    assert is_default()
    made = Termination()
    yield made
    made.disarm()
    assert is_default()


def armed(termination: Termination) -> None:
    """Let SIGTERM cancel the calling task."""
    termination._task = asyncio.current_task()
    termination.arm()


async def test_task_that_blocks_the_loop_is_interrupted_once_by_sigterm(termination: Termination) -> None:
    armed(termination)
    termination.interrupts = True
    with pytest.raises(SystemExit) as caught:
        signal.raise_signal(signal.SIGTERM)
    assert caught.value.code == TERMINATED
    termination.interrupts = False
    signal.raise_signal(signal.SIGTERM)
    await asyncio.sleep(0.01)  # no cancellation comes behind either
    assert termination.take_back()


async def test_sigterm_that_is_ignored_leaves_the_next_one_to_the_system(termination: Termination) -> None:
    armed(termination)
    termination.interrupts = True
    termination.ignored = True
    signal.raise_signal(signal.SIGTERM)
    await until(is_default)
    assert not termination.came


@pytest.mark.one_loop
async def test_handler_of_the_program_is_left_alone(termination: Termination) -> None:
    def handler(*_: object) -> None: ...

    before = signal.signal(signal.SIGTERM, handler)
    try:
        armed(termination)
        assert signal.getsignal(signal.SIGTERM) is handler
        termination.disarm()
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
async def test_forked_child_is_ended_by_sigterm_and_its_parent_is_not(termination: Termination) -> None:
    armed(termination)
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
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM
    await asyncio.sleep(0.01)
    assert not termination.came
