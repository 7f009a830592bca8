"""Groups with ``restart``: dead workers are replaced."""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import worker_targets as targets
from managed import gone
from support import until

from aioshm import Options, QueueClosed, RoleError, WorkerDied
from aioshm.engine import RankInfo, Restart, WorkerGroup
from aioshm.engine.workers.messages import MAX_TEXT, ControlSocket

pytestmark = pytest.mark.slow_on_uvloop

MANY = Restart(max_restarts=1000, backoff_s=0.001, backoff_max_s=0.01)


def group_of(n_workers: int = 2, worker: Any = targets.Worker, **options: Any) -> WorkerGroup:
    return WorkerGroup(worker, n_workers, **{"restart": MANY, **options})


@pytest.mark.parametrize("standbys", [pytest.param(0, marks=pytest.mark.slow), 1])
async def test_death_fails_the_call_in_flight_and_the_next_call_reaches_a_replacement(standbys: int) -> None:
    async with group_of(standbys=standbys) as group:
        assert await group.collective_rpc("add", (1,)) == [1, 2]
        for victim in (1, 0, 1):
            await until(lambda: group.standbys == standbys)
            before = group.pids
            call = asyncio.create_task(group.collective_rpc("end", (victim, "SIGKILL")))
            later = [asyncio.create_task(group.collective_rpc("add", (number,), timeout=60)) for number in range(3)]
            with pytest.raises(WorkerDied, match=rf"pid {before[victim]}\) was killed by SIGKILL") as caught:
                await call
            assert caught.value.rank == victim
            assert await asyncio.gather(*later) == [[number, 1 + number] for number in range(3)]
            assert group.pids[victim] != before[victim]
            assert group.pids[1 - victim] == before[1 - victim]
            history = await group.collective_rpc("history")
            assert history[victim] == [(0,), (1,), (2,)]  # a new object
            assert len(history[1 - victim]) > 3
        assert [info.restarts for info in group.workers] == [1, 2]
        assert "was killed by SIGKILL" in group.workers[0].cause
        pids = group.pids
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


async def test_idle_workers_and_standbys_are_replaced() -> None:
    async with group_of(2, standbys=1) as group:
        changes: list[RankInfo] = []

        async def watch() -> None:
            async for change in group.membership():
                changes.append(change)

        watching = asyncio.create_task(watch())
        await until(lambda: group.standbys == 1)
        standby = group._session.replacer._standbys[0]  # type: ignore[union-attr]
        os.kill(standby.pid, signal.SIGKILL)
        await until(lambda: group.standbys == 1 and standby.exited.done())
        assert not changes
        victim = group.pids[0]
        os.kill(victim, signal.SIGTERM)
        await until(lambda: len(changes) == 3)
        assert [(change.rank, change.state) for change in changes] == [
            (0, "waiting"),
            (0, "starting"),
            (0, "running"),
        ]
        assert changes[-1].pid == group.pids[0] != victim
        assert str(victim) in changes[-1].cause
        assert await group.collective_rpc("add") == [0, 1]
    await watching


async def test_constructor_that_exceeds_ready_timeout_is_killed_and_tried_again(tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    options = {"worker": targets.Fragile, "kwargs": {"flag": str(flag), "how": "hang"}}
    async with group_of(1, **options, ready_timeout=60) as group:
        group._session.replacer._ready_timeout = 0.5  # type: ignore[union-attr]
        flag.touch()
        os.kill(group.pids[0], signal.SIGKILL)
        await until(lambda: group.workers[0].state == "starting")
        victim = group.workers[0].pid
        await until(lambda: "was not created after 0.5 s, and was killed" in group.workers[0].cause)
        with pytest.raises(
            TimeoutError,
            match=r"waits for the replacements of dead workers within 0.01 s: "
            rf"Worker_0 \(pid {victim}\) was .*, and its replacement is (waiting|starting \(pid \d+\))",
        ):
            await group.collective_rpc("add", timeout=0.01)
        group._session.replacer._ready_timeout = None  # type: ignore[union-attr]
        flag.unlink()
        assert await group.collective_rpc("add", timeout=60) == [0]


async def test_standby_that_hangs_in_its_import_is_killed_after_ready_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    flag = tmp_path / "flag"
    module = tmp_path / "slow_worker.py"
    module.write_text(
        "import os, time\nfrom worker_targets import Worker as Base\n"
        f"while os.path.exists({str(flag)!r}): time.sleep(0.01)\nclass Worker(Base): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    worker = importlib.import_module("slow_worker").Worker
    try:
        async with group_of(1, worker) as group:
            replacer = group._session.replacer  # type: ignore[union-attr]
            flag.touch()
            replacer._ready_timeout = 0.5
            replacer._wanted = 1
            replacer._fill()
            await until(lambda: "was not ready after 0.5 s, and was killed" in caplog.text)
            replacer._ready_timeout = None
            flag.unlink()
            await until(lambda: group.standbys == 1)
    finally:
        del sys.modules["slow_worker"]


async def test_loop_runs_while_a_stopped_standby_is_sent_large_arguments() -> None:
    async with group_of(1, standbys=1, kwargs={"table": bytes(4 << 20)}) as group:
        await until(lambda: group.standbys == 1)
        standby = group._session.replacer._standbys[0]  # type: ignore[union-attr]
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
        rank, args, kwargs = await group.call(0, "tell_made")
        assert (rank, args, kwargs["table"]) == (0, (), bytes(4 << 20))
        assert group.workers[0].restarts == 1


async def test_replacement_gets_the_arguments_as_they_were_when_the_group_started() -> None:
    table = bytearray(b"before")
    async with group_of(1, kwargs={"table": table}) as group:
        table[:] = b"later!"
        os.kill(group.pids[0], signal.SIGKILL)
        await until(lambda: group.workers[0].restarts == 1 and group.workers[0].state == "running")
        assert (await group.call(0, "tell_made"))[2] == {"table": b"before"}


async def test_constructor_that_fails_with_a_large_text_is_the_cause(tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    text = "\N{GRINNING FACE}" * MAX_TEXT  # four bytes each, and once more in the traceback
    async with group_of(1, targets.Fragile, kwargs={"flag": str(flag), "how": text}) as group:
        flag.touch()
        os.kill(group.pids[0], signal.SIGKILL)
        await until(lambda: f"could not be created: ValueError: {text}" in group.workers[0].cause)
        flag.unlink()
        assert await group.collective_rpc("add", timeout=60) == [0]


async def test_replacement_that_dies_when_it_is_running_is_replaced() -> None:
    async with group_of(1) as group:
        os.kill(group.pids[0], signal.SIGKILL)
        async for change in group.membership():
            if change.state == "running":
                os.kill(change.pid or 0, signal.SIGKILL)
                break
        await until(lambda: group.workers[0].restarts == 2)
        with suppress(WorkerDied):  # if the group had not noticed the death
            await group.collective_rpc("add", timeout=60)
        assert await group.collective_rpc("add", timeout=60) == [0]


@pytest.mark.parametrize("standbys", [0, 1])
async def test_process_that_dies_before_it_is_ready_is_replaced(standbys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    killed: dict[int | None, int] = {}

    async def kill_first(control: ControlSocket) -> Any:
        said = await receive(control)
        process = next(each for each in processes._processes.values() if each.control is control)
        if process.rank not in killed and (process.rank is None or said == "ready"):  # a standby, or a created worker
            killed[process.rank] = process.pid
            os.kill(process.pid, signal.SIGKILL)
            await asyncio.wait([process.exited])
        return said

    async with group_of(1) as group:
        processes = group._session.processes  # type: ignore[union-attr]
        receive = ControlSocket.receive
        monkeypatch.setattr(ControlSocket, "receive", kill_first)
        replacer = group._session.replacer  # type: ignore[union-attr]
        replacer._wanted = standbys
        replacer._fill()
        await until(lambda: group.standbys == standbys)
        assert list(killed) == [None] * standbys
        os.kill(group.pids[0], signal.SIGKILL)
        await until(lambda: group.workers[0].state == "running" and group.workers[0].restarts == 2)
        assert group.pids[0] not in killed.values()
        assert await group.collective_rpc("add", timeout=60) == [0]


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


async def test_process_that_cannot_be_started_is_tried_again_until_a_crash_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with group_of(1, max_workers=2, restart=Restart(max_restarts=2, backoff_s=0.001)) as group:
        processes = group._session.processes  # type: ignore[union-attr]
        start = processes._start
        failures = 1

        def start_later(*args: Any) -> Any:
            nonlocal failures
            failures -= 1
            if failures >= 0:
                raise OSError("no room for it")
            return start(*args)

        monkeypatch.setattr(processes, "_start", start_later)
        await group.scale(2)
        assert group.workers[1].cause == "worker 1 could not be started: no room for it"
        assert await group.collective_rpc("add") == [0, 1]
        failures = 9
        os.kill(group.pids[1], signal.SIGKILL)
        with pytest.raises(WorkerDied, match="crash loop: 3 deaths") as caught:
            await asyncio.wait_for(group.join_first(), 60)
            await group.collective_rpc("add")
        assert str(caught.value).count("no room for it") == 2


@pytest.mark.parametrize(
    "turns", [pytest.param(0, marks=pytest.mark.slow), 3, pytest.param(40, marks=pytest.mark.slow)]
)
async def test_closing_at_any_moment_of_a_replacement_leaves_nothing(turns: int) -> None:
    group = group_of(1, standbys=1)
    await group.__aenter__()
    pids = group.pids
    os.kill(pids[0], signal.SIGKILL)
    await until(lambda: group.workers[0].state != "running")
    for _ in range(turns):
        await asyncio.sleep(0.001)
    assert group._session is not None
    processes = list(group._session.processes._manager.processes)
    await group.aclose()
    assert all(gone(process.pid or 0) for process in processes)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"standbys": 1, "restart": None}, ValueError, r"standbys must be 0 without restart=Restart"),
        ({"standbys": -1}, ValueError, "standbys must be at least 0"),
        ({"max_workers": 1}, ValueError, "max_workers must be at least 2"),
    ],
)
def test_arguments(options: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        group_of(2, **options)


async def test_scaling_needs_a_policy_a_number_within_max_workers_and_an_open_group() -> None:
    async with WorkerGroup(targets.Worker, 1, options=Options(max_spin_cpu=0.1)) as group:
        with pytest.raises(RoleError, match="restart="):
            await group.scale(1)
    async with group_of(1) as group:
        with pytest.raises(ValueError, match="n_workers must be at most max_workers, which is 1, not 2"):
            await group.scale(2)
    with pytest.raises(QueueClosed):
        await group.scale(1)
