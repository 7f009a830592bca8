"""Engines in processes of their own: load, death, endings."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from served_engine import ask, begun, collected, served_by_processes, stop, until

from aioshm.engine import CoreEngine, EngineStartupCoordinator, EngineZmqAddresses
from aioshm.errors import EngineDead

pytestmark = [pytest.mark.usefixtures("runtime_dir"), pytest.mark.one_loop]

WITHIN_S = 2.0


async def test_hundreds_of_requests_at_once_are_spread_and_complete() -> None:
    async with served_by_processes(2) as serving:
        client = serving.client
        streams = {str(number): client.submit(ask(str(number), 5)) for number in range(300)}
        endless = {f"endless {number}": client.submit(ask(f"endless {number}", None)) for number in range(100)}
        sent = [[each.in_flight for each in client._link.engines]]

        async def leave(stream: Any) -> None:
            async for _ in stream:
                return

        left = asyncio.gather(*map(leave, endless.values()))
        endless.clear()
        for outputs in await asyncio.gather(*map(collected, streams.values())):
            assert [output["token"] for output in outputs] == [0, 1, 2, 3, 4]
        await left
        assert client.in_flight == 0

        async def all_aborted() -> Any:
            reports = await client.call("report")
            return reports if sum(len(report["aborted"]) for report in reports) == 100 else None

        reports = await until(all_aborted)
        aborted = {request_id for report in reports for request_id in report["aborted"]}
        assert aborted == {f"endless {number}" for number in range(100)}
        assert [report["open"] for report in reports] == [[], []]
        counts = [report["seen"] for report in reports]
        assert sum(counts) == 400
        assert max(counts) - min(counts) <= 40, f"{counts}, {sent}"


async def test_an_engine_that_dies_is_named_to_all_that_wait() -> None:
    async with served_by_processes(2, n_clients=2) as serving:
        waiting = []
        for client in serving.clients:
            streams = [await begun(client, f"{id(client)} {number}") for number in range(10)]
            waiting += [asyncio.ensure_future(anext(stream)) for stream in streams]
            waiting += [asyncio.create_task(client.call("never", engine=rank)) for rank in (0, 1)]
            waiting.append(asyncio.create_task(client.call("never")))
        await asyncio.sleep(0)
        assert serving.manager is not None
        victim = serving.manager.processes[1]
        assert victim.pid is not None
        began = time.monotonic()
        stop(victim.pid)
        done = await asyncio.gather(*waiting, return_exceptions=True)
        assert time.monotonic() - began < WITHIN_S
        for error in done:
            assert isinstance(error, EngineDead), error
            assert (error.engine, error.pid) == (1, victim.pid)
            assert f"engine 1 (pid {victim.pid}) was killed by SIGKILL" in str(error)
        for client in serving.clients:
            assert client.in_flight == 0
            for attempt in (client.submit, client.abort, client.call):
                with pytest.raises(EngineDead):
                    result = attempt(ask("later"))  # type: ignore[operator]
                    await result
            with pytest.raises(EngineDead):
                await client.wait_until_ready()
        await until(lambda: victim.exitcode is not None)
        assert victim.exitcode == -9


WARMS_UP = """
import asyncio, sys
from pathlib import Path
import uvloop
from aioshm.engine import run_engine_core

class Engine:
    async def initialize(self, metadata):
        Path(sys.argv[2], "initializing").touch()
        await asyncio.sleep(100)

    def shutdown(self):
        Path(sys.argv[2], "shut down").touch()

    add_request = abort_requests = step = print

run = uvloop.run if sys.argv[3] == "uvloop" else asyncio.run
run(run_engine_core(Engine(), sys.argv[1], 0))
"""


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
async def test_engine_that_gets_sigterm_while_it_initialises_is_shut_down(loop: str, path: str, tmp_path: Path) -> None:
    async with EngineStartupCoordinator(path, [CoreEngine(0)], EngineZmqAddresses([], [])):
        command = sys.executable, "-c", WARMS_UP, path, str(tmp_path), loop
        engine = await asyncio.create_subprocess_exec(*command)
        await until((tmp_path / "initializing").exists)
        engine.terminate()
        async with asyncio.timeout(WITHIN_S):
            assert await engine.wait() == 0
    assert (tmp_path / "shut down").exists()
