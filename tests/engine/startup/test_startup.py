"""Startups with engines that are tasks: what is reported, what is waited for."""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from startups import ADDRESSES, GOOD, addresses, engine, managed, ready_with, starting, tasks
from support import cancelled

from aioshm.engine import (
    CoreEngine,
    CoreEngineState,
    StartupProgress,
    get_engine_client_zmq_addr,
    wait_for_engine_startup,
)
from aioshm.errors import EngineStartupError, RoleError

pytestmark = pytest.mark.slow_on_uvloop

ANY = "tcp://127.0.0.1:0"


@pytest.fixture(params=["ipc", "tcp"])
def address(request: pytest.FixtureRequest, runtime_dir: Path) -> str:
    return get_engine_client_zmq_addr(request.param == "ipc", "127.0.0.1")


class TestSuccess:
    async def test_the_report(self, address: str, runtime_dir: Path) -> None:
        engines = [CoreEngine(rank, local=rank < 3) for rank in range(4)]
        told: list[Any] = []

        async def initialize(metadata: Any) -> dict[str, Any]:
            told.append(metadata)
            await asyncio.sleep(0)
            return {"num_gpu_blocks": 7, "parallel_config_hash": "h", "max_model_len": 99}

        where = addresses()
        async with starting(address, engines, where=where, parallel_config={"data_parallel_size": 4}) as startup:
            assert not startup.handshake_address.endswith(":0")
            async with tasks(
                *(engine(startup.handshake_address, rank, initialize=initialize) for rank in range(3)),
                engine(
                    startup.handshake_address, 3, local=False, headless=True,
                    initialize=ready_with(num_gpu_blocks=1, dp_stats_address="tcp://stats"),
                ),
            ) as running:  # fmt: skip
                report = await startup.wait(20)
                assert await startup.wait(20) is report
                await asyncio.gather(*running)
        assert [each.state for each in engines] == [CoreEngineState.READY] * 4
        assert (report.num_gpu_blocks, report.parallel_config_hash, report.stats_address) == (22, "h", "tcp://stats")
        assert sorted(report.engines) == [0, 1, 2, 3]
        assert report.engines[1].ready["max_model_len"] == 99
        assert report.engines[3].hello == {"status": "HELLO", "local": False, "headless": True}
        assert where.frontend_stats_publish_address == "tcp://stats"
        assert len(told) == 3
        assert told[0].addresses.inputs == [ADDRESSES[0]]
        assert told[0].parallel_config == {"data_parallel_size": 4}
        assert not runtime_dir.exists() or not list(runtime_dir.iterdir()), "no socket file is left"

    @pytest.mark.parametrize(
        ("fields", "before", "after"),
        [
            ({"num_gpu_blocks": 5}, None, 10),
            ({"num_gpu_blocks": 5}, 3, 13),
            ({"num_gpu_blocks": 0}, None, 0),
            ({"num_gpu_blocks": None}, 3, 3),
        ],
    )
    async def test_cache_config(self, path: str, fields: dict[str, Any], before: int | None, after: int | None) -> None:
        cache_config = SimpleNamespace(num_gpu_blocks=before)
        async with tasks(*(engine(path, rank, initialize=ready_with(**fields)) for rank in range(2))):
            report = await wait_for_engine_startup(
                path, addresses(), [CoreEngine(0), CoreEngine(1)], None, cache_config
            )
        assert cache_config.num_gpu_blocks == after
        assert report.num_gpu_blocks == 2 * (fields.get("num_gpu_blocks") or 0)

    async def test_no_engines(self, path: str) -> None:
        async with starting(path, 0) as startup:
            assert (await startup.wait()).engines == {}

    async def test_engines_may_be_started_inside(self) -> None:
        async with starting(ANY, secure=False) as startup:
            async with managed(startup.handshake_address, GOOD) as manager:
                startup.proc_manager = manager
                assert (await startup.wait(20)).num_gpu_blocks == 100
                assert manager.closes == 0


class TestProgress:
    async def test_events_and_log(self, path: str, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.DEBUG, "aioshm.engine")
        events: list[StartupProgress] = []
        go = asyncio.Event()

        async def initialize(_metadata: object) -> dict[str, Any]:
            await go.wait()
            return {}

        def on_progress(progress: StartupProgress) -> None:
            events.append(progress)
            if progress.connected == 2 and progress.moved is not None:
                go.set()

        async with starting(path, 2, on_progress=on_progress) as startup:
            assert str(startup.progress).startswith("0 of 2 engines connected, 0 ready; waiting for engines 0 (before")
            async with tasks(*(engine(path, rank, initialize=initialize) for rank in range(2))):
                await startup.wait(20)
            assert [(each.connected, each.ready) for each in events] == [(1, 0), (2, 0), (2, 1), (2, 2)]
            assert {each.moved for each in events} == {0, 1}
            assert [len(each.waiting) for each in events] == [2, 2, 1, 0]
            assert str(startup.progress) == "2 of 2 engines connected, 2 ready"
        assert re.search(
            r"engine \d is READY: 2 of 2 engines connected, 1 ready; waiting for engines \d \(conn", caplog.text
        )

    async def test_reminders(
        self, path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr("aioshm.engine.startup.coordinator.REMINDER_S", 0.01)
        clock = itertools.chain([100.0], itertools.repeat(107.0))  # as of its beginning, and from then on
        monkeypatch.setattr("aioshm.engine.startup.coordinator.monotonic", lambda: next(clock))
        caplog.set_level(logging.INFO, "aioshm.engine")
        reminded = asyncio.Queue[StartupProgress]()
        async with starting(path, on_progress=reminded.put_nowait) as startup:
            waiting = asyncio.create_task(startup.wait())
            for _ in range(3):
                assert (await asyncio.wait_for(reminded.get(), 10)).moved is None
            async with tasks(engine(path, 0)):
                await waiting
        assert "0 of 1 engines connected, 0 ready; waiting for engines 0 (before HELLO, 7 s)" in caplog.messages


class TestWaiting:
    async def test_wait_that_ran_out_of_time_or_was_cancelled_may_be_repeated(self, path: str) -> None:
        async with starting(path) as startup:
            with pytest.raises(TimeoutError, match=r"not ready after 0.02 s: 0 of 1 engines connected"):
                await startup.wait(0.02)
            waiting = asyncio.create_task(startup.wait())
            await asyncio.sleep(0.02)
            await cancelled(waiting)
            async with tasks(engine(path, 0)):
                await startup.wait(20)

    async def test_failure_reaches_every_wait(self, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AIOSHM_ENGINE_READY_TIMEOUT_S", "0.05")
        async with starting(path) as startup:
            outcomes = await asyncio.gather(startup.wait(), startup.wait(), return_exceptions=True)
            assert [type(outcome) for outcome in outcomes] == [EngineStartupError] * 2
            with pytest.raises(EngineStartupError, match=r"no progress for 0\.05 s"):
                await startup.wait()

    async def test_progress_gives_more_time(self, path: str) -> None:
        async def later(rank: int) -> None:
            await asyncio.sleep(0.3 * rank)
            await engine(path, rank)

        async with starting(path, 4, progress_timeout=0.6) as startup:
            async with tasks(*(later(rank) for rank in range(4))):
                await startup.wait(20)

    async def test_in_the_wrong_place(self, path: str) -> None:
        startup = starting(path)
        assert startup.handshake_address == path
        with pytest.raises(RoleError, match="inside"):
            await startup.wait()
        async with startup:
            with pytest.raises(RoleError, match="once"):
                startup.open()
            waiting = asyncio.create_task(startup.wait())
            await asyncio.sleep(0)
        with pytest.raises(RoleError, match="left before"):
            await waiting
        with pytest.raises(RoleError, match="left before"):
            await startup.wait()
        with pytest.raises(RoleError, match="once"):
            startup.open()
        await startup.aclose()

    async def test_bad_arguments_are_named(self, path: str) -> None:
        with pytest.raises(ValueError, match="handshake_address"):
            starting("inproc://x", 0)
        with pytest.raises(ValueError, match="progress_timeout"):
            starting(path, 0, progress_timeout=0)
