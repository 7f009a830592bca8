"""Calls of one worker, and streams, while workers die, are replaced, are added and leave."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import worker_targets as targets
from managed import gone
from support import eventually, until
from test_calls import calls_of

from aioshm import WorkerDied
from aioshm.engine import Restart, WorkerGroup

pytestmark = pytest.mark.slow_on_uvloop

MANY = Restart(max_restarts=1_000_000, backoff_s=0.001, backoff_max_s=0.01)


def group_of(n_workers: int = 2, worker: Any = targets.Streaming, **options: Any) -> WorkerGroup:
    return WorkerGroup(worker, n_workers, **{"restart": MANY, **options})


@pytest.mark.parametrize("standbys", [0, 1])
async def test_death_fails_calls_in_flight_of_the_dead_worker_and_queues_later_calls(
    standbys: int, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    async with group_of(standbys=standbys) as group:
        assert await group.call(0, "begin", "before") == ["before"]
        await until(lambda: group.standbys == standbys)
        other = asyncio.create_task(group.call(1, "wait_for", str(go), "untouched", 1))
        doomed = [asyncio.create_task(group.call(0, "begin_slowly", number)) for number in range(3)]
        await until(lambda: len(calls_of(group, 0)) == 3 and len(calls_of(group, 1)) == 1)
        waiting = asyncio.create_task(group.call_any("pid"))
        os.kill(pid := group.pids[0], signal.SIGKILL)
        for outcome in await asyncio.gather(*doomed, return_exceptions=True):
            assert isinstance(outcome, WorkerDied)
            assert (outcome.rank, outcome.pid) == (0, pid)
            assert f"Worker_0 (pid {pid}) was killed by SIGKILL" in str(outcome)
        later = [asyncio.create_task(group.call(0, "begin", number, timeout=60)) for number in range(2)]
        assert await waiting not in (pid, group.pids[1])  # the replacement: worker 1 is busy
        assert (await asyncio.gather(*later))[-1] == [0, 1]  # a new object
        assert not other.done()
        go.touch()
        assert await other == "untouched"


async def test_call_that_waits_for_a_replacement_times_out_and_call_any_skips_the_rank(tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    options: dict[str, Any] = {"worker": targets.Fragile, "kwargs": {"flag": str(flag), "how": "hang"}}
    async with group_of(**options, shutdown_timeout=0.2) as group:
        assert await group.call(1, "add") == 1
        flag.touch()
        os.kill(pid := group.pids[0], signal.SIGKILL)
        await until(lambda: group.workers[0].state == "starting")
        replacement = group.pids[0]
        assert replacement != pid or group.workers[0].state == "starting"
        with pytest.raises(
            TimeoutError, match=rf"^add: no replacement of Worker_0 .* within 0.05 s: .*{pid}\) was kill"
        ):
            await group.call(0, "add", timeout=0.05)
        assert [await group.call_any("add", timeout=60) for _ in range(4)] == [1] * 4


async def test_a_crash_loop_ends_every_call_with_every_cause(tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    restart = Restart(max_restarts=2, backoff_s=0.001)
    async with group_of(worker=targets.Fragile, kwargs={"flag": str(flag)}, restart=restart) as group:
        assert await group.call_any("add") in (0, 1)
        busy = asyncio.create_task(group.call(0, "slowly", targets.LONG_S))
        await until(lambda: calls_of(group, 0))
        flag.touch()
        os.kill(group.pids[1], signal.SIGKILL)
        await until(lambda: group.workers[1].state != "running")
        calls = busy, group.call(1, "add"), group.call_any("add"), group.collective_rpc("add")
        for outcome in [*await asyncio.gather(*calls, return_exceptions=True), await group.join_first()]:
            assert isinstance(outcome, WorkerDied)
            assert "crash loop: 3 deaths within 60 s" in str(outcome)
            assert "was killed by SIGKILL" in str(outcome)
            assert str(outcome).count("could not be created: ValueError: not now") == 2
        for call in (group.call(0, "add"), group.collective_rpc("add")):
            with pytest.raises(WorkerDied, match="crash loop"):
                await call


async def test_answers_from_before_a_death_are_delivered() -> None:
    async with group_of(1) as group:
        stream = group.stream(0, "count", prefetch=8)
        assert await anext(stream) == 0
        replies = group._session.calls.channels[0].replies  # type: ignore[union-attr]
        # Blocks the loop: the group reads no answer meanwhile.
        eventually(lambda: replies.stats().backlog + len(stream._call.items) == 7)
        pid = group.pids[0]
        os.kill(pid, signal.SIGKILL)
        await until(lambda: group.workers[0].restarts == 1)
        taken = []
        with pytest.raises(WorkerDied, match=rf"pid {pid}\)"):
            async for item in stream:
                taken.append(item)
        assert taken == list(range(1, 8))
        assert await group.call(0, "add", timeout=60) == 0


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
        held = asyncio.create_task(group.call_any("pid"))
        await held
        await group.scale(4)
        seen: set[int] = set()
        while seen != set(group.pids):  # newcomers are given calls
            seen.add(await group.call_any("pid", timeout=60))
        assert len(seen) == 4
        held = asyncio.create_task(group.call(3, "wait_for", str(go), "held", 3))
        stream = group.stream(2, "count", 30)
        assert await anext(stream) == 0
        scaling = asyncio.create_task(group.scale(1))
        await until(lambda: group._session.callable == 1)  # type: ignore[union-attr]
        with pytest.raises(ValueError, match="rank must be below 1, not 3"):
            await group.call(3, "add")
        before = list(done)
        await until(lambda: done[0] > before[0] + 5 and done[1] > before[1] + 5)
        assert not scaling.done()  # those that leave finish what they have
        go.touch()
        assert await held == "held"
        assert [item async for item in stream] == list(range(1, 30))
        await scaling
        assert len(group.pids) == 1
        await group.scale(2)
        assert await group.call(1, "begin", 1) == [1]
        stopping = True
        await asyncio.gather(*tasks)


@pytest.mark.slow
async def test_scaling_cancelled_while_workers_finish_assigns_calls_again(tmp_path: Path) -> None:
    go = tmp_path / "go"
    async with group_of(2) as group:
        held = asyncio.create_task(group.call(1, "wait_for", str(go), "held", 1))
        await until(lambda: calls_of(group, 1))
        scaling = asyncio.create_task(group.scale(1))
        await until(lambda: group._session.callable == 1)  # type: ignore[union-attr]
        scaling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await scaling
        later = asyncio.create_task(group.call(1, "add", 1))
        go.touch()
        assert await held == "held"
        assert await later == 2
        assert await group.collective_rpc("add") == [0, 1]
        os.kill(group.pids[1], signal.SIGKILL)
        await group.scale(1)  # the leaving worker is dead
        assert await group.call_any("add", timeout=60) == 0


async def test_scaling_survives_deaths_of_staying_and_leaving_workers(tmp_path: Path) -> None:
    go = tmp_path / "go"
    async with group_of(3, max_workers=4) as group:
        held = asyncio.create_task(group.call(1, "wait_for", str(go), "held", 1))
        await until(lambda: calls_of(group, 1))
        scaling = asyncio.create_task(group.scale(1))
        await until(lambda: group._session.callable == 1)  # type: ignore[union-attr]
        killed = group.pids[0], group.pids[2]
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        await until(lambda: not {0, 2}.isdisjoint(group._session.calls.absent))  # type: ignore[union-attr]
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


@pytest.mark.slow
async def test_a_storm_of_deaths_answers_every_call_and_stream_once() -> None:
    async with group_of(3, standbys=1) as group:
        stopping = False
        good = [0] * 4
        bad = [0] * 4

        async def load(which: int, number: int) -> None:
            while not stopping:
                number += 10
                try:
                    if which == 0:
                        assert await group.call(number % 3, "slowly", 0.001, number, timeout=60) == number
                    elif which == 1:
                        assert await group.call_any("slowly", 0.001, number, timeout=60) == number
                    elif which == 2:
                        assert await group.broadcast("slowly", 0.001, number, timeout=60) == [number] * 3
                    else:
                        items = [item async for item in group.stream(number % 3, "count_slowly", 5, 0.001, timeout=60)]
                        assert items == [0, 1, 2, 3, 4]
                    good[which] += 1
                except WorkerDied as error:
                    assert "was killed by SIGKILL" in str(error)  # noqa: PT017
                    bad[which] += 1

        tasks = [asyncio.create_task(load(number % 4, number)) for number in range(12)]
        until_s = time.monotonic() + 6
        number = 0
        while time.monotonic() < until_s or min(good) < 20 or min(bad) < 3:
            number += 1
            rank = number % 3
            await until(lambda rank=rank: group.workers[rank].state == "running")
            await asyncio.sleep(0.01 * (number % 7))
            with suppress(ProcessLookupError):  # killed before, and noticed just now
                os.kill(group.pids[rank], signal.SIGKILL)
            failed = [task for task in tasks if task.done()]
            assert not failed, failed
        stopping = True
        await asyncio.gather(*tasks)
        await until(lambda: not any(calls_of(group, rank) for rank in range(3)))


async def test_death_of_another_worker_while_workers_leave_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    async with group_of(3) as group:
        session = group._session
        pids = group.pids
        stop_worker = session.processes.stop_worker

        async def die_first(rank: int) -> None:
            if rank == 1:
                os.kill(pids[0], signal.SIGKILL)
            await until(lambda: session.calls.absent == {0})
            await stop_worker(rank)

        monkeypatch.setattr(session.processes, "stop_worker", die_first)
        await group.scale(1)
        assert (group.n_workers, len(group.workers), len(group.pids)) == (1, 1, 1)
        assert all(gone(pid) for pid in pids[1:]), "those that were to go have gone"
        assert await group.collective_rpc("add", (5,), timeout=60) == [5]
        assert group.pids[0] != pids[0]
        assert group.workers[0].restarts == 1
        await group.scale(2)
        assert await group.call(1, "add", 1, timeout=60) == 2


async def test_scaling_cancelled_while_workers_exit_is_completed() -> None:
    async with group_of(3, shutdown_timeout=600) as group:  # closing takes much less
        session = group._session
        assert session is not None
        pids = group.pids
        scaling = asyncio.create_task(group.scale(1))
        await until(lambda: group.n_workers == 1)
        scaling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(scaling, 60)
        assert group.pids == pids[:1]
        assert all(gone(pid) for pid in pids[1:])
        await group.scale(2)
        assert await group.collective_rpc("add", timeout=60) == [0, 1]


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
