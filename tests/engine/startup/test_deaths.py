"""Deaths of processes, noticed on the loop."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from startups import FakeProcess, addresses

from aioshm.engine import EngineStartupCoordinator
from aioshm.engine.startup.deaths import DeathWatch


async def test_a_sentinel_that_others_hold_open_hides_nothing() -> None:
    read, write = os.pipe()
    process = FakeProcess("EngineCore_0", "-c", "import time; time.sleep(1000)")
    pidfd, process.sentinel = process.sentinel, read
    died = asyncio.Event()
    watch = DeathWatch(asyncio.get_running_loop(), None, [process], died.set)
    try:
        await asyncio.sleep(0.02)
        assert not died.is_set()
        process.kill()
        await asyncio.wait_for(died.wait(), 2)
        assert [(each.name, each.exitcode) for each in watch.ended()] == [("EngineCore_0", -9)]
    finally:
        watch.stop()
        watch.stop()
        for descriptor in (read, write, pidfd):
            os.close(descriptor)


async def test_an_exit_code_that_somebody_else_took(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aioshm.engine.startup.deaths._CODE_WITHIN_S", 0.05)
    process = FakeProcess("EngineCore_0", "-c", "")
    stolen: Any = SimpleNamespace(name="X", pid=process.pid, exitcode=None, sentinel=process.sentinel)
    stolen = type("Stolen", (), vars(stolen))()
    died = asyncio.Event()
    watch = DeathWatch(asyncio.get_running_loop(), None, [stolen], died.set)
    await asyncio.wait_for(died.wait(), 5)
    assert [(each.name, each.exitcode) for each in watch.ended()] == [("X", None)]
    watch.stop()
    process.said()
    os.close(process.sentinel)


async def test_a_sentinel_that_tells_nothing_does_not_spin() -> None:
    read, write = os.pipe()
    os.close(write)
    looks = 0

    def finished_procs() -> dict[str, int]:
        nonlocal looks
        looks += 1
        return {}

    manager: Any = SimpleNamespace(sentinels=lambda: [read], finished_procs=finished_procs)
    died = asyncio.Event()
    watch = DeathWatch(asyncio.get_running_loop(), manager, [], died.set)
    await asyncio.sleep(0.3)
    assert looks < 20
    assert not died.is_set()
    watch.stop()
    os.close(read)


async def test_one_that_was_not_started_is_refused(path: str) -> None:
    process = multiprocessing.get_context("spawn").Process(target=print)
    with pytest.raises(ValueError, match="not started"):
        async with EngineStartupCoordinator(path, [], addresses(), coord_process=process):
            pass
    assert not Path(path.removeprefix("ipc://")).exists()


async def test_it_shares_the_sentinels() -> None:
    process = FakeProcess("EngineCore_0", "-c", "import time; time.sleep(1000)")
    loop = asyncio.get_running_loop()
    seen, died = asyncio.Event(), asyncio.Event()

    def mine() -> None:
        loop.remove_reader(process.sentinel)
        seen.set()

    loop.add_reader(process.sentinel, mine)
    watch = DeathWatch(loop, None, [process], died.set)
    process.kill()
    await asyncio.wait_for(asyncio.gather(seen.wait(), died.wait()), 5)
    watch.stop()
    os.close(process.sentinel)
