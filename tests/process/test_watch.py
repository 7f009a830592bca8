"""The exits of processes, noticed by an event loop."""

from __future__ import annotations

import asyncio
import errno
import multiprocessing
import os
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from fake_process import FakeProcess

from aioshm.process.watch import ProcessWatch

SLEEP = "import time; time.sleep(1000)"


async def test_sentinel_that_another_process_holds_open_hides_no_exit() -> None:
    read, write = os.pipe()
    process = FakeProcess("EngineCore_0", "-c", SLEEP)
    pidfd, process.sentinel = process.sentinel, read
    died = asyncio.Event()
    with ProcessWatch([process], on_exit=died.set) as watch:
        await asyncio.sleep(0.02)
        assert not died.is_set()
        process.kill()
        await asyncio.wait_for(died.wait(), 20)
        assert [(each.name, each.exitcode) for each in watch.exited()] == [("EngineCore_0", -9)]
    watch.close()
    for descriptor in (read, write, pidfd):
        os.close(descriptor)


async def test_exit_whose_code_another_part_of_the_program_has_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aioshm.process.watch._CODE_WITHIN_S", 0.05)
    process = FakeProcess("EngineCore_0", "-c", "")
    stolen: Any = type("Stolen", (), {"name": "X", "pid": process.pid, "exitcode": None, "sentinel": process.sentinel})
    with ProcessWatch([stolen()]) as watch:
        assert [(each.name, each.exitcode) for each in await watch.next()] == [("X", None)]
    process.said()
    os.close(process.sentinel)


class Elsewhere:
    """A process whose exit code cannot be known."""

    name, pid, exitcode, host = "EngineCore_1", 7, None, "10.0.0.6"

    def __init__(self) -> None:
        self.sentinel, self._open = os.pipe()

    def end(self) -> None:
        os.close(self._open)

    def release(self) -> None:
        os.close(self.sentinel)
        self.sentinel = -1


async def test_process_of_another_host_has_exited_when_its_sentinel_is_readable() -> None:
    process = Elsewhere()
    with ProcessWatch(manager=SimpleNamespace(processes=[process])) as watch:  # type: ignore[arg-type]
        assert not await watch.next(asyncio.get_running_loop().time() + 0.05)
        process.end()
        (found,) = await watch.next()
        assert found.describe("ready") == "EngineCore_1 (pid 7 on 10.0.0.6, ready) exited; its exit code is not known"
        assert found.managed
        process.release()
        assert not watch.running
    with ProcessWatch([process]) as watch:  # what gives it back knows that it has exited
        assert [each.name for each in await watch.next()] == ["EngineCore_1"]


async def test_process_that_was_not_started_is_refused() -> None:
    process = multiprocessing.get_context("spawn").Process(target=print)
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(ValueError, match="not started"):
        ProcessWatch([process])
    assert set(os.listdir("/proc/self/fd")) == before


async def test_exits_are_awaited_one_after_the_other() -> None:
    first, second = (FakeProcess(name, "-c", SLEEP) for name in ("first", "second"))
    loop = asyncio.get_running_loop()
    shared = asyncio.Event()

    def mine() -> None:  # another watcher of the same descriptor
        loop.remove_reader(first.sentinel)
        shared.set()

    loop.add_reader(first.sentinel, mine)
    with ProcessWatch([first, second]) as watch:
        assert await watch.next(loop.time() + 0.01) == []
        waiting = asyncio.ensure_future(watch.next())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        first.kill()
        [found] = await watch.next()
        assert found.describe() == f"first (pid {first.pid}) was killed by SIGKILL"
        await asyncio.wait_for(shared.wait(), 20)
        assert not await watch.all_exited(loop.time() + 0.01)
        assert watch.running
        second.kill()
        assert await watch.all_exited()
        assert not watch.running
        assert await watch.next() == []
    for process in (first, second):
        os.close(process.sentinel)


async def test_exit_is_noticed_without_a_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> int:
        raise OSError(errno.EMFILE, "none left")

    process = FakeProcess("one", "-c", SLEEP)
    monkeypatch.setattr(os, "dup", refuse)
    monkeypatch.setattr(os, "pidfd_open", refuse)
    with ProcessWatch([process]) as watch:
        monkeypatch.undo()
        process.kill()
        assert [each.exitcode for each in await watch.next()] == [-9]
    os.close(process.sentinel)


RAISED = ["Traceback (most recent call last):", '  File "a.py", line 1, in <module>', "    f()", "    ^^^"]


@pytest.mark.slow_on_uvloop
@pytest.mark.parametrize(
    ("code", "lines", "text"),
    [
        ("raise SystemExit(1)", [*RAISED, "KeyError: 'a'", "", "  "], "exited with code 1: KeyError: 'a'"),
        ("raise SystemExit(3)", [], "exited with code 3"),
        ("raise SystemExit(3)", OSError("no lines"), "exited with code 3"),
        ("raise SystemExit(0)", ["all is well"], "exited with code 0"),
        ("raise SystemExit(1)", [*RAISED, "E: ", "  one", " ", "  two", ""], "exited with code 1: E: one ... two"),
        ("raise SystemExit(1)", ["| " + line for line in (*RAISED, "E: no", "+---")], "exited with code 1: E: no"),
        ("raise SystemExit(3)", [*RAISED, "E: no", "I give up"], "exited with code 3: I give up"),
        ("import os; os.abort()", ["what():  oh"], "was killed by SIGABRT; last line of its stderr: what():  oh"),
    ],
)
async def test_exit_of_a_managed_process_names_the_last_line_of_its_stderr(
    code: str, lines: list[str] | Exception, text: str
) -> None:
    process = FakeProcess("one", "-c", code)
    last_lines = Mock(return_value=lines) if isinstance(lines, list) else Mock(side_effect=lines)
    with ProcessWatch(manager=SimpleNamespace(processes=[process], last_lines=last_lines)) as watch:
        [found] = await watch.next()
    assert found.describe() == f"one (pid {process.pid}) {text}"
    process.said()
    os.close(process.sentinel)
