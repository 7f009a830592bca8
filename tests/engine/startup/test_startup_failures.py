"""Startups that fail: each culprit is named, everything is stopped, and nothing is left."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from fake_process import FakeProcess
from served_engine import until
from startups import GOOD, LOADING, FakeManager, addresses, engine, managed, ready, starting, tasks
from support import cancelled

from aioshm.engine import CoreEngine, CoreEngineState, wait_for_engine_startup
from aioshm.engine.startup import coordinator as startup_module
from aioshm.errors import EngineStartupError, HandshakeError
from aioshm.process.proc import process_state

pytestmark = pytest.mark.slow_on_uvloop

READY = CoreEngineState.READY
WITHIN_S = 2.0
PHASES = ["before HELLO", "connected", "ready"]


def hold_stop(manager: FakeManager) -> tuple[asyncio.Event, asyncio.Event]:
    """Return an event that is set when the manager begins to stop its engines, and the event that lets the stop end."""
    stopping = asyncio.Event()
    go_on = asyncio.Event()

    async def aclose() -> None:
        stopping.set()
        await go_on.wait()

    manager.aclose = aclose  # type: ignore[method-assign]
    return stopping, go_on


async def test_forgotten_startup_warns(path: str) -> None:
    startup = starting(path)
    startup.open()
    router = startup._router
    assert router is not None
    router.pump.pause()  # as when the loop is closed
    with pytest.warns(ResourceWarning, match="was not closed"):
        del startup
        router._on_message = None  # type: ignore[assignment]
        await asyncio.sleep(0.01)
        gc.collect()
    assert not Path(path.removeprefix("ipc://")).exists()


class TestProcesses:
    @pytest.fixture
    async def sleeper(self) -> Any:
        process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(1000,), name="DPCoordinator")
        process.start()
        yield process
        process.kill()
        process.join()
        process.close()

    async def test_coordinator_is_watched_and_stopped_with_the_rest(self, path: str, sleeper: Any) -> None:
        with pytest.raises(EngineStartupError, match="no progress"):
            await wait_for_engine_startup(
                path, addresses(), [CoreEngine(0)], None, coord_process=sleeper, progress_timeout=0.05
            )
        assert sleeper.exitcode is not None
        with pytest.raises(EngineStartupError, match=rf"DPCoordinator \(pid {sleeper.pid}\) was killed by SIGTERM"):
            async with starting(path, coordinator=sleeper) as startup:
                await startup.wait(20)

    async def test_a_watched_process(self, path: str, sleeper: Any) -> None:
        sleeper.name = "ApiServer_0"
        startup = starting(path, watched_processes=[sleeper], progress_timeout=0.05)
        async with startup:
            with pytest.raises(EngineStartupError, match="no progress"):
                await startup.wait()
        assert sleeper.is_alive(), "it belongs to somebody else"
        async with starting(path, watched_processes=[sleeper]) as startup:
            sleeper.terminate()
            with pytest.raises(EngineStartupError, match=r"ApiServer_0 .* was killed by SIGTERM") as caught:
                await startup.wait(20)
        assert caught.value.failed == {"ApiServer_0": -15}

    async def test_ready_is_not_enough_for_the_dead(self, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
        async with managed(path, ("ready", "exit 0")) as manager:
            async with starting(path, 1, manager) as startup:
                exitcode = FakeProcess.exitcode.fget
                assert exitcode is not None

                def exited_once_ready(process: FakeProcess) -> int | None:
                    if startup.handshake.complete:
                        process.said()  # until its exit: READY and that are seen at the same moment
                    return exitcode(process)

                monkeypatch.setattr(FakeProcess, "exitcode", property(exited_once_ready))
                with pytest.raises(EngineStartupError, match="exited with code 0"):
                    await startup.wait(20)

    @pytest.mark.parametrize(
        ("last_words", "error", "text"),
        [
            (msgspec.msgpack.encode({"status": "READY", "local": True}), EngineStartupError, r", ready\) was killed"),
            (b"\xc1", HandshakeError, "engine 0 in state CONNECTED: undecodable payload.*it came from pid 1"),
        ],
        ids=["ready", "nonsense"],
    )
    async def test_last_words_are_heard_after_the_exit_was_seen(
        self, path: str, last_words: bytes, error: type[Exception], text: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(startup_module, "SETTLE_S", 0.5)
        connected = asyncio.Event()
        async with managed(path, LOADING) as manager:
            async with starting(path, 1, manager, on_progress=lambda _: connected.set()) as startup:
                waiting = asyncio.create_task(startup.wait())
                await connected.wait()
                manager.processes[0].kill()
                await until(lambda: manager.processes[0].exitcode is not None)
                startup.take(b"\0\0", [last_words], "pid 1")
                with pytest.raises(EngineStartupError, match=text) as caught:
                    await waiting
        assert type(caught.value) is error
        assert caught.value.failed == {"EngineCore_0": -9}

    @pytest.mark.parametrize("behaviour", [LOADING, GOOD])
    async def test_leaving_stops_them_unless_all_were_ready(self, path: str, behaviour: tuple[str, str]) -> None:
        async with managed(path, behaviour) as manager:
            with pytest.raises(ZeroDivisionError):
                async with starting(path, 1, manager) as startup:
                    if behaviour is GOOD:
                        await startup.wait()
                    raise ZeroDivisionError
            assert manager.closes == (behaviour is LOADING)

    async def test_the_least_of_managers(self, path: str) -> None:
        """Only processes, and a close that blocks, as vLLM's own manager has."""
        async with managed(path, ("before HELLO", "exit 3")) as fake:
            fake.processes[0].said()  # dead before the startup
            manager = SimpleNamespace(processes=fake.processes, close=Mock())
            with pytest.raises(EngineStartupError, match=r"EngineCore_0 \(pid \d+, before HELLO\) exited with code 3"):
                await ready(path, 1, manager)
            assert manager.close.called

    async def test_cancellation_does_not_interrupt_the_stop(self, path: str) -> None:
        async with managed(path, LOADING) as manager:
            stopping, go_on = hold_stop(manager)
            waiting = asyncio.create_task(ready(path, 1, manager, progress_timeout=0.05))
            await stopping.wait()
            for _ in range(3):
                waiting.cancel()
                await asyncio.sleep(0.01)
                assert not waiting.done()
            go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await waiting

    async def test_wait_that_is_cancelled_or_times_out_during_the_stop_may_be_repeated(self, path: str) -> None:
        async with managed(path, LOADING) as manager:
            stopping, go_on = hold_stop(manager)
            async with starting(path, 1, manager, progress_timeout=0.05) as startup:
                waiting = asyncio.create_task(startup.wait(20))
                await stopping.wait()
                await cancelled(waiting)
                late = asyncio.create_task(startup.wait(0.01))
                await asyncio.wait([late], timeout=0.05)
                go_on.set()
                for again in (late, startup.wait(20)):
                    with pytest.raises(EngineStartupError, match="no progress"):
                        await again

    async def test_cancelled_at_every_moment(self, path: str) -> None:
        """However far it has got, nothing is left, and the manager is closed unless all were ready."""
        for turns in range(0, 60, 3):
            closed = False

            async def aclose() -> None:
                nonlocal closed
                closed = True

            manager: Any = SimpleNamespace(processes=[], aclose=aclose)
            core = CoreEngine(0)
            async with tasks(engine(path, 0)):
                waiting = asyncio.create_task(ready(path, [core], manager))
                for _ in range(turns):
                    await asyncio.sleep(0.0003)
                waiting.cancel()
                outcome = (await asyncio.gather(waiting, return_exceptions=True))[0]
            if isinstance(outcome, asyncio.CancelledError):
                assert closed or turns == 0 or core.state is READY
            else:
                assert core.state is READY
                assert not closed
            assert not Path(path.removeprefix("ipc://")).exists()


# Processes that go wrong at every phase: each is named, soon, and everything is stopped


@pytest.mark.parametrize(
    ("phase", "fault", "code", "text"),
    [
        ("before HELLO", "exit 3", 3, "exited with code 3"),
        ("connected", "SIGKILL", -9, "was killed by SIGKILL"),
        ("ready", "exit 3", 3, "exited with code 3"),
    ],
)
async def test_a_process_that_ends(path: str, phase: str, fault: str, code: int, text: str) -> None:
    async with managed(path, LOADING, (phase, fault)) as manager:
        started = [CoreEngine(0), CoreEngine(1)]
        with pytest.raises(EngineStartupError) as caught:
            await ready(path, started, manager)
        arrived = time.monotonic()
        assert not Path(path.removeprefix("ipc://")).exists(), "the address is free again"
        assert manager.closes == 1
        assert all(process.exitcode is not None for process in manager.processes), "nothing runs any more"
        assert arrived - float(manager.processes[1].said()[0]) < WITHIN_S
        error = caught.value
        assert type(error) is EngineStartupError
        assert error.failed == {"EngineCore_1": code}
        pid = manager.processes[1].pid
        found = re.match(rf"engine startup failed: EngineCore_1 \(pid {pid}, ([\w ]+)\) {text} \(\d of 2", str(error))
        # A process that is killed takes with it what it has not sent yet.
        assert found, str(error)
        assert found[1] in (PHASES if fault == "SIGKILL" else [phase])
        assert "EngineCore_1's stderr:\n  the last words of engine 1" in str(error)
        assert started[0].state is not READY


async def test_a_message_that_is_refused(path: str) -> None:
    async with managed(path, LOADING) as manager:
        async with starting(path, 2, manager) as startup:
            culprit = manager.start("before HELLO", "wrong rank")
            text = r"engine 8 \(identity 0800\).*expected one of engines 0, 1"
            with pytest.raises(HandshakeError, match=text) as caught:
                await startup.wait()
            arrived = time.monotonic()
            assert caught.value.engine == 8
            assert f"; it came from pid {culprit.pid} (" in str(caught.value)
            assert manager.closes == 1
            assert arrived - float(culprit.said()[0]) < WITHIN_S


async def test_a_process_that_hangs(path: str) -> None:
    async with managed(path, GOOD, ("connected", "SIGSTOP")) as manager:
        pid = manager.processes[1].pid
        async with starting(path, 2, manager, progress_timeout=0.3) as startup:
            await until(lambda: process_state(pid) == "stopped" and startup.progress.ready == 1)
            began = time.monotonic()
            with pytest.raises(EngineStartupError) as caught:
                await startup.wait()
            assert 0.3 <= time.monotonic() - began < 0.3 + WITHIN_S
        assert caught.value.failed == {}
        assert re.match(
            rf"engine startup failed: no progress for 0\.3 s; EngineCore_1 \(pid {pid}\) is stopped "
            rf"\(2 of 2 engines connected, 1 ready; waiting for engines 1 \(pid {pid}, connected, \d s\)\)",
            str(caught.value),
        ), str(caught.value)
        assert None not in [process.exitcode for process in manager.processes]


async def test_simultaneous_exits_are_all_named(path: str) -> None:
    async with managed(path, LOADING, LOADING, LOADING) as manager:
        heard = asyncio.Event()
        async with starting(
            path, 3, manager, on_progress=lambda progress: heard.set() if progress.connected == 3 else None
        ) as startup:
            await heard.wait()
            manager.processes[0].kill()
            manager.processes[2].kill()
            with pytest.raises(EngineStartupError, match=r"EngineCore_0 .* EngineCore_2 .*") as caught:
                await startup.wait()
        assert caught.value.failed == {"EngineCore_0": -9, "EngineCore_2": -9}
