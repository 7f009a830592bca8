"""Engines that are started again while the others serve."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import threading
import time
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from served_engine import ask, begun, collected, stop, until
from supervised import MANY, pids, serve, serve_after_death
from support import cancelled

from aioshm.engine import (
    ClientOptions,
    EngineLayout,
    EngineSupervisor,
    RankInfo,
    Restart,
    StartupOptions,
    StartupProgress,
)
from aioshm.errors import EngineDead, EngineStartupError, QueueClosed, RoleError

pytestmark = [pytest.mark.usefixtures("runtime_dir"), pytest.mark.slow_on_uvloop]


async def test_killed_engine_comes_back_while_the_others_serve(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "aioshm.engine")
    seen: list[RankInfo] = []
    async with EngineSupervisor(serve, 2, restart=MANY, on_change=seen.append) as supervisor:
        client = supervisor.client
        streams = [await begun(client, f"{rank}", engine=rank) for rank in (0, 1)]
        before = pids(supervisor)
        for number in (signal.SIGKILL, signal.SIGTERM):
            victim = pids(supervisor)[1]
            seen.clear()
            stop(victim, number)
            await until(lambda: 1 in client.deaths)
            for request in range(4):  # the others serve
                assert len(await collected(client.submit(ask(f"meanwhile {request}", 2)))) == 2
            await supervisor.wait_until_ready(30)
            assert len(await collected(client.submit(ask("back", 2), engine=1))) == 2
            await until(lambda: supervisor.engines[1].state == "running")
            await until(lambda: len(seen) == 3)
            assert [(info.rank, info.state) for info in seen] == [(1, "waiting"), (1, "starting"), (1, "running")]
            assert str(victim) in seen[-1].cause
            assert seen[-1].pid == pids(supervisor)[1] != victim
            assert [str(victim) in text for text in caplog.messages if "restarting it" in text] == [True]
            caplog.clear()
        with pytest.raises(EngineDead, match=r"engine 1 \(pid \d+\) was killed by SIGKILL"):
            await collected(streams[1])
        assert pids(supervisor)[0] == before[0]
        assert [info.restarts for info in supervisor.engines] == [0, 2]
        await client.abort("0")
    for pid in pids(supervisor):
        assert not os.path.exists(f"/proc/{pid}")


async def test_engines_that_die_before_the_client_knows_them_are_restarted_while_opening(tmp_path: Path) -> None:
    kill = tmp_path / "kill"

    def progressed(progress: StartupProgress) -> None:
        if progress.ready == 2:
            kill.touch()

    kwargs = {"died": str(tmp_path / "died"), "kill": str(kill)}
    async with (
        asyncio.timeout(60),
        EngineSupervisor(
            serve_after_death, 2, restart=MANY, kwargs=kwargs, startup=StartupOptions(on_progress=progressed)
        ) as supervisor,
    ):
        assert [info.restarts for info in supervisor.engines] == [1, 1]
        for rank in (0, 1):
            assert len(await collected(supervisor.client.submit(ask(f"{rank}", 2), engine=rank))) == 2


async def test_a_crash_loop_ends_everything_with_every_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crash = tmp_path / "crash"
    failed = threading.Event()
    async with EngineSupervisor(
        serve,
        2,
        restart=Restart(max_restarts=2, within_s=1.0, backoff_s=0.001),
        kwargs={"crash": str(crash)},
        layout=EngineLayout(coordinator=False),
    ) as supervisor:
        stream = await begun(supervisor.client, "a", engine=0)
        crash.touch()
        manager = supervisor.launch.engine_manager
        start = manager.start_engine

        def start_slowly(rank: int) -> Any:
            time.sleep(0.5)
            assert rank or failed.wait(30)
            return start(rank)

        monkeypatch.setattr(manager, "start_engine", start_slowly)
        for pid in pids(supervisor):
            stop(pid)
        with pytest.raises(EngineDead, match="engine 1 is in a crash loop: 3 deaths within 1 s") as caught:
            await supervisor.wait()
        text = str(caught.value)
        assert "was killed by SIGKILL" in text
        assert text.count("exited with code 1: no memory left on device 1") == 2
        with pytest.raises(EngineDead, match=r"engine 0 \(pid \d+\) was killed by SIGKILL"):
            await anext(stream)
        failed.set()
        assert supervisor._restarts is not None
        await until(lambda: not supervisor._restarts.lives[0].unit.is_starting)
        for attempt in (lambda: supervisor.client.call("add", 1), supervisor.wait):
            with pytest.raises(EngineDead, match=r"^engine 1 is in a crash loop") as caught:
                await attempt()  # type: ignore[operator]
            assert caught.value.engine == 1
        with pytest.raises(EngineDead, match="crash loop"):
            supervisor.client.submit(ask("b"))


async def test_engine_that_is_not_ready_in_time_is_killed_and_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = tmp_path / "stuck"
    async with EngineSupervisor(serve, 1, restart=MANY, start_timeout=2.0, kwargs={"stuck": str(stuck)}) as supervisor:
        stuck.touch()
        stop(pids(supervisor)[0])
        await until(lambda: "was killed: not ready after 2 s" in supervisor.engines[0].cause)
        with pytest.raises(EngineDead):
            supervisor.client.submit(ask("x"))
        stuck.unlink()
        # A slow machine may take longer than two seconds for a good start, too.
        monkeypatch.setattr(supervisor._restarts, "_rules", replace(supervisor._rules, start_timeout=30.0))
        await supervisor.wait_until_ready(60)
        assert len(await collected(supervisor.client.submit(ask("y", 2)))) == 2


async def test_an_engine_that_does_not_finish_is_waited_for_as_long_as_said() -> None:
    async with EngineSupervisor(serve, 2) as supervisor:
        stream = await begun(supervisor.client, "endless", engine=1)
        going = asyncio.create_task(supervisor.scale(1))
        await until(lambda: supervisor.engines[-1].state == "stopping")
        assert supervisor.client.submit(ask("a", 1)).engine == 0
        await cancelled(going)
        assert [info.state for info in supervisor.engines] == ["running"] * 2
        await until(lambda: supervisor.client.submit(ask("b", 1)).engine == 1)
        await supervisor.scale(1, timeout=0.01)
        with pytest.raises(EngineDead, match="engine 1 was taken out of service"):
            await anext(stream)
        with pytest.raises(ValueError, match="engine_count must be at least 1"):
            await supervisor.scale(0)
        with pytest.raises(ValueError, match="the last one of several"):
            await supervisor.client.remove_engine(0)
        supervisor.launch.engine_manager.max_engines = 1  # as with given placement groups
        with pytest.raises(RoleError, match="1 placement groups were given, so there can be no 2 engines"):
            await supervisor.scale(2)
        with pytest.raises(ValueError, match="rank must be that of no engine, not 0"):
            supervisor.client.add_engine(0)


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_engine_that_is_removed_while_its_process_starts_leaves_no_process(
    is_cancelled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with EngineSupervisor(serve, 2) as supervisor:
        manager = supervisor.launch.engine_manager
        start_engine = manager.start_engine
        begun: list[int] = []
        started: list[Any] = []

        def start_slowly(rank: int) -> Any:
            begun.append(rank)
            time.sleep(1)
            started.append(start_engine(rank))
            return started[0]

        monkeypatch.setattr(manager, "start_engine", start_slowly)
        os.kill(supervisor.engines[1].pid or 0, signal.SIGKILL)
        await until(lambda: begun == [1])
        scaling = asyncio.create_task(supervisor.scale(1))
        if is_cancelled:
            await until(lambda: len(supervisor.engines) == 1)
            scaling.cancel()
        await asyncio.wait([scaling])
        assert started[0].exitcode is not None
        assert [process.name for process in manager.processes] == ["EngineCore_0"]


async def test_engine_that_is_removed_and_added_again_has_no_death(monkeypatch: pytest.MonkeyPatch) -> None:
    async with EngineSupervisor(serve, 2, restart=Restart(max_restarts=0)) as supervisor:
        manager = supervisor.launch.engine_manager

        async def stop_in_one_turn(rank: int) -> None:  # the watch has not seen the exit when the next process starts
            process = manager.processes[rank]
            process.kill()
            process.join()
            manager.discard(process)

        monkeypatch.setattr(manager, "stop_engine", stop_in_one_turn)
        await supervisor.scale(1)
        await supervisor.scale(2)
        assert supervisor.engines[1].cause == ""


async def test_engines_in_lockstep_are_started_again_together() -> None:
    async with EngineSupervisor(serve, 2, restart=MANY, lockstep=True, kwargs={"lockstep": True}) as supervisor:
        assert len(await collected(supervisor.client.submit(ask("a", 3)))) == 3
        before = pids(supervisor)
        stop(before[1])
        await until(lambda: len(supervisor.client.deaths) == 2)
        await supervisor.wait_until_ready(30)
        await until(lambda: [info.state for info in supervisor.engines] == ["running"] * 2)
        assert not set(before) & set(pids(supervisor))
        assert [info.restarts for info in supervisor.engines] == [1, 1]
        assert len(await collected(supervisor.client.submit(ask("b", 3)))) == 3
        with pytest.raises(RoleError, match="lockstep"):
            await supervisor.scale(3)


async def test_engines_in_lockstep_that_die_while_their_coordinator_starts_are_restarted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with EngineSupervisor(serve, 2, restart=MANY, lockstep=True, kwargs={"lockstep": True}) as supervisor:
        coordinator = supervisor.launch.coordinator
        assert coordinator is not None
        victim = coordinator.proc
        run_again = coordinator.run_again
        starts: list[str] = []

        def recorded() -> None:
            starts.append("begin")
            try:
                run_again()
            finally:
                time.sleep(0.1)
                starts.append("end")

        monkeypatch.setattr(coordinator, "run_again", recorded)
        stop(victim.pid or 0)
        await until(lambda: coordinator.proc is not victim)  # and is not bound yet
        for pid in pids(supervisor):
            stop(pid)
        await until(lambda: len(supervisor.client.deaths) == 2)
        await supervisor.wait_until_ready(30)
        assert len(await collected(supervisor.client.submit(ask("a", 3)))) == 3
        assert starts == ["begin", "end"] * 2


async def test_closing_in_the_middle_of_a_restart_leaves_nothing() -> None:
    async with EngineSupervisor(serve, 1, restart=MANY, layout=EngineLayout(coordinator=False)) as supervisor:
        victim = pids(supervisor)[0]
        waiting = asyncio.create_task(supervisor.wait())
        stop(victim)
        await until(lambda: supervisor.engines[0].state != "running")
        await asyncio.sleep(0.003)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in [victim, *pids(supervisor)])
    with pytest.raises(QueueClosed):
        await waiting
    for use in (lambda: supervisor.client, lambda: supervisor.launch):
        with pytest.raises(RoleError, match="inside `async with`"):
            use()
    await supervisor.aclose()


async def test_closing_ends_scaling_with_an_error(tmp_path: Path) -> None:
    stuck = tmp_path / "stuck"
    options = {"num_api_servers": 1, "layout": EngineLayout(coordinator=False), "kwargs": {"stuck": str(stuck)}}
    async with EngineSupervisor(serve, 1, **options) as supervisor:
        stuck.touch()
        scaling = [asyncio.create_task(supervisor.scale(count)) for count in (2, 3)]
        await until(lambda: [info.state for info in supervisor.engines] == ["running", "starting"])
    for each in scaling:
        with pytest.raises(QueueClosed):
            await each


async def test_supervisor_that_is_closed_while_it_opens_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "stuck").touch()
    supervisor = EngineSupervisor(serve, 1, kwargs={"stuck": str(tmp_path / "stuck")})
    opening = asyncio.create_task(supervisor.open())
    await until(lambda: hasattr(supervisor, "_launch"))
    with pytest.raises(RoleError, match="once"):
        await supervisor.open()
    await supervisor.aclose()
    assert supervisor._launch.processes[0].exitcode is not None
    with pytest.raises(QueueClosed):
        await opening


async def test_cancelled_opening_leaves_nothing_though_everything_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor = EngineSupervisor(serve, 1)
    open_all = supervisor._open_all

    async def opened() -> None:
        await open_all()
        opening.cancel()  # `open` has not seen the end

    monkeypatch.setattr(supervisor, "_open_all", opened)
    opening = asyncio.create_task(supervisor.open())
    await asyncio.wait([opening])
    assert opening.cancelled()
    assert supervisor._launch.processes[0].exitcode is not None


async def test_the_first_start_is_tried_once(tmp_path: Path) -> None:
    crash = tmp_path / "crash"
    crash.touch()
    supervisor = EngineSupervisor(serve, 1, kwargs={"crash": str(crash)})
    text = r"EngineCore_0 \(pid \d+, before HELLO\) exited with code 1(.|\n)*no memory left on device 0"
    with pytest.raises(EngineStartupError, match=text) as caught:
        await supervisor.open()
    assert caught.value.failed == {"EngineCore_0": 1}
    await supervisor.aclose()


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"wait": False}, TypeError, "wait is the supervisor's own"),
        ({"client": ClientOptions(on_engine_change=print)}, TypeError, "on_engine_change is the supervisor's own"),
        ({"start_timeout": 0}, ValueError, "start_timeout"),
        ({"restart": False}, TypeError, "restart must be a Restart, or None, not False"),
        ({"layout": {}}, TypeError, "layout must be an EngineLayout, or None, not {}"),
        ({"resubmit": "unstarted", "num_api_servers": 1}, ValueError, "an option of the clients in the API servers"),
        ({"engine_count": 0}, ValueError, "engine_count must be at least 1"),
    ],
)
def test_arguments(options: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        EngineSupervisor(serve, **options)


async def test_hosts_with_front_ends_of_their_own_restart_their_engine_and_the_coordinator() -> None:
    """Hybrid load balancing: each host has a client of its own engine only."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = f"tcp://127.0.0.1:{server.getsockname()[1]}"
    layout = EngineLayout(host="127.0.0.1", handshake_address=place)
    hybrid = StartupOptions(parallel_config={"data_parallel_hybrid_lb": True})
    head = EngineSupervisor(serve, 2, local_engine_count=1, restart=MANY, layout=layout, startup=hybrid)
    layout = EngineLayout(start_index=1, handshake_address=place)
    second = EngineSupervisor(serve, 2, local_engine_count=1, restart=MANY, layout=layout)
    async with AsyncExitStack() as stack:
        for supervisor in (head, second):
            stack.push_async_callback(supervisor.aclose)
        await asyncio.gather(head.open(), second.open())
        coordinator = head.launch.coordinator
        assert coordinator is not None
        assert (head.client.ranks, second.client.ranks) == ([0], [1])
        assert second.launch.coordinator is None
        assert second.client.addresses.frontend_stats_publish_address == coordinator.get_stats_publish_address()
        for supervisor, rank in ((head, 0), (second, 1)):
            stream = supervisor.client.submit(ask("a"))
            assert stream.engine == rank
            assert len(await collected(stream)) == 3
        stop(pids(second)[0])
        await until(lambda: 1 in second.client.deaths)
        await second.wait_until_ready(30)
        assert len(await collected(second.client.submit(ask("b")))) == 3
        victim = coordinator.proc
        victim.kill()
        await until(lambda: coordinator.proc is not victim)
        published: list[int] = []
        engines = second.client._link.engines
        engines.update = lambda counts: published.append(len(counts))  # type: ignore[method-assign]
        await until(lambda: published)
        assert set(published) == {2}
        with pytest.raises(RoleError, match="scaled where all of them are this process'"):
            await head.scale(2)  # rank 1 is on another host
