"""Groups whose number of workers changes, while calls run and workers die."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import worker_targets as targets
from loops import turns
from managed import gone
from support import cancelled, until
from test_calls import calls_of, sent_step
from test_replacing import group_of

from aioshm import Options, QueueClosed, RoleError
from aioshm.engine.workers.processes import Rank

pytestmark = pytest.mark.slow_on_uvloop


async def test_scaling_with_calls_under_way_loses_none(tmp_path: Path) -> None:
    go = tmp_path / "go"
    async with group_of(2, max_workers=4, shutdown_timeout=0.5) as group:
        stopping = False
        done = [0, 0]

        async def load(which: int) -> None:
            while not stopping:
                if which == 0:
                    assert await group.call_any("slowly", 0.001, "x", timeout=60) == "x"
                else:
                    assert [item async for item in group.stream(None, "count", 3, timeout=60)] == [0, 1, 2]
                done[which] += 1

        tasks = [asyncio.create_task(load(number % 2)) for number in range(6)]
        await group.call_any("pid")
        await group.scale(4)
        seen: set[int] = set()
        while seen != set(group.pids):  # new workers get calls
            seen.add(await group.call_any("pid", timeout=60))
        assert len(seen) == 4
        held = asyncio.create_task(group.call(3, "wait_for", str(go), "held", 3))
        stream = group.stream(2, "count", 30)
        assert await anext(stream) == 0
        scaling = asyncio.create_task(group.scale(1))
        await until(lambda: group._session.callable == 1)
        with pytest.raises(ValueError, match="rank must be below 1, not 3"):
            await group.call(3, "add")
        before = list(done)
        await until(lambda: done[0] > before[0] + 5 and done[1] > before[1] + 5)
        assert not scaling.done()  # leaving workers finish their calls
        go.touch()
        assert await held == "held"
        assert [item async for item in stream] == list(range(1, 30))
        await scaling
        assert len(group.pids) == 1
        await group.scale(2)
        assert await group.call(1, "begin", 1) == [1]
        stopping = True
        await asyncio.gather(*tasks)


async def test_cancelled_scaling_is_completed(tmp_path: Path) -> None:
    go = tmp_path / "go"
    async with group_of(3, shutdown_timeout=600) as group:  # closing takes much less
        pids = group.pids
        held = asyncio.create_task(group.call(1, "wait_for", str(go), "held", 1))
        await until(lambda: calls_of(group, 1))
        stream = group.stream(2, "count")
        scaling = asyncio.create_task(group.scale(1))
        await until(lambda: group._session.callable == 1)
        await cancelled(scaling)
        go.touch()
        assert await held == "held"
        await until(lambda: group.n_workers == 1 and all(map(gone, pids[1:])))
        for _ in range(2):
            with pytest.raises(QueueClosed, match="the group of workers was made smaller"):
                await anext(stream)
        await group.scale(2)
        assert await group.collective_rpc("add", timeout=60) == [0, 1]


async def test_call_for_the_result_of_a_worker_that_has_left_meanwhile_is_not_sent(tmp_path: Path) -> None:
    async with group_of(2) as group:
        held = await sent_step(group, "wait_for", str(tmp_path / "go"), "held", 1)
        scaling = asyncio.create_task(group.scale(1))
        await turns(5)  # the scaling waits for the call before
        late = asyncio.create_task(group.collective_rpc("begin", ("late",), unique_reply_rank=1))
        await turns(5)
        (tmp_path / "go").touch()
        with pytest.raises(QueueClosed, match="the group of workers was made smaller"):
            await late
        await asyncio.gather(held, scaling)
        assert await group.call(0, "begin", "next") == ["next"]


async def test_scaling_survives_deaths_of_staying_and_leaving_workers(tmp_path: Path) -> None:
    go = tmp_path / "go"
    async with group_of(3, max_workers=4) as group:
        held = asyncio.create_task(group.call(1, "wait_for", str(go), "held", 1))
        await until(lambda: calls_of(group, 1))
        scaling = asyncio.create_task(group.scale(1))
        await until(lambda: group._session.callable == 1)
        killed = group.pids[0], group.pids[2]
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        await until(lambda: not all(group._session.ranks[rank].present for rank in (0, 2)))
        go.touch()
        assert await held == "held"
        await scaling
        assert len(group.pids) == 1
        assert group.pids[0] != killed[0]
        scaling = asyncio.create_task(group.scale(4))
        await until(lambda: group.n_workers == 4)
        os.kill(group.pids[0], signal.SIGKILL)  # while others are started
        await scaling
        assert await group.collective_rpc("add", timeout=60) == [0, 1, 2, 3]


async def test_death_of_a_leaving_worker_fails_no_call_of_another_worker(tmp_path: Path) -> None:
    async with group_of(2, targets.ClosesSlowly, kwargs={"log": str(tmp_path)}) as group:
        leaving = group.pids[1]
        busy = asyncio.create_task(group.call(0, "slowly", targets.LONG_S))  # answers are read meanwhile
        scaling = asyncio.create_task(group.scale(1))
        await until((tmp_path / "closing").exists)
        os.kill(leaving, signal.SIGKILL)
        await scaling
        assert not busy.done()
        busy.cancel()
        assert await group.broadcast("add", 5, timeout=60) == [5]


async def test_scaling_and_restarting_need_a_policy_a_worker_and_an_open_group() -> None:
    async with group_of(1, restart=None, options=Options(max_spin_cpu=0.1)) as group:
        for call in (group.scale(1), group.restart(0)):
            with pytest.raises(RoleError, match="restart="):
                await call
    async with group_of(1) as group:
        with pytest.raises(ValueError, match="n_workers must be at most max_workers, which is 1, not 2"):
            await group.scale(2)
        with pytest.raises(ValueError, match="rank must be below 1, not 1"):
            await group.restart(1)
        with pytest.raises(ValueError, match="timeout"):
            await group.restart(0, timeout=-1)
    for call in (group.scale(1), group.restart(0)):
        with pytest.raises(QueueClosed):
            await call


async def test_workers_are_listed_while_another_thread_adds_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async with group_of(2) as group:
        ranks = group._session.ranks

        def add_meanwhile(rank: Rank) -> Any:
            ranks[9] = rank
            return super(Rank, rank).info

        monkeypatch.setattr(Rank, "info", property(add_meanwhile))
        try:
            assert [worker.rank for worker in group.stats().workers] == [0, 1]
        finally:
            del ranks[9]
