"""Blocking calls in threads of their own, and the thread of an event loop."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
import time

import pytest
from support import until

from aioshm.errors import EndClosed, OutOfThreads
from aioshm.process import loop_thread
from aioshm.process.background import in_thread, run_apart
from aioshm.process.limits import start_thread
from aioshm.process.loop_thread import LoopThread


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


async def test_result_that_arrives_after_or_with_a_cancellation_is_released() -> None:
    released: list[str] = []
    finish = threading.Event()
    call = asyncio.ensure_future(in_thread(lambda: finish.wait(20) and "late", released.append))
    await asyncio.sleep(0.01)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(call, 1)
    finish.set()
    await until(lambda: released == ["late"])
    taken: list[str] = []

    async def take() -> None:
        taken.append(await in_thread(lambda: "item", released.append))

    for turns in range(20):
        taking = asyncio.ensure_future(take())
        await asyncio.sleep(0)
        time.sleep(0.002)  # the function returns, and the loop does not know yet
        for _ in range(turns % 4):
            await asyncio.sleep(0)
        taking.cancel()
        await asyncio.wait({taking})
    await until(lambda: len(taken) + len(released) == 21)
    assert taken
    assert "item" in released


def test_stuck_function_does_not_keep_the_process_alive() -> None:
    script = """if True:
        import asyncio, threading
        from aioshm.process.background import in_thread

        async def main():
            try:
                await asyncio.wait_for(in_thread(threading.Event().wait), 0.05)
            except TimeoutError:
                print("left")

        asyncio.run(main())
    """
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "left\n", "")


async def test_function_with_a_timeout_runs_without_the_loop_or_is_left() -> None:
    assert run_apart(lambda: asyncio.run(asyncio.sleep(0, "ran")), 20, TimeoutError()) == "ran"
    stuck = threading.Event()
    overdue = TimeoutError("too late")
    with pytest.raises(TimeoutError) as caught:
        run_apart(stuck.wait, 0.01, overdue)
    assert caught.value is overdue
    stuck.set()


def test_thread_that_cannot_be_started_is_an_error_that_names_its_purpose(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(OutOfThreads, match=r"^a test needs another thread"):
        start_thread(print, name="aioshm-test", what="a test")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_call_on_a_loop_whose_thread_ends_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_thread, "ALIVE_CHECK_S", 0.05)
    thread = LoopThread("a test")
    blocked = threading.Event()

    def end() -> None:
        blocked.wait(20)
        raise SystemExit

    thread.loop.call_soon_threadsafe(end)
    threading.Timer(0.1, blocked.set).start()
    with pytest.raises(EndClosed, match=r"the thread of a test has ended"):
        thread.run(asyncio.Event().wait)
    with pytest.raises(EndClosed):
        thread.do(blocked.set)
    thread.stop()


def test_further_signals_do_not_interrupt_the_end_of_an_interrupted_call() -> None:
    class Interrupted(Exception):
        pass

    handled: list[int] = []
    ended = threading.Event()
    running = True

    def handle(number: int, _frame: object) -> None:
        handled.append(number)
        if running:
            raise Interrupted

    def send() -> None:
        seen = len(handled)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        while len(handled) == seen:  # not awaited: the call may be cancelled again
            time.sleep(0.001)

    async def end_slowly() -> None:
        try:
            send()
            await asyncio.sleep(20)
        finally:
            for _ in range(3):
                send()
            ended.set()

    thread = LoopThread("a test")
    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with pytest.raises(Interrupted):
            thread.run(end_slowly)
        running = False
        had_ended = ended.is_set()
        assert ended.wait(20)
    finally:
        signal.signal(signal.SIGUSR1, before)
        thread.stop()
    assert had_ended
    assert len(handled) == 4
