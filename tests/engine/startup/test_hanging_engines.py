"""Engines, API servers and coordinators that hang: named with their line, passed over, replaced."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import hanging
import pytest
from hanging import line_of
from served_engine import Engine, ask, begun, collected, stop, until
from supervised import MANY, api_servers, pids
from support import cancelled

from aioshm import Options
from aioshm.engine import (
    ClientOptions,
    EngineLayout,
    EngineSupervisor,
    RankInfo,
    Restart,
    die_with_parent,
    launch_core_engines,
    run_engine_core,
)
from aioshm.errors import EngineDead, QueueClosed, RoleError

pytestmark = [pytest.mark.usefixtures("runtime_dir"), pytest.mark.slow_on_uvloop]

WARNING_S = 0.6
HANG_S = 2.0
ALONE = EngineLayout(coordinator=False)
OPTIONS = Options(stall_warning_s=WARNING_S)
CLIENT = ClientOptions(options=OPTIONS)
HANG = Restart(max_restarts=1000, backoff_s=0.001, hang_s=HANG_S)


@asynccontextmanager
async def supervised(count: int = 2, **options: Any) -> AsyncIterator[EngineSupervisor]:
    options = {"layout": ALONE, "client": CLIENT, **options}
    async with EngineSupervisor(options.pop("serve", hanging.serve), count, **options) as supervisor:
        yield supervisor


async def test_steps_that_hang_are_named_with_their_line_and_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[RankInfo] = []
    caplog.set_level(logging.WARNING, "aioshm.engine")
    hangs = ["hang_in_a_lock", "hang_with_the_gil_held"]
    async with supervised(3, on_change=seen.append) as supervisor:
        client = supervisor.client
        before = pids(supervisor)
        stuck = [
            client.submit(ask(hang, hang=hang), engine=rank, timeout=5 * WARNING_S) for rank, hang in enumerate(hangs)
        ]
        for rank, hang in enumerate(hangs):
            await until(lambda hang=hang: line_of(hang) in caplog.text)
            assert f"engine {rank} (pid {before[rank]}) is stalled: no progress for" in caplog.text
            info = supervisor.engines[rank]
            assert (info.state, line_of(hang) in info.where) == ("stalled", True)
            assert next(each.state for each in seen if each.rank == rank) == "stalled"
            assert supervisor.stats().engines[rank] == info
        assert client.stats().stalled == 2
        for number in range(4):
            stream = client.submit(ask(f"{number}"))
            assert stream.engine == 2
            assert len(await collected(stream)) == 3
        for rank, hang in enumerate(hangs):
            with pytest.raises(TimeoutError, match=f"from engine {rank}; engine {rank} is stalled: .*{hang}"):
                await anext(stuck[rank])
        assert client.submit(ask("there"), engine=0).engine == 0
        assert pids(supervisor) == before, "without hang_s they are not killed"


async def test_engines_that_move_again_come_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "aioshm.engine")
    hold = tmp_path / "hold"
    hold.touch()
    async with supervised() as supervisor:
        client = supervisor.client
        waiting = [
            asyncio.ensure_future(client.call(method, str(hold), engine=rank))
            for rank, method in enumerate(("hang_now", "block_the_loop"))
        ]
        await until(lambda: all(line_of("hang_while_there_is") in info.where for info in supervisor.engines))
        everywhere = asyncio.ensure_future(client.call("report"))
        hold.unlink()
        await until(lambda: [info.state for info in supervisor.engines] == ["running"] * 2)
        await asyncio.gather(*waiting)
        assert len(await everywhere) == 2, "a call of all engines waits for the stalled ones, too"
        assert [info.where for info in supervisor.engines] == [""] * 2
        assert client.stats().stalled == 0
        assert {client.submit(ask(f"{number}")).engine for number in range(2)} == {0, 1}
    for rank in (0, 1):
        assert re.search(rf"engine {rank} \(pid \d+\) makes progress again", caplog.text)


async def test_stopped_engine_is_replaced_where_the_policy_says_so() -> None:
    restart = Restart(hang_s=HANG_S, kill_stopped=True)
    async with supervised(restart=restart) as supervisor:
        [victim, _] = pids(supervisor)
        stream = await begun(supervisor.client, "a", engine=0)
        stop(victim, signal.SIGSTOP)
        died = rf"engine 0 \(pid {victim}\) hung for \d+ s \(stopped\) .*, and was killed"
        with pytest.raises(EngineDead, match=died):
            await anext(stream)
        await until(lambda: supervisor.engines[0].state == "running" and pids(supervisor)[0] != victim)


async def test_hung_engine_is_replaced_and_its_unstarted_requests_move() -> None:
    async with supervised(restart=HANG, resubmit="unstarted") as supervisor:
        client = supervisor.client
        [victim, _] = pids(supervisor)
        started = await begun(client, "started", engine=0)
        hanging = asyncio.ensure_future(client.call("hang_now", __file__, engine=0))
        await until(lambda: supervisor.engines[0].state == "stalled")
        unstarted = client.submit(ask("unstarted"), engine=0)
        died = rf"engine 0 \(pid {victim}\) hung for \d+ s at .*{line_of('hang_while_there_is')}, and was killed"
        with pytest.raises(EngineDead, match=died):
            await anext(started)
        assert len(await collected(unstarted)) == 3
        assert unstarted.engine == 1
        with pytest.raises(EngineDead, match=died):
            await hanging
        await until(lambda: pids(supervisor)[0] != victim and supervisor.engines[0].state == "running")
        assert supervisor.engines[0].restarts == 1
        assert line_of("hang_while_there_is") in supervisor.engines[0].cause


async def test_hung_engine_that_survives_sigkill_fails_its_requests_and_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with supervised(restart=HANG) as supervisor:
        monkeypatch.setattr("aioshm.process.child.GONE_WITHIN_S", 0.1)
        monkeypatch.setattr("aioshm.process.child.ABORT_WITHIN_S", 0.05)
        monkeypatch.setattr("aioshm.process.child._Popen.send", lambda *_: True)  # as in an uninterruptible sleep
        victim = pids(supervisor)[0]
        stuck = supervisor.client.submit(ask("stuck", hang="hang_in_a_lock"), engine=0)
        with pytest.raises(EngineDead, match=rf"engine 0 \(pid {victim}\) hung for .* killed, but is not gone"):
            await collected(stuck)
        monkeypatch.undo()
        await supervisor.wait_until_ready(60)
        assert len(await collected(supervisor.client.submit(ask("a"), engine=0))) == 3
        assert pids(supervisor)[0] != victim
        assert os.path.exists(f"/proc/{victim}")
        stop(victim)


@pytest.mark.parametrize("crash", ["out of memory", ""])
async def test_engine_that_ends_and_hangs_in_shutdown_is_replaced(crash: str) -> None:
    async with supervised(1, restart=HANG) as supervisor:
        victim = pids(supervisor)[0]
        stream = supervisor.client.submit(ask("a", None, crash=crash, hang_at_the_end=True))
        if not crash:
            await anext(stream)
            stop(victim, signal.SIGTERM)
        with pytest.raises(EngineDead):
            await collected(stream)
        await until(lambda: supervisor.engines[0].state == "running" and pids(supervisor)[0] != victim)
        assert line_of("hang_in_a_lock") in supervisor.engines[0].cause


# Lockstep


def in_step(directory: Path) -> AbstractAsyncContextManager[EngineSupervisor]:
    kwargs = {"directory": str(directory)}
    return supervised(serve=hanging.serve_in_step, restart=HANG, lockstep=True, layout=None, kwargs=kwargs)


async def test_in_lockstep_the_engine_outside_of_the_collective_is_the_cause(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "aioshm.engine")
    async with in_step(tmp_path) as supervisor:
        first = pids(supervisor)
        await supervisor.restart(1)  # by hand, all of them
        assert not set(first) & set(pids(supervisor))
        before = pids(supervisor)
        stuck = supervisor.client.submit(ask("stuck", hang="hang_in_a_lock"), engine=1)
        died = rf"engine 1 \(pid {before[1]}\) hung for \d+ s at .*{line_of('hang_in_a_lock')}"
        with pytest.raises(EngineDead, match=died):
            await collected(stuck)
        await until(lambda: [info.state for info in supervisor.engines] == ["running"] * 2)
        assert not set(before) & set(pids(supervisor))
        assert "engine 1" in next(text for text in caplog.messages if "restarting all engines" in text)
        waits = next(text for text in caplog.messages if text.startswith("engine 0 "))
        assert "waits for its peers" in waits
        assert "has_unfinished_dp" in waits


async def test_in_lockstep_nobody_is_killed_for_a_stopped_engine(tmp_path: Path) -> None:
    async with in_step(tmp_path) as supervisor:
        client = supervisor.client
        before = pids(supervisor)
        _open = await begun(client, "long", engine=0)
        stop(before[1], signal.SIGSTOP)
        await until(lambda: [info.state for info in supervisor.engines] == ["stalled", "stopped"])
        await asyncio.sleep(1.5 * HANG_S)
        stop(before[1], signal.SIGCONT)
        await until(lambda: [info.state for info in supervisor.engines] == ["running"] * 2)
        assert pids(supervisor) == before


@pytest.mark.parametrize("is_paused", [False, True])
async def test_wave_whose_start_is_lost_with_the_coordinator_is_started(tmp_path: Path, is_paused: bool) -> None:
    async with asyncio.timeout(60), in_step(tmp_path) as supervisor:
        victim: int = supervisor.launch.coordinator.proc.pid  # type: ignore[assignment,union-attr]
        stop(victim, signal.SIGSTOP)
        stream = supervisor.client.submit(ask("a"), engine=0)
        await until(lambda: [*tmp_path.glob("*/rounds/0-1")])
        stop(victim)
        if is_paused:  # until the next one is there
            with suppress(TimeoutError):
                await supervisor.pause("keep", timeout=2)
            await supervisor.resume()
        assert len(await collected(stream)) == 3


# By hand


async def test_restart_replaces_engines_in_any_state_and_counts_for_no_crash_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("aioshm.engine.client.liveness.NAME_WITHIN_S", 30.0)  # a slow machine ends processes slowly
    running, stalled, other = range(3)
    async with supervised(3, restart=Restart(max_restarts=0)) as supervisor:
        client = supervisor.client
        before = pids(supervisor)
        stuck = client.submit(ask("stuck", hang="hang_in_a_lock"), engine=stalled)
        streams = [client.submit(ask(f"lost {rank}", None), engine=rank) for rank in (running, stalled)]
        await until(lambda: supervisor.engines[stalled].state == "stalled")
        await asyncio.gather(*(supervisor.restart(rank) for rank in (running, stalled) for _ in range(2)))
        assert pids(supervisor)[other] == before[other]
        for rank, stream in enumerate(streams):
            info = supervisor.engines[rank]
            assert (info.state, info.restarts, info.pid == before[rank]) == ("running", 1, False)
            assert f"engine {rank} (pid {before[rank]}) was ended, to be restarted" in info.cause
            with pytest.raises(EngineDead, match="to be restarted"):
                await collected(stream)
            assert len(await collected(client.submit(ask(f"again {rank}"), engine=rank))) == 3
        with pytest.raises(EngineDead, match="to be restarted"):
            await collected(stuck)


async def test_restart_of_an_engine_that_starts_slowly_waits_and_reports_no_stall() -> None:
    changes: list[RankInfo] = []
    async with supervised(1, on_change=changes.append, kwargs={"slow_start_s": 2.0}) as supervisor:
        before = pids(supervisor)[0]
        with pytest.raises(TimeoutError, match=r"engine 0 does not serve after 1.0 s: it is (stop|wait|start)ing"):
            await supervisor.restart(0, timeout=1.0)
        await supervisor.restart(0)
        info = supervisor.engines[0]
        assert (info.state, info.restarts, info.pid != before) == ("running", 1, True)
        assert {change.state for change in changes} <= {"stopping", "waiting", "starting", "running"}
        with pytest.raises(ValueError, match=r"index must be that of one of the engines \[0\], not 1"):
            await supervisor.restart(1)
        with pytest.raises(TypeError, match="index"):
            await supervisor.restart("0")  # type: ignore[arg-type]
    with pytest.raises(RoleError, match="inside `async with`"):
        await supervisor.restart(0)


# By hand, of an engine that takes its time to end


class SlowToEnd(Engine):
    """Writes a file at the end of its shutdown."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    async def shutdown(self) -> None:
        Path(self.path).touch()
        await asyncio.sleep(1)
        Path(f"{self.path}.done").touch()


def serve_slow_to_end(handshake_address: str, dp_rank: int, local_dp_rank: int, path: str) -> None:
    die_with_parent()
    asyncio.run(run_engine_core(SlowToEnd(path), handshake_address, dp_rank))


@asynccontextmanager
async def ending(
    tmp_path: Path,
    count: int,
    end: Callable[[EngineSupervisor], Coroutine[Any, Any, None]] | None = None,
    **options: Any,
) -> AsyncIterator[tuple[EngineSupervisor, asyncio.Task[None]]]:
    """Supervise engines, and restart the last one, or ``end`` it otherwise; its process is in its shutdown."""
    path = tmp_path / "shutdown"
    options |= {"layout": EngineLayout(coordinator=False, shutdown_timeout=30), "kwargs": {"path": str(path)}}
    async with supervised(count, serve=serve_slow_to_end, **options) as supervisor:
        end = end or (lambda supervisor: supervisor.restart(count - 1))
        restarting = asyncio.create_task(end(supervisor))
        await until(path.exists)
        yield supervisor, restarting


async def test_cancelled_restart_leaves_an_engine_the_time_to_end(tmp_path: Path) -> None:
    async with ending(tmp_path, 1) as (supervisor, restarting):
        assert supervisor.engines[0].state == "stopping"
        await cancelled(restarting)
        await supervisor.restart(0)
        assert (tmp_path / "shutdown.done").exists()
        assert supervisor.engines[0].restarts == 1


@pytest.mark.parametrize("by", ["scale", "cancelled aclose"])
async def test_restart_of_an_engine_that_is_stopped_meanwhile_ends(by: str, tmp_path: Path) -> None:
    async with ending(tmp_path, 2) as (supervisor, restarting):
        if by == "scale":
            await supervisor.scale(1)
            expected = pytest.raises(RoleError, match="engine 1 was stopped by scale")
        else:
            closing = asyncio.create_task(supervisor.aclose())
            await asyncio.sleep(0)
            closing.cancel()
            await asyncio.wait([closing])
            expected = pytest.raises(QueueClosed)  # type: ignore[assignment]
        with expected:
            async with asyncio.timeout(10):
                await restarting


async def test_peer_that_dies_of_a_restart_by_hand_counts_for_no_crash_loop(tmp_path: Path) -> None:
    restart = Restart(max_restarts=0)
    async with ending(tmp_path, 2, restart=restart, lockstep=True) as (supervisor, restarting):
        stop(pids(supervisor)[0])  # as after a failed collective
        await restarting
        assert [info.restarts for info in supervisor.engines] == [1, 1]


async def test_second_aclose_returns_after_the_first(tmp_path: Path) -> None:
    async with ending(tmp_path, 1, EngineSupervisor.aclose) as (supervisor, _):
        await supervisor.aclose()
        assert (tmp_path / "shutdown.done").exists()


async def test_cancelled_scaling_refuses_the_keys_of_a_killed_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ending(tmp_path, 2, lambda supervisor: supervisor.scale(1)) as (supervisor, scaling):
        void: list[tuple[int, int]] = []
        monkeypatch.setattr(supervisor.launch.startup, "void_keys", lambda *key: void.append(key))
        scaling.cancel()
        await asyncio.wait([scaling])
        assert void == [(1, 1)]


# API servers, their clients, and coordinators


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
        hanging.serve, 2, num_api_servers=2, layout=ALONE, client=CLIENT, restart=MANY
    ) as supervisor:
        async with api_servers(
            supervisor, hanging.serve_front_end, str(tmp_path), restart=HANG, on_change=seen.append
        ) as servers:
            await until(lambda: said(tmp_path, 0) and said(tmp_path, 1))
            assert await used(tmp_path) == [{0, 1}, {0, 1}]
            stop(pids(supervisor)[0], signal.SIGSTOP)
            await until(lambda: all(said(tmp_path, index)[2] == 1 for index in (0, 1)))
            assert supervisor.engines[0].state == "stopped"
            assert await used(tmp_path) == [{1}, {1}]
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
            assert await used(tmp_path) == [{0, 1}, {0, 1}], "its successor serves"


async def test_stopped_coordinator_is_named(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "aioshm.engine")
    async with launch_core_engines(hanging.serve, 2, client=CLIENT) as launch:
        assert launch.coordinator is not None
        pid = launch.coordinator.proc.pid or 0
        stop(pid, signal.SIGSTOP)
        await until(lambda: f"the coordinator (pid {pid}) is stopped: no progress for" in caplog.text)
        stop(pid, signal.SIGCONT)
        await until(lambda: f"the coordinator (pid {pid}) makes progress again" in caplog.text)
