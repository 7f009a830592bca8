"""Engines in processes of their own that go wrong at every phase: each is named, soon, and everything is stopped."""

from __future__ import annotations

import asyncio
import re
import time

import pytest
from served_engine import until
from startups import GOOD, LOADING, FakeManager, managed, ready, starting

from aioshm.engine import (
    CoreEngine,
    CoreEngineState,
)
from aioshm.errors import EngineStartupError, HandshakeError
from aioshm.process.proc import process_state

pytestmark = pytest.mark.slow_on_uvloop

WITHIN_S = 2.0
PHASES = ["before HELLO", "connected", "ready"]


def engines(count: int) -> list[CoreEngine]:
    return [CoreEngine(rank) for rank in range(count)]


async def failure(manager: FakeManager, path: str) -> tuple[EngineStartupError, list[CoreEngine]]:
    expected = engines(len(manager.processes))
    with pytest.raises(EngineStartupError) as caught:
        await ready(path, expected, manager)
    arrived = time.monotonic()
    assert manager.closes == 1
    assert all(process.exitcode is not None for process in manager.processes), "nothing runs any more"
    said, _ = manager.processes[-1].said()
    assert arrived - float(said) < WITHIN_S
    return caught.value, expected


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(
    ("fault", "code", "text"),
    [
        ("exit 0", 0, "exited with code 0"),
        ("exit 3", 3, "exited with code 3"),
        ("SIGKILL", -9, "was killed by SIGKILL"),
    ],
)
async def test_a_process_that_ends(path: str, phase: str, fault: str, code: int, text: str) -> None:
    async with managed(path, LOADING, (phase, fault)) as manager:
        error, started = await failure(manager, path)
        assert type(error) is EngineStartupError
        assert error.failed == {"EngineCore_1": code}
        pid = manager.processes[1].pid
        found = re.match(rf"engine startup failed: EngineCore_1 \(pid {pid}, ([\w ]+)\) {text} \(\d of 2", str(error))
        # A process that is killed takes with it what it has not sent yet.
        assert found, str(error)
        assert found[1] in (PHASES if fault == "SIGKILL" else [phase])
        assert "EngineCore_1's stderr:\n  the last words of engine 1" in str(error)
        assert started[0].state is not CoreEngineState.READY


@pytest.mark.parametrize(
    ("phase", "fault", "rank", "text"),
    [
        ("before HELLO", "garbage", 1, "engine 1 in state NEW: undecodable payload.*expected HELLO"),
        ("before HELLO", "two frames", 1, "engine 1 in state NEW: a message of 2 payload frames, expected one"),
        ("connected", "garbage", 1, "engine 1 in state CONNECTED: undecodable payload.*expected READY"),
        ("ready", "again", 1, "engine 1 in state READY: READY came again, expected nothing more"),
        ("before HELLO", "wrong rank", 8, r"engine 8 \(identity 0800\).*expected one of engines 0, 1"),
        ("before HELLO", "duplicate rank", 0, "engine 0 in state (CONNECTED|READY): HELLO came again, expected"),
    ],
)
async def test_a_message_that_is_refused(path: str, phase: str, fault: str, rank: int, text: str) -> None:
    heard = asyncio.Event()
    async with managed(path, LOADING) as manager:
        async with starting(path, 2, manager, on_progress=lambda _: heard.set()) as startup:
            await heard.wait()  # else which of two with one rank comes first is anybody's guess
            culprit = manager.start(phase, fault)
            with pytest.raises(HandshakeError, match=text) as caught:
                await startup.wait()
            arrived = time.monotonic()
            assert caught.value.engine == rank
            assert f"; it came from pid {culprit.pid} (" in str(caught.value)
            assert manager.closes == 1
            assert arrived - float(culprit.said()[0]) < WITHIN_S


async def test_hashes_that_differ(path: str) -> None:
    async with managed(path, GOOD, ("before HELLO", "hash mismatch")) as manager:
        error, _ = await failure(manager, path)
        assert isinstance(error, HandshakeError)
        assert re.search(
            r"engine [01] in state CONNECTED: its parallel_config_hash is '(bad|good)', expected", str(error)
        )
        assert "that of engine" in str(error)


@pytest.mark.parametrize("phase", PHASES[:2])
async def test_a_process_that_hangs(path: str, phase: str) -> None:
    async with managed(path, GOOD, (phase, "SIGSTOP")) as manager:
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
            rf"\([12] of 2 engines connected, 1 ready; waiting for engines 1 \(pid {pid}, {phase}, \d s\)\)",
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
