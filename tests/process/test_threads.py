"""Threads of this process, and calls on a loop whose thread has ended."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from aioshm.errors import EndClosed
from aioshm.process.limits import start_thread
from aioshm.process.loop_thread import LoopThread

pytestmark = [
    pytest.mark.timeout(60, func_only=True),
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
