"""Managed processes: started with what they need, watched, heard and stopped, with nothing left of them."""

from __future__ import annotations

import asyncio
import errno
import gc
import json
import os
import signal
import subprocess
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import engine_targets as targets
import pytest
from managed import gone, wait_for_all, wait_for_line
from support import cancelled, eventually

from aioshm.engine import CoreEngineProcManager
from aioshm.process import child
from aioshm.process.child import Child

pytestmark = pytest.mark.slow_on_uvloop

SLOW_MAIN = """
import os, sys, time
from aioshm.engine import CoreEngineProcManager

imported = sys.argv[1]
while __name__ == "__mp_main__" and not os.path.exists(imported):
    time.sleep(0.01)

def leave(dp_rank, local_dp_rank, padding):
    sys.exit(len(padding) != 4 << 20)

if __name__ == "__main__":
    with CoreEngineProcManager(leave, 1, padding=bytes(4 << 20)) as manager:
        open(imported, "w").close()
        while not manager.finished_procs():
            time.sleep(0.01)
        print("exited:", manager.finished_procs())
"""


class TestStarting:
    def test_engines_get_their_names_indices_and_arguments(self, tmp_path: Path) -> None:
        with CoreEngineProcManager(
            target_fn=targets.tell_arguments,
            local_engine_count=2,
            start_index=4,
            local_start_index=1,
            args=(str(tmp_path), "more"),
            local_client=True,
            handshake_address="ipc:///x",
        ) as manager:
            assert [process.name for process in manager.processes] == ["EngineCore_4", "EngineCore_5"]
            assert all(isinstance(process, BaseProcess) for process in manager.processes)
            eventually(lambda: len(manager.finished_procs()) == 2)
            assert manager.finished_procs() == {"EngineCore_4": 0, "EngineCore_5": 0}
        common = {"local_client": True, "handshake_address": "ipc:///x"}
        for rank, local_rank in ((4, 1), (5, 2)):
            assert json.loads((tmp_path / f"{rank}.json").read_text()) == {
                "args": ["more"],
                "kwargs": {**common, "dp_rank": rank, "local_dp_rank": local_rank},
            }

    def test_an_engine_needs_no_aioshm_to_be_imported(self) -> None:
        with CoreEngineProcManager(targets.tell_modules, 1) as manager:
            assert wait_for_line(manager, "EngineCore_0", "modules") == "[]"

    def test_start_returns_while_the_process_still_imports_the_main_script(self, tmp_path: Path) -> None:
        program = tmp_path / "main.py"
        program.write_text(SLOW_MAIN)
        done = subprocess.run(
            [sys.executable, str(program), str(tmp_path / "imported")], capture_output=True, text=True, timeout=60
        )
        assert done.stdout == "exited: {'EngineCore_0': 0}\n", done.stderr

    async def test_start_lets_the_loop_run_between_engines_and_leaves_none_when_cancelled(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        started: list[int] = []
        start = CoreEngineProcManager.start_engine

        def start_engine(manager: CoreEngineProcManager, rank: int) -> Child:
            process = start(manager, rank)
            started.append(process.pid or 0)
            return process

        monkeypatch.setattr(CoreEngineProcManager, "start_engine", start_engine)
        starting = asyncio.create_task(CoreEngineProcManager.start(targets.stay, 3, 5))
        while not started:
            await asyncio.sleep(0)
        await cancelled(starting)
        assert len(started) < 3
        assert all(map(gone, started))
        async with await CoreEngineProcManager.start(targets.stay, 2, 5, shutdown_timeout=0) as manager:
            assert [process.name for process in manager.processes] == ["EngineCore_5", "EngineCore_6"]

    def test_failed_start_kills_the_started_processes(
        self, monkeypatch: pytest.MonkeyPatch, nothing_kept: None
    ) -> None:
        started: list[subprocess.Popen[bytes]] = []
        start = subprocess.Popen

        def popen(*args: Any, **kwargs: Any) -> subprocess.Popen[bytes]:
            if len(started) == 2:
                raise OSError(errno.EAGAIN, "no more processes")
            started.append(start(*args, **kwargs))
            return started[-1]

        monkeypatch.setattr(child.subprocess, "Popen", popen)
        with pytest.raises(OSError, match="no more processes"):
            CoreEngineProcManager(targets.stay, 3)
        assert len(started) == 2
        assert all(gone(process.pid) for process in started)

    def test_process_that_exits_before_it_gets_its_arguments(
        self, monkeypatch: pytest.MonkeyPatch, nothing_kept: None
    ) -> None:
        command = child._command
        commands = iter([command, lambda _name, **_: [sys.executable, "-Sc", "raise SystemExit(4)"]])
        monkeypatch.setattr(child, "_command", lambda name, **handles: next(commands)(name, **handles))
        with CoreEngineProcManager(targets.say_and_stay, 2, padding=b"x" * 5_000_000) as manager:
            wait_for_line(manager, "EngineCore_0", "up")
            eventually(manager.finished_procs, "the exit of the other one")
            assert manager.finished_procs() == {"EngineCore_1": 4}

    @pytest.mark.parametrize(
        ("arguments", "error"),
        [
            ({"local_engine_count": -1}, ValueError),
            ({"local_engine_count": "2"}, TypeError),
            ({"start_index": -1}, ValueError),
            ({"local_start_index": 1.5}, TypeError),
            ({"shutdown_timeout": "5"}, TypeError),
            ({"shutdown_timeout": -1}, ValueError),
        ],
    )
    def test_bad_arguments_are_named(self, arguments: dict[str, Any], error: type[Exception]) -> None:
        ((name, _),) = arguments.items()
        with pytest.raises(error, match=name):
            CoreEngineProcManager(targets.stay, **{"local_engine_count": 1, **arguments})


class TestInterrupts:
    def test_processes_that_start_ignore_interrupts(self) -> None:
        with CoreEngineProcManager(targets.say_and_stay, 1) as manager:
            process = manager.processes[0]
            assert os.getpgid(process.pid or 0) != os.getpgid(0), "Ctrl-C in a terminal is not theirs"
            while process.exitcode is None and not manager.last_lines(process.name):
                os.kill(process.pid or 0, signal.SIGINT)
                time.sleep(0.001)
            os.kill(process.pid or 0, signal.SIGINT)
            assert manager.last_lines(process.name) == ["up 0"]
        assert process.exitcode == -signal.SIGTERM

    def test_programs_that_a_process_starts_heed_interrupts(self) -> None:
        with CoreEngineProcManager(targets.interrupt_another, 1) as manager:
            eventually(manager.finished_procs)
            assert manager.finished_procs() == {"EngineCore_0": signal.SIGINT}


class TestWatching:
    def test_shutdown_is_what_vllm_calls_closing(self) -> None:
        manager = CoreEngineProcManager(targets.refuse_to_end, 1, shutdown_timeout=60)
        wait_for_all(manager)
        manager.shutdown(timeout=0)
        assert manager.finished_procs() == {"EngineCore_0": -signal.SIGKILL}
        manager.shutdown()

    async def test_first_exit_ends_the_wait(self) -> None:
        async with CoreEngineProcManager(targets.leave, 3, codes=[None, 3, None]) as manager:
            assert await asyncio.gather(*(manager.join_first() for _ in range(2))) == [{"EngineCore_1": 3}] * 2
            assert manager.finished_procs() == {"EngineCore_1": 3}
            manager.close()
            manager.close()
        assert manager.finished_procs() == {"EngineCore_0": -15, "EngineCore_1": 3, "EngineCore_2": -15}

    async def test_closing_ends_the_wait(self) -> None:
        manager = CoreEngineProcManager(targets.stay, 2)
        wait = asyncio.create_task(manager.join_first())
        await asyncio.sleep(0)
        manager.close()
        assert set((await wait).values()) == {-signal.SIGTERM}


class TestStandardError:
    def test_is_passed_on_and_its_end_is_kept(self, capfd: pytest.CaptureFixture[str]) -> None:
        text = "\n".join(f"line {number}" for number in range(100))
        with CoreEngineProcManager(targets.leave, 1, codes=[0], text=text) as manager:
            eventually(manager.finished_procs)
            assert manager.last_lines("EngineCore_0") == text.splitlines()[-20:]
            assert manager.last_lines("EngineCore_0", 2) == ["line 98", "line 99"]
            with pytest.raises(ValueError, match="count must be at least 1"):
                manager.last_lines("EngineCore_0", 0)
        assert manager.last_lines("EngineCore_0", 1) == ["line 99"]
        assert text in capfd.readouterr().err

    def test_of_much_output_the_last_whole_lines_are_kept(self, capfd: pytest.CaptureFixture[str]) -> None:
        with CoreEngineProcManager(targets.chatter, 2, size=200_000) as manager:
            eventually(lambda: manager.finished_procs() == {"EngineCore_0": 0, "EngineCore_1": 0})
            assert manager.last_lines("EngineCore_1", 2) == ["x" * 99, "done"]
            assert all(line == "x" * 99 for line in manager.last_lines("EngineCore_1", 1000)[:-1])

    def test_a_standard_error_that_nobody_can_write_to(self, nothing_kept: None) -> None:
        kept = os.dup(2)
        try:
            os.close(2)
            with CoreEngineProcManager(targets.say_and_stay, 1) as manager:
                wait_for_all(manager)
            reader, writer = os.pipe()
            os.dup2(writer, 2)
            os.close(writer)
            os.close(reader)
            with CoreEngineProcManager(targets.say_and_stay, 1) as manager:
                wait_for_all(manager)
        finally:
            os.dup2(kept, 2)
            os.close(kept)


class TestStopping:
    async def test_closing_from_two_tasks_and_without_waiting(self) -> None:
        manager = CoreEngineProcManager(targets.end_politely, 2)
        wait_for_all(manager)
        first = asyncio.create_task(manager.aclose())
        await asyncio.sleep(0.02)
        await asyncio.gather(first, manager.aclose())
        await manager.aclose()
        manager.close()
        assert set(manager.finished_procs().values()) == {7}

    async def test_being_cancelled_at_every_step(self, nothing_kept: None) -> None:
        for delay_s in (None, 0, 0.02):
            manager = CoreEngineProcManager(targets.end_politely, 1, seconds=0.05)
            wait_for_all(manager)
            closing = asyncio.create_task(manager.aclose())
            if delay_s is not None:
                await asyncio.sleep(delay_s)
            closing.cancel()
            await asyncio.wait([closing])
            await manager.aclose()
            assert manager.processes[0].exitcode is not None

    async def test_children_that_an_engine_leaves_behind_are_killed(self) -> None:
        async with CoreEngineProcManager(targets.start_another_and_leave, 1, code=3) as manager:
            assert await manager.join_first() == {"EngineCore_0": 3}
            pid = int(wait_for_line(manager, "EngineCore_0", "started"))
            eventually(lambda: gone(pid), "the end of the child")


class TestForgetting:
    def test_warns_and_leaves_nothing(self, nothing_kept: None) -> None:
        manager = CoreEngineProcManager(targets.refuse_to_end, 2)
        wait_for_all(manager)
        pids = [process.pid for process in manager.processes]
        with pytest.warns(ResourceWarning, match="a CoreEngineProcManager was not closed"):
            del manager
            gc.collect()
        assert all(gone(pid or 0) for pid in pids)
