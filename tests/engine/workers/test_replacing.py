"""Groups with ``restart``: dead workers are replaced."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import worker_targets as targets
from managed import gone
from support import eventually, until
from test_calls import calls_of, changes_of, fill

from aioshm import WorkerDied
from aioshm.engine import Restart, WorkerGroup
from aioshm.errors import MAX_TEXT

pytestmark = pytest.mark.slow_on_uvloop

MANY = Restart(max_restarts=1_000_000, backoff_s=0.001, backoff_max_s=0.01)


def group_of(n_workers: int = 2, worker: Any = targets.Streaming, **options: Any) -> WorkerGroup:
    return WorkerGroup(worker, n_workers, **{"restart": MANY, **options})


async def test_death_fails_calls_in_flight_and_the_next_calls_reach_a_replacement(tmp_path: Path) -> None:
    go = tmp_path / "go"
    async with group_of(standbys=1) as group:
        assert await group.call(0, "begin", "before") == ["before"]
        await until(lambda: group.standbys == 1)
        before = group.pids
        # Calls of one worker
        other = asyncio.create_task(group.call(1, "wait_for", str(go), "untouched", 1))
        doomed = [asyncio.create_task(group.call(0, "begin_slowly", number)) for number in range(3)]
        await until(lambda: len(calls_of(group, 0)) == 3 and len(calls_of(group, 1)) == 1)
        waiting = asyncio.create_task(group.call_any("pid"))
        os.kill(before[0], signal.SIGKILL)
        for outcome in await asyncio.gather(*doomed, return_exceptions=True):
            assert isinstance(outcome, WorkerDied)
            assert (outcome.rank, outcome.pid) == (0, before[0])
            assert f"Worker_0 (pid {before[0]}) was killed by SIGKILL" in str(outcome)
        later = [asyncio.create_task(group.call(0, "begin", number, timeout=60)) for number in range(2)]
        assert await waiting not in before  # the replacement: worker 1 is busy
        assert (await asyncio.gather(*later))[-1] == [0, 1]  # a new object
        assert not other.done()
        go.touch()
        assert await other == "untouched"
        # Calls of all workers
        await until(lambda: group.standbys == 1)
        step = asyncio.create_task(group.collective_rpc("end", (1, "SIGKILL")))
        steps = [asyncio.create_task(group.collective_rpc("begin", (number,), timeout=60)) for number in range(3)]
        with pytest.raises(WorkerDied, match=rf"pid {before[1]}\) was killed by SIGKILL"):
            await step
        assert (await asyncio.gather(*steps))[-1] == [[0, 1, 0, 1, 2], [0, 1, 2]]
        assert [info.restarts for info in group.workers] == [1, 1]
        assert "was killed by SIGKILL" in group.workers[0].cause
        pids = group.pids
        assert not set(pids) & set(before)
    assert all(gone(pid) for pid in pids)


async def test_late_answer_is_not_the_answer_of_a_later_call(tmp_path: Path) -> None:
    go = tmp_path / "go"
    async with group_of(3) as group:
        call = asyncio.create_task(group.collective_rpc("wait_for", (str(go), "late", 0)))
        await asyncio.sleep(0.05)
        os.kill(group.pids[1], signal.SIGKILL)
        with pytest.raises(WorkerDied):
            await call
        later = asyncio.create_task(group.collective_rpc("add", (5,)))
        await until(lambda: group.workers[1].restarts == 1 and group.workers[1].state == "running")
        assert not later.done()  # worker 0 waits still
        go.touch()
        assert await later == [5, 6, 7]


async def test_answers_from_before_a_death_are_delivered() -> None:
    async with group_of(1) as group:
        stream = group.stream(0, "count", prefetch=8)
        assert await anext(stream) == 0
        replies = group._session.ranks[0].process.replies
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


async def test_idle_workers_and_standbys_are_replaced() -> None:
    async with group_of(2, standbys=1) as group, changes_of(group) as changes:
        await until(lambda: group.standbys == 1)
        standby = group._session.standbys[0]
        os.kill(standby.pid, signal.SIGKILL)
        await until(lambda: group.standbys == 1 and standby.exited.done())
        assert not changes
        victim = group.pids[0]
        os.kill(victim, signal.SIGTERM)
        await until(lambda: len(changes) == 3)
        assert [(change.rank, change.state) for change in changes] == [(0, "waiting"), (0, "starting"), (0, "running")]
        assert changes[-1].pid == group.pids[0] != victim
        assert str(victim) in changes[-1].cause
        assert await group.collective_rpc("add") == [0, 1]


async def test_constructor_that_exceeds_ready_timeout_is_killed_and_tried_again_and_call_any_skips_the_rank(
    tmp_path: Path,
) -> None:
    flag = tmp_path / "flag"
    options: dict[str, Any] = {"worker": targets.Fragile, "kwargs": {"flag": str(flag), "how": "hang"}}
    async with group_of(**options, ready_timeout=60, shutdown_timeout=0.2) as group:
        group._session.processes.ready_timeout = 0.5
        flag.touch()
        os.kill(group.pids[0], signal.SIGKILL)
        await until(lambda: group.workers[0].state == "starting")
        victim = group.workers[0].pid
        await until(lambda: "was not created after 0.5 s, and was killed" in group.workers[0].cause)
        late = rf"Worker_0 \(pid {victim}\) was .*, and its replacement is (waiting|starting \(pid \d+\))"
        with pytest.raises(TimeoutError, match=rf"no replacement of dead workers within 0.01 s: {late}"):
            await group.collective_rpc("add", timeout=0.01)
        with pytest.raises(TimeoutError, match=rf"^add: no replacement of Worker_0 .* within 0.01 s: {late}"):
            await group.call(0, "add", timeout=0.01)
        assert [await group.call_any("add", timeout=60) for _ in range(4)] == [1] * 4
        group._session.processes.ready_timeout = None
        flag.unlink()
        assert await group.collective_rpc("add", timeout=60) == [0, 1]


async def test_loop_runs_while_a_stopped_standby_is_sent_large_arguments_as_they_were_at_the_start() -> None:
    table = bytearray(4 << 20)
    async with group_of(1, standbys=1, kwargs={"table": table}) as group:
        table[:] = b"\1" * len(table)
        await until(lambda: group.standbys == 1)
        standby = group._session.standbys[0]
        os.kill(standby.pid, signal.SIGSTOP)
        rescue = threading.Timer(20, os.kill, (standby.pid, signal.SIGCONT))
        rescue.start()
        try:
            os.kill(group.pids[0], signal.SIGKILL)
            await until(lambda: group.workers[0].state == "starting")
            for _ in range(10):
                await asyncio.sleep(0.001)
            assert rescue.is_alive()  # a loop that stood until the standby had read was rescued
        finally:
            rescue.cancel()
            os.kill(standby.pid, signal.SIGCONT)
        assert await group.call(0, "pid", timeout=60) == standby.pid
        assert await group.call(0, "tell_made") == (0, (), {"table": bytearray(4 << 20)})
        assert group.workers[0].restarts == 1


async def test_constructor_that_fails_with_a_large_text_is_the_cause(tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    text = "\N{GRINNING FACE}" * MAX_TEXT  # four bytes each, and once more in the traceback
    async with group_of(1, targets.Fragile, kwargs={"flag": str(flag), "how": text}) as group:
        flag.touch()
        os.kill(group.pids[0], signal.SIGKILL)
        await until(lambda: f"could not be created: ValueError: {text}" in group.workers[0].cause)
        flag.unlink()
        assert await group.collective_rpc("add", timeout=60) == [0]


async def test_standby_that_dies_before_it_is_ready_is_replaced() -> None:
    async with group_of(1, standbys=1) as group:
        processes = group._session.processes._manager.processes
        await until(lambda: len(processes) == 2)
        assert group.standbys == 0
        victim = processes[1].pid or 0
        os.kill(victim, signal.SIGKILL)
        await until(lambda: group.standbys == 1)
        assert group._session.standbys[0].pid != victim


async def test_calls_that_wait_for_room_at_a_stopped_worker_reach_its_replacement() -> None:
    async with group_of(max_chunk_bytes=1 << 10, max_chunks=2) as group:
        pid = group.pids[1]
        calls = await fill(group)
        sent = len(calls) - 1
        calls += [asyncio.create_task(group.call(1, "begin", number)) for number in "ab"]
        assert await group.call(0, "add", timeout=60) == 0  # the other worker is not blocked
        os.kill(pid, signal.SIGKILL)
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes[:sent]] == [WorkerDied] * sent
        assert outcomes[sent:] == ["x" * 4000, ["a"], ["a", "b"]]


async def test_worker_with_a_closed_queue_is_killed_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aioshm.engine.workers.session.CODE_WITHIN_S", 0.05)
    async with group_of(2) as group:
        for call in (
            lambda: group.collective_rpc("hang_up", (0,), timeout=60),
            lambda: group.call(0, "hang_up", 0, timeout=60),
        ):
            pid = group.pids[0]
            with pytest.raises(WorkerDied, match=rf"pid {pid}\) was killed by SIGKILL"):
                await call()
            assert await group.collective_rpc("add", timeout=60) == [0, 1]
        assert group.workers[0].restarts == 2


async def test_worker_that_survives_sigkill_fails_its_calls_and_is_replaced_after_its_exit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = tmp_path / "begun"
    async with group_of(1) as group:
        pid = group.pids[0]
        monkeypatch.setattr("aioshm.engine.workers.session.CODE_WITHIN_S", 0.05)
        monkeypatch.setattr("aioshm.process.child.GONE_WITHIN_S", 0.1)
        monkeypatch.setattr("aioshm.process.child.ABORT_WITHIN_S", 0.05)
        monkeypatch.setattr("aioshm.process.child._Popen.send", lambda *_: True)  # as in an uninterruptible sleep
        call = asyncio.create_task(group.call(0, "say_and_block", str(begun)))
        await until(begun.exists)
        with pytest.raises(TimeoutError):
            await group.restart(0, timeout=0.5)
        with pytest.raises(WorkerDied, match=rf"pid {pid}\) was killed by WorkerGroup.restart, but is not gone"):
            await call
        await until(lambda: "still runs" in group.workers[0].cause)
        os.kill(pid, signal.SIGKILL)
        assert await group.call(0, "add", timeout=60) == 0


async def test_process_that_cannot_be_started_is_tried_again_until_a_crash_loop_that_ends_every_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with group_of(1, max_workers=2, restart=Restart(max_restarts=2, backoff_s=0.001)) as group:
        processes = group._session.processes
        start = processes.start
        failures = 1

        def start_later(*args: Any) -> Any:
            nonlocal failures
            failures -= 1
            if failures >= 0:
                raise OSError("no room for it")
            return start(*args)

        monkeypatch.setattr(processes, "start", start_later)
        await group.scale(2)
        assert group.workers[1].cause == "worker 1 could not be started: no room for it"
        assert await group.collective_rpc("add") == [0, 1]
        busy = asyncio.create_task(group.call(0, "slowly", targets.LONG_S))
        await until(lambda: calls_of(group, 0))
        failures = 9
        os.kill(group.pids[1], signal.SIGKILL)
        await until(lambda: group.workers[1].state != "running")
        calls = busy, group.call(1, "add"), group.call_any("add"), group.collective_rpc("add")
        outcomes = [*await asyncio.gather(*calls, return_exceptions=True), await group.join_first()]
        outcomes += await asyncio.gather(group.call(0, "add"), group.broadcast("add"), return_exceptions=True)
        for outcome in outcomes:
            assert isinstance(outcome, WorkerDied)
            assert "crash loop: 3 deaths within 60 s" in str(outcome)
            assert str(outcome).count("no room for it") == 2


async def test_closing_in_the_middle_of_a_replacement_leaves_nothing() -> None:
    async with group_of(1, standbys=1) as group:
        os.kill(group.pids[0], signal.SIGKILL)
        await until(lambda: group.workers[0].state != "running")
        await asyncio.sleep(0.003)
        processes = list(group._session.processes._manager.processes)
    assert all(gone(process.pid or 0) for process in processes)


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
        until_s = time.monotonic() + 2
        number = 0
        while time.monotonic() < until_s or min(good) < 10 or min(bad) < 3:
            number += 1
            rank = number % 3
            await until(lambda rank=rank: group.workers[rank].state == "running")
            if not rank:  # calls of all need all workers once in a while
                await until(lambda: all(info.state == "running" for info in group.workers))
            await asyncio.sleep(0.01 * (number % 7))
            with suppress(ProcessLookupError):  # killed before, and noticed just now
                os.kill(group.pids[rank], signal.SIGKILL)
            failed = [task for task in tasks if task.done()]
            assert not failed, failed
        stopping = True
        await asyncio.gather(*tasks)
        await until(lambda: not any(calls_of(group, rank) for rank in range(3)))


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"restart": False}, TypeError, "restart must be a Restart, or None, not False"),
        ({"standbys": 1, "restart": None}, ValueError, r"standbys must be 0 without restart=Restart"),
        ({"standbys": -1}, ValueError, "standbys must be at least 0"),
        ({"max_workers": 1}, ValueError, "max_workers must be at least 2"),
    ],
)
def test_wrong_arguments_are_errors(options: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        group_of(2, **options)
