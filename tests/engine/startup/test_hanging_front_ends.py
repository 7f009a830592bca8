"""API servers and coordinators that hang: named, replaced; and clients of API servers, which pass over engines."""

from __future__ import annotations

import asyncio
import logging
import signal
from pathlib import Path

import hanging
import pytest
from hanging import line_of
from served_engine import stop, until
from supervised import MANY, pids

from aioshm import Options
from aioshm.engine import (
    APIServerProcessManager,
    ClientOptions,
    EngineLayout,
    EngineSupervisor,
    RankInfo,
    Restart,
    launch_core_engines,
)

pytestmark = [pytest.mark.usefixtures("runtime_dir"), pytest.mark.slow_on_uvloop]

WARNING_S = 0.6
HANG = Restart(max_restarts=1000, backoff_s=0.001, hang_s=3.0)
CLIENT = ClientOptions(options=Options(stall_warning_s=WARNING_S))


def said(directory: Path, index: int) -> list[int]:
    """Return the last line of a front end: the number of the request, its engine, and how many engines are stalled."""
    try:
        return [int(each) for each in (directory / f"{index}.said").read_text().split()]
    except FileNotFoundError:
        return []


async def used(directory: Path, count: int = 20) -> list[set[int]]:
    """Return which engines each front end uses for its next requests."""
    found: list[set[int]] = [set(), set()]
    for index in (0, 1):
        first = said(directory, index)[0]
        while (last := said(directory, index))[0] < first + count:
            if last[0] > first:
                found[index].add(last[1])
            await asyncio.sleep(0.002)
    return found


async def test_front_ends_pass_over_a_stopped_engine_and_are_replaced_when_they_hang(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIOSHM_STALL_WARNING_S", str(WARNING_S))
    caplog.set_level(logging.WARNING, "aioshm.engine")
    seen: list[RankInfo] = []
    async with EngineSupervisor(
        hanging.serve, 2, num_api_servers=2, layout=EngineLayout(coordinator=False), client=CLIENT, restart=MANY
    ) as supervisor:
        addresses = supervisor.launch.addresses
        async with APIServerProcessManager(
            hanging.serve_front_end,
            "",
            None,
            str(tmp_path),
            2,
            addresses.inputs,
            addresses.outputs,
            membership_address=supervisor.launch.membership_address,
            restart=HANG,
            on_change=seen.append,
        ) as servers:
            await until(lambda: said(tmp_path, 0) and said(tmp_path, 1))
            assert await used(tmp_path) == [{0, 1}, {0, 1}]
            stop(pids(supervisor)[0], signal.SIGSTOP)
            try:
                await until(lambda: all(said(tmp_path, index)[2] == 1 for index in (0, 1)))
                assert supervisor.engines[0].state == "stopped"
                assert await used(tmp_path) == [{1}, {1}]
            finally:
                stop(pids(supervisor)[0], signal.SIGCONT)
            await until(lambda: all(said(tmp_path, index)[2] == 0 for index in (0, 1)))
            assert await used(tmp_path) == [{0, 1}, {0, 1}]

            hang = tmp_path / "hang-0"
            before = [info.pid for info in servers.servers]
            hang.touch()
            await until(lambda: servers.servers[0].state == "stalled")
            await until(lambda: line_of("hang_while_there_is") in caplog.text)
            hang.unlink()
            await until(lambda: servers.servers[0].state == "running")
            assert [info.pid for info in servers.servers] == before, "it moved again in time"
            hang.touch()
            await until(lambda: servers.servers[0].restarts == 1)
            hang.unlink()
            await until(lambda: servers.servers[0].state == "running")
            assert servers.servers[0].cause.startswith(f"ApiServer_0 (pid {before[0]}) hung for")
            assert line_of("hang_while_there_is") in servers.servers[0].cause
            assert servers.servers[1].pid == before[1]
            assert {info.rank for info in seen} == {0}


async def test_stopped_coordinator_is_named(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "aioshm.engine")
    async with launch_core_engines(hanging.serve, 2, client=CLIENT) as launch:
        assert launch.coordinator is not None
        pid = launch.coordinator.proc.pid or 0
        stop(pid, signal.SIGSTOP)
        try:
            await until(lambda: f"the coordinator (pid {pid}) is stopped: no progress for" in caplog.text)
        finally:
            stop(pid, signal.SIGCONT)
        await until(lambda: f"the coordinator (pid {pid}) makes progress again" in caplog.text)
