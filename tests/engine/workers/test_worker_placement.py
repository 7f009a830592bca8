"""Workers run where their placement says, also when they are replaced, and when more are started."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import worker_targets
from placed import CPUS, Placed
from support import until

from aioshm import Placement, WorkerDied
from aioshm.engine import Restart, WorkerGroup

pytestmark = pytest.mark.slow_on_uvloop

MANY = Restart(max_restarts=1000, backoff_s=0.001, backoff_max_s=0.01)


class PlacedWorker(worker_targets.Worker, Placed):
    def __init__(self, rank: int) -> None:
        worker_targets.Worker.__init__(self, rank=rank)
        Placed.__init__(self)


def by_rank(asked: list[int]) -> Placement:
    """Return a placement, and note the ranks of its calls."""
    if not CPUS:
        pytest.skip("macOS has no CPU affinity")

    def env(rank: int) -> dict[str, str | None]:
        asked.append(rank)
        return {"PLACED": f"{rank}, call {len(asked)}"}

    return Placement(env=env, cpus=lambda rank: [CPUS[rank % len(CPUS)]])


def expected(rank: int) -> Any:
    return {"PLACED": f"{rank}, call {rank + 1}", "UNWANTED": None}, [CPUS[rank % len(CPUS)]]


async def test_replacements_and_more_workers_keep_the_placement_of_their_rank() -> None:
    asked: list[int] = []
    async with WorkerGroup(PlacedWorker, 2, restart=MANY, max_workers=3, placement=by_rank(asked)) as group:
        assert await group.broadcast("place") == [expected(0), expected(1)]
        with pytest.raises(WorkerDied):
            await group.call(1, "end", 1, "SIGKILL")
        assert await group.call(1, "place", timeout=30) == expected(1)
        await group.scale(3)
        assert await group.broadcast("place") == [expected(rank) for rank in range(3)]
        assert asked == [0, 1, 2]
        assert await group.broadcast("usable_cpus") == [1, 1, 1]  # so that nothing spins there


async def test_standby_has_a_placement_that_is_the_same_for_all_ranks() -> None:
    placement = Placement(env={"PLACED": "everywhere"})
    async with WorkerGroup(PlacedWorker, 1, restart=MANY, standbys=1, placement=placement) as group:
        await until(lambda: group.standbys == 1)
        with pytest.raises(WorkerDied):
            await group.call(0, "end", 0, "SIGKILL")
        env, _ = await group.call(0, "place", timeout=30)
        assert env["PLACED"] == "everywhere"


async def test_wrong_placement_is_an_error_before_a_process_starts() -> None:
    envs = [{}, {}, {"PLACED": 1}]
    placement = Placement(env=lambda rank: envs[rank])  # type: ignore[arg-type, return-value]
    with pytest.raises(TypeError, match="placement must be a Placement, or None, not 'here'"):
        WorkerGroup(PlacedWorker, 1, placement="here")  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match=r"placement.env of rank 2 must map names to strings or None, not 'PLACED' to 1"
    ):
        WorkerGroup(PlacedWorker, 3, placement=placement)
    with pytest.raises(ValueError, match=r"standbys must be 0 with a placement that depends on the rank, not 1"):
        WorkerGroup(PlacedWorker, 1, restart=MANY, standbys=1, placement=placement)
    async with (
        asyncio.timeout(60),
        WorkerGroup(PlacedWorker, 2, restart=MANY, max_workers=3, placement=placement) as group,
    ):
        with pytest.raises(TypeError, match=r"placement.env of rank 2 must"):
            await group.scale(3)
        assert group.n_workers == 2
        assert len(await group.broadcast("pid")) == 2
