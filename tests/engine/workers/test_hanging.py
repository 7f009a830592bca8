"""Workers that hang or are stopped: named with their line, passed over, and replaced where the group says so."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hanging_targets as targets
import pytest
from support import cancelled_after, until
from test_calls import changes_of

from aioshm import Options, QueueClosed, WorkerDied
from aioshm.engine import Restart, WorkerGroup

pytestmark = pytest.mark.slow_on_uvloop

WARNING_S = 0.6


def group_of(n_workers: int = 2, warning_s: float = WARNING_S, **options: Any) -> WorkerGroup:
    options = {"shutdown_timeout": 0.2, **options}
    return WorkerGroup(targets.Hanging, n_workers, options=Options(stall_warning_s=warning_s), **options)


HANGS: list[tuple[str, Callable[..., None]]] = [
    ("hang", targets.hang_in_a_lock),
    ("hang_awaited", targets.hang_with_the_gil_held),
    ("yield_and_hang", targets.hang_with_the_gil_released),
    ("hang_later", targets.hang_in_a_lock),
    ("hang_in_an_executor", targets.wait_for_a_later_job),
]
HEALTHY = len(HANGS)


async def hang(group: WorkerGroup, rank: int, method: str, way: Callable[..., None]) -> None:
    if method == "yield_and_hang":
        async for _ in group.stream(rank, method, way):
            pass
    await group.call(rank, method, way)
    await asyncio.sleep(targets.LONG_S)  # for the one that hangs outside of calls


async def test_hung_workers_are_named_with_their_lines_passed_over_and_not_killed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with group_of(HEALTHY + 1) as group, changes_of(group) as changes:
        pids = group.pids
        assert [(info.rank, info.pid, info.state) for info in group.workers] == [
            (rank, pid, "running") for rank, pid in enumerate(pids)
        ]
        hanging = [asyncio.create_task(hang(group, rank, *how)) for rank, how in enumerate(HANGS)]
        await until(lambda: {change.rank for change in changes if change.where} == set(range(HEALTHY)))
        for rank, (_, way) in enumerate(HANGS):
            line = re.escape(targets.line_of(way))
            found = [change for change in changes if change.rank == rank]
            assert found[-1] == group.workers[rank]
            assert {change.state for change in found} == {"stalled"}
            assert re.search(line, group.workers[rank].where)
            named = rf"Worker_{rank} \(pid {pids[rank]}\) is stalled: no progress for .*{line}"
            assert re.search(named, caplog.text)
            named = rf"Worker_{rank} \(pid {pids[rank]}, stalled, no progress .*{line}\)"
            with pytest.raises(TimeoutError, match=named):
                await group.call(rank, "which", timeout=0.05)
        assert group.stats().workers == group.workers
        assert [await group.call_any("which") for _ in range(3)] == [HEALTHY] * 3
        assert [item async for item in group.stream(None, "count", 2, 0)] == [0, 1]
        await asyncio.sleep(WARNING_S)
        assert [info.state for info in group.workers] == ["stalled"] * HEALTHY + ["running"]
        os.kill(pids[0], signal.SIGKILL)
        with pytest.raises(WorkerDied, match="was killed by SIGKILL"):
            await hanging[0]
        last = [change for change in changes if change.rank == 0][-1]  # others are named again at times
        assert group.workers[0].state == last.state == "exited"
        assert "was killed by SIGKILL" in group.workers[0].cause
        for task in hanging:
            task.cancel()


async def test_coroutine_that_hangs_is_noticed_beside_a_stream_that_runs() -> None:
    async with group_of(1) as group:
        stream = group.stream(0, "count", 100_000, 0.001)
        assert await anext(stream) == 0
        waiting = asyncio.create_task(group.call(0, "wait_forever"))
        async for _ in stream:
            if group.workers[0].state == "stalled":
                break
        assert group.workers[0].state == "stalled"
        waiting.cancel()
        await until(lambda: group.workers[0].state == "running")


async def test_stopped_worker_is_not_killed_and_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "aioshm.engine")
    async with group_of(restart=Restart(hang_s=WARNING_S)) as group, changes_of(group) as changes:
        pid = group.pids[0]
        os.kill(pid, signal.SIGSTOP)
        await until(lambda: group.workers[0].where)
        assert group.workers[0].state == "stopped"
        calls = [asyncio.create_task(group.call_any("which")) for _ in range(3)]
        assert await asyncio.gather(*calls) == [1, 1, 1]
        call = asyncio.create_task(group.call(0, "which"))
        with pytest.raises(TimeoutError, match=rf"Worker_0 \(pid {pid}, stopped, no progress for "):
            await group.broadcast("which", timeout=2 * WARNING_S)
        os.kill(pid, signal.SIGCONT)
        assert await call == 0
        await until(lambda: changes[-1].state == "running")
        assert {await group.call_any("which") for _ in range(2)} == {0, 1}
        assert group.pids[0] == pid
        assert {change.state for change in changes} <= {"running", "stalled", "stopped"}
        assert "Worker_0" in caplog.text
        assert "makes progress again" in caplog.text


async def test_without_a_worker_that_makes_progress_calls_wait() -> None:
    async with group_of() as group:
        for pid in group.pids:
            os.kill(pid, signal.SIGSTOP)
        await until(lambda: [info.state for info in group.workers] == ["stopped"] * 2)
        with pytest.raises(TimeoutError, match=r"no idle worker \(Worker_0 \(pid \d+, stopped.*Worker_1 "):
            await group.call_any("which", timeout=0.05)
        waiting = asyncio.create_task(group.call_any("which"))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        os.kill(group.pids[1], signal.SIGCONT)
        assert await waiting == 1
        os.kill(group.pids[0], signal.SIGCONT)


async def test_short_and_expected_steps_are_no_stall(caplog: pytest.LogCaptureFixture) -> None:
    limit_s = 1.2
    short_s = 0.4 * limit_s  # leaves room for a machine with other work

    async def steps_of(rank: int, method: str, pause_s: float = 0.0) -> None:
        stream = group.stream(rank, method, 3, short_s if pause_s == 0 else 0, prefetch=1)
        for number in range(3):
            assert await anext(stream) == number
            await asyncio.sleep(pause_s)
        await stream.aclose()

    async with group_of(7, limit_s, restart=Restart(hang_s=limit_s)) as group, changes_of(group) as changes:
        await asyncio.gather(
            group.call(0, "sleep", short_s),
            group.call(1, "sleep_awaited", short_s),
            group.call(2, "sleep_as_expected", 2 * limit_s),
            group.call(3, "sleep_as_expected_awaited", 2 * limit_s),
            steps_of(4, "count"),
            steps_of(5, "count_awaited"),
            steps_of(6, "count", 1.5 * short_s),  # the generator waits for its consumer
        )
        assert changes == []
    assert "progress" not in caplog.text


# Killed and replaced


async def test_hung_worker_is_killed_and_replaced_and_the_error_names_the_line() -> None:
    line = re.escape(targets.line_of(targets.hang_in_a_lock))
    async with group_of(restart=Restart(hang_s=2 * WARNING_S)) as group:
        before = group.pids
        with pytest.raises(WorkerDied, match=rf"hung for \d+ s at .*{line}, and was killed") as caught:
            await group.call(0, "hang", targets.hang_in_a_lock)
        assert (caught.value.rank, caught.value.pid) == (0, before[0])
        assert any("hang_in_a_lock" in text for text in caught.value.last_lines)
        assert str(caught.value).splitlines() == [str(caught.value)], "the stacks are not in the text"
        assert await group.broadcast("which") == [0, 1]
        assert (group.pids[0] != before[0], group.pids[1]) == (True, before[1])
        assert group.workers[0].restarts == 1
        assert "and was killed" in group.workers[0].cause


async def test_replacement_that_is_stopped_is_killed_if_the_policy_says_so() -> None:
    async with group_of(1, restart=Restart(hang_s=WARNING_S, kill_stopped=True, backoff_s=0.01)) as group:
        os.kill(group.pids[0], signal.SIGKILL)
        await until(lambda: group.workers[0].restarts == 1 and group.workers[0].state == "running")
        os.kill(group.pids[0], signal.SIGSTOP)
        with pytest.raises(WorkerDied, match=r"hung for \d+ s \(stopped.*\), and was killed"):
            await group.call(0, "which")
        assert await group.call(0, "which") == 0


# Restarted by hand


async def test_restart_replaces_workers_in_any_condition() -> None:
    stopped, idle = 2, 3
    async with group_of(4, restart=Restart(max_restarts=0)) as group:  # a restart by hand is no death
        before = group.pids
        calls = [asyncio.create_task(group.call(0, "sleep", targets.LONG_S))]
        calls += [asyncio.create_task(group.call(rank, "hang", targets.hang_in_a_lock)) for rank in (1, stopped)]
        os.kill(before[stopped], signal.SIGSTOP)
        await until(lambda: all(group.workers[rank].where for rank in (1, stopped)))
        await asyncio.gather(*(group.restart(rank, timeout=60) for rank in range(3) for _ in range(3)))
        for rank, outcome in enumerate(await asyncio.gather(*calls, return_exceptions=True)):
            assert isinstance(outcome, WorkerDied)
            assert f"Worker_{rank} (pid {before[rank]}) was killed by WorkerGroup.restart" in str(outcome)
            assert group.pids[rank] != before[rank]
            assert group.workers[rank].cause.endswith("was killed by WorkerGroup.restart")
        assert group.pids[idle] == before[idle]
        assert [info.restarts for info in group.workers] == [1, 1, 1, 0]
        await group.restart(0)
        assert group.workers[0].restarts == 2
        assert await group.broadcast("which") == [0, 1, 2, 3]


async def test_restart_of_a_group_that_has_ended_kills_nobody() -> None:
    async with group_of(restart=Restart(max_restarts=0)) as group:
        before = group.pids
        os.kill(before[0], signal.SIGKILL)
        assert isinstance(await group.join_first(), WorkerDied)
        with pytest.raises(WorkerDied, match="a crash loop"):
            await group.restart(1)
        assert group.workers[1].state == "running"
        assert group.pids == before


async def test_restart_that_takes_too_long_says_how_far_it_is_and_continues(tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    async with group_of(1, restart=Restart(), kwargs={"flag": str(flag)}) as group:
        flag.touch()
        with pytest.raises(
            TimeoutError,
            match=r"no replacement of Worker_0 .* within 2 s: Worker_0 .* was killed by WorkerGroup.restart, "
            r"and its replacement is starting \(pid \d+\)$",
        ):
            await group.restart(0, timeout=2)
        flag.unlink()
        starting = group.pids[0]
        again = asyncio.create_task(group.restart(0, timeout=60))
        await asyncio.sleep(0.05)
        os.kill(starting, signal.SIGKILL)  # the constructor hangs still
        await again
        assert await group.call(0, "which") == 0
        assert group.workers[0].restarts == 2


@pytest.mark.parametrize("turns", [0, 3])
async def test_cancelled_restart_ends_the_worker_all_the_same(turns: int) -> None:
    async with group_of(1, restart=Restart()) as group:
        before = group.pids[0]
        await cancelled_after(group.restart(0), turns)
        if turns:
            await until(lambda: group.workers[0].restarts == 1 and group.workers[0].state == "running")
            assert group.pids[0] != before
        assert await group.call(0, "which") == 0


async def test_closing_ends_a_restart() -> None:
    async with group_of(1, restart=Restart()) as group:
        restarting = asyncio.create_task(group.restart(0))
        await until(lambda: group.workers[0].state != "running")
    with pytest.raises(QueueClosed):
        await restarting
