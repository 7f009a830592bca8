"""Threads that end before they begin, or before they have told what they did, keep nobody waiting."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
import threading
from typing import Any

import pytest

from aioshm.errors import EndClosed, OutOfThreads
from aioshm.process import background
from aioshm.process.background import in_thread
from aioshm.process.limits import start_thread
from aioshm.process.loop_thread import LoopThread

pytestmark = [
    pytest.mark.timeout(60, func_only=True),
    # What ends a thread is told on the standard error.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),
]


@pytest.mark.parametrize("daemon", [True, False], ids=["daemon", "waited for"])
def test_a_thread_runs_and_has_its_name(daemon: bool) -> None:
    seen: list[Any] = []
    thread = start_thread(seen.append, "an argument", name="aioshm-test", what="a test", daemon=daemon)
    assert (thread.name, thread.daemon) == ("aioshm-test", daemon)
    thread.join(20)
    assert seen == ["an argument"]
    assert not thread.is_alive()
    with pytest.raises(RuntimeError, match="once"):
        thread.start()


def test_a_thread_that_ends_before_it_begins_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(thread: threading.Thread) -> None:
        raise MemoryError

    before = threading.enumerate()
    ran: list[int] = []
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "_bootstrap", no_memory)
        with pytest.raises(OutOfThreads, match=r"^a test needs another thread.*memory"):
            start_thread(ran.append, 1, name="aioshm-test", what="a test")
    assert threading.enumerate() == before
    start_thread(ran.append, 2, name="aioshm-test", what="a test").join(20)
    assert ran == [2]


@pytest.mark.skipif(sys.platform != "linux", reason="limits address space as Linux does")
def test_with_every_size_of_memory_a_thread_begins_or_is_refused() -> None:
    # A stack of 8 MiB is 2,048 pages and its guard: with some pages more than that a thread is there, and its first
    # frame finds no memory. Which limits do that depends on what else is free, so a run of them is tried.
    code = """
        import os, resource, signal, threading
        from aioshm.errors import OutOfThreads
        from aioshm.process.limits import start_thread

        def outcome(pages):
            size = int(open("/proc/self/statm").read().split()[0])
            resource.setrlimit(resource.RLIMIT_AS, ((size + pages) * resource.getpagesize(),) * 2)
            refused = 0
            for _ in range(3):
                try:
                    start_thread(threading.Event().wait, name="aioshm-test", what="a test")
                except OutOfThreads:
                    refused = 1
            os._exit(refused)

        threading.stack_size(8 << 20)
        codes = []
        for pages in (0, *range(2040, 2080, 2), 20000):
            pid = os.fork()
            if not pid:
                signal.alarm(20)
                outcome(pages)
            codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        assert codes[0] == 1 and codes[-1] == 0, codes
        assert set(codes) == {0, 1}, codes
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "MemoryError" in done.stderr  # of those that began to be, and could not


async def test_work_that_cannot_tell_that_it_is_done_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(background, "RECHECK_S", 0.01)
    monkeypatch.setattr(asyncio.get_running_loop(), "call_soon_threadsafe", no_memory, raising=False)
    assert await in_thread(lambda: "a value") == "a value"


async def test_work_that_ends_with_its_thread_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(background, "RECHECK_S", 0.01)
    monkeypatch.setattr(background, "_settle", no_memory)
    with pytest.raises(MemoryError, match="ended for want of memory"):
        await in_thread(lambda: "a value")


def test_call_on_a_loop_whose_thread_ends_is_an_error() -> None:
    thread = LoopThread("a test")
    blocked = threading.Event()

    def end() -> None:
        blocked.wait(20)
        raise SystemExit

    async def forever() -> None:
        await asyncio.Event().wait()

    thread.loop.call_soon_threadsafe(end)
    threading.Timer(0.1, blocked.set).start()
    with pytest.raises(EndClosed, match=r"the thread of a test has ended"):
        thread.run(forever)
    with pytest.raises(EndClosed):
        thread.do(blocked.set)
    thread.end()
