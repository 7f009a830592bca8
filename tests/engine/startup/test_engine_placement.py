"""Engines and API servers run where their placement says, also when they are restarted, and when more are started."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

import placed
import pytest
from served_engine import Engine, stop
from supervised import MANY, pids
from support import until

from aioshm import Placement
from aioshm.engine import (
    APIServerProcessManager,
    CoreEngineProcManager,
    EngineLayout,
    EngineSupervisor,
    run_engine_core,
)
from aioshm.process import placement as placing

pytestmark = [pytest.mark.usefixtures("runtime_dir"), pytest.mark.slow_on_uvloop]


class PlacedEngine(placed.Placed, Engine):
    def __init__(self) -> None:
        Engine.__init__(self)
        placed.Placed.__init__(self)


def serve(handshake_address: str, dp_rank: int, local_dp_rank: int) -> None:
    asyncio.run(run_engine_core(PlacedEngine(), handshake_address, dp_rank))


def counting() -> Placement:
    """Return a placement whose environment would differ at every call for a rank."""
    asked: list[int] = []

    def env(rank: int) -> dict[str, str | None]:
        asked.append(rank)
        return {"PLACED": f"{rank} {asked.count(rank)}"}

    return Placement(env=env)


async def placed_as(supervisor: EngineSupervisor) -> list[str]:
    return [env["PLACED"] for env, _ in await supervisor.client.call("place")]


async def test_restarted_engines_keep_the_placement_of_their_rank() -> None:
    layout = EngineLayout(placement=counting())
    async with EngineSupervisor(serve, 2, restart=MANY, layout=layout) as supervisor:
        assert await placed_as(supervisor) == ["0 1", "1 1"]
        stop(pids(supervisor)[1])
        await until(lambda: 1 in supervisor.client.deaths)
        await supervisor.wait_until_ready(60)
        assert await placed_as(supervisor) == ["0 1", "1 1"]
        await supervisor.scale(3)
        assert await placed_as(supervisor) == ["0 1", "1 1", "2 1"]


async def test_placement_that_fails_for_a_new_engine_changes_nothing() -> None:
    layout = EngineLayout(placement=Placement(env=lambda rank: [{"PLACED": "0"}][rank]), coordinator=False)
    async with EngineSupervisor(serve, 1, restart=MANY, layout=layout) as supervisor:
        with pytest.raises(ValueError, match=r"placement.env of rank 1 failed: IndexError"):
            await supervisor.scale(2)
        assert await placed_as(supervisor) == ["0"]


async def test_wrong_placement_is_an_error_before_a_process_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placing, "allowed_cpus", lambda: frozenset({0, 1}))
    before = multiprocessing.active_children()
    wrong = Placement(cpus=lambda rank: [rank + 1])
    text = "placement.cpus of rank 1: 2 cannot be used here; allowed are 0-1"
    with pytest.raises(ValueError, match=text):
        async with EngineSupervisor(serve, 2, layout=EngineLayout(placement=wrong)):
            pass
    with pytest.raises(ValueError, match=text):
        CoreEngineProcManager(serve, 2, placement=wrong)
    with pytest.raises(ValueError, match=text):
        await CoreEngineProcManager.start(serve, 2, placement=wrong)
    with pytest.raises(ValueError, match=text):
        APIServerProcessManager(serve, "", None, None, 2, ["", ""], ["", ""], placement=wrong)
    with pytest.raises(TypeError, match="placement must be a Placement, or None, not 0"):
        EngineLayout(placement=0)  # type: ignore[arg-type]
    assert multiprocessing.active_children() == before


def tell_place(_address: str, _sock: None, directory: str, config: dict[str, Any]) -> None:
    path = Path(directory, f"{config['client_index']}")
    with path.open("a") as file:
        file.write(json.dumps(placed.ENV["PLACED"]))
    os._exit(len(path.read_text()) < 10)  # after the second start with 0


async def test_restarted_api_servers_keep_the_placement_of_their_index(tmp_path: Path) -> None:
    async with APIServerProcessManager(
        tell_place, "", None, str(tmp_path), 2, ["", ""], ["", ""], restart=MANY, placement=counting()
    ) as servers:
        async with asyncio.timeout(60):
            await servers.wait()
    assert [(tmp_path / name).read_text() for name in "01"] == ['"0 1""0 1"', '"1 1""1 1"']
