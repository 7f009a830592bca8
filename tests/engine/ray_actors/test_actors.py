"""Engines as actors on a cluster of two simulated nodes: placed, started, one killed and named, closed."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import engine_targets
import pytest
import ray_targets as targets
from managed import gone
from ray_targets import GPUS
from served_engine import ask, begun, collected
from startups import starting
from support import cancelled, eventually, until

from aioshm.engine import (
    APIServerProcessManager,
    CoreEngine,
    CoreEngineActorManager,
    EngineLayout,
    EngineNeeds,
    EngineSupervisor,
    Restart,
    get_engine_client_zmq_addr,
    launch_core_engines,
    wait_for_completion_or_failure,
)
from aioshm.engine.client.liveness import GRACE_S
from aioshm.errors import EngineDead, EngineStartupError

ray: Any = pytest.importorskip("ray")

pytestmark = [
    pytest.mark.slow,  # a cluster takes ten seconds to start, each actor some more
    pytest.mark.usefixtures("runtime_dir"),
    pytest.mark.one_loop,  # reports of actors come from Ray's threads, whatever the loop
]

ADDRESS = get_engine_client_zmq_addr(False, "127.0.0.1")


@pytest.fixture(scope="module", autouse=True)
def cluster(ray_cluster: Any) -> str:
    """Return the id of the node that is not the head."""
    return str(ray_cluster.other.node_id)


@asynccontextmanager
async def startup(count: int, local: int, faults: dict[int, str] | None = None, **options: Any) -> Any:
    """Start engines, and begin to shake hands with them."""
    async with starting(ADDRESS, [CoreEngine(rank, local=rank < local) for rank in range(count)]) as made:
        manager = await CoreEngineActorManager.start(
            targets.shake_and_stay, count, local, args=(made.handshake_address, faults or {}), **options
        )
        async with manager:
            made.proc_manager = manager
            yield made, manager


class TestLaunch:
    async def test_everything_in_one_call(self, cluster: str) -> None:
        async with launch_core_engines(
            targets.serve_launched,
            2,
            1,
            layout=EngineLayout(backend="ray", host="127.0.0.1", manager_options={"timeout": 60}),
        ) as launch:
            assert isinstance(launch.engine_manager, CoreEngineActorManager)
            assert launch.coordinator is not None
            for rank in range(2):
                assert len(await collected(launch.client.submit(ask(str(rank)), engine=rank))) == 3
            pids = [actor.pid or 0 for actor in launch.processes]
            os.kill(pids[1], signal.SIGKILL)
            with pytest.raises(EngineDead, match="engine 1"):
                await collected(launch.client.submit(ask("a", None), engine=0))
        eventually(lambda: all(map(gone, pids)))


class TestStart:
    async def test_engines_are_placed_and_shake_hands(self, cluster: str) -> None:
        async with startup(3, 1, needs=EngineNeeds(world_size=2)) as (made, manager):
            report = await made.wait(timeout=60)
            assert report.num_gpu_blocks == 30
            here = ray.get_runtime_context().get_node_id()
            table = [ray.util.placement_group_table(group) for group in manager.created_placement_groups]
            assert [each["name"] for each in table] == ["dp_rank_0", "dp_rank_1", "dp_rank_2"]
            assert [set(each["bundles_to_node_id"].values()) for each in table] == [{here}, {cluster}, {cluster}]
            ready = [report.engines[rank].ready for rank in range(3)]
            assert [each["local_rank"] for each in ready] == [0, 0, 1]
            assert [each["devices"] for each in ready] == [2, 2, 2]
            assert [each["pid"] for each in ready] == [actor.pid for actor in manager.actors]
            assert [actor.local for actor in manager.actors] == [True, False, False]
            assert len(manager.sentinels()) == 3
            assert manager.finished_procs() == {}
        assert manager.finished_procs() == {"EngineCore_0": None, "EngineCore_1": None, "EngineCore_2": None}
        assert manager.sentinels() == []
        eventually(lambda: all(gone(actor.pid) for actor in manager.actors))

    def test_with_given_placement_groups(self, cluster: str) -> None:
        groups, ranks = CoreEngineActorManager.create_dp_placement_groups(
            2, 1, EngineNeeds(world_size=2, worker_bundles=True), timeout=60
        )
        assert ranks == [0, 0]
        assert groups[1].bundle_specs == [{"GPU": 1.0}, {"GPU": 1.0}, {"CPU": 1.0}]
        with CoreEngineActorManager(targets.leave, 2, 1, args=([None, None],), placement_groups=groups) as manager:
            assert manager.created_placement_groups == []
        assert [ray.util.placement_group_table(group)["state"] for group in groups] == ["CREATED", "CREATED"]
        for group in groups:
            ray.util.remove_placement_group(group)

    def test_a_cluster_that_is_too_small(self, monkeypatch: pytest.MonkeyPatch) -> None:
        eventually(lambda: ray.available_resources().get("GPU") == sum(GPUS.values()), "the release of all GPUs")
        monkeypatch.setattr("aioshm.engine.ray.cluster.STALE_S", 0)
        with pytest.raises(EngineStartupError, match=r"too small: 5 engines are to run on other nodes .* room for 4"):
            CoreEngineActorManager(targets.leave, 6, 1)

    def test_an_actor_that_cannot_be_started(self) -> None:
        with pytest.raises(EngineStartupError, match=r"actor of EngineCore_0 (was not started in time|could not be)"):
            CoreEngineActorManager(targets.leave, 1, 1, runtime_env={"py_executable": "/nowhere/python"}, timeout=2)

    def test_a_group_that_is_not_reserved_in_time(self) -> None:
        group = ray.util.placement_group([{"GPU": 1, "no such thing": 1}])
        with pytest.raises(EngineStartupError, match="placement group of engine 0 was not reserved in time"):
            CoreEngineActorManager(targets.leave, 1, 1, placement_groups=[group], timeout=0.5)
        ray.util.remove_placement_group(group)

    def test_a_local_engine_elsewhere(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "192.0.2.99")
        with pytest.raises(EngineStartupError, match=r"EngineCore_0 \(pid .*\) is to be local, but"):
            CoreEngineActorManager(targets.leave, 1, 1)

    def test_invalid_arguments_are_refused(self) -> None:
        wrong: list[tuple[Any, type[Exception], str]] = [
            ((0, 0), ValueError, "engine_count"),
            ((1, 2), ValueError, "local_engine_count"),
            (("1", 1), TypeError, "engine_count"),
        ]
        for arguments, error, name in wrong:
            with pytest.raises(error, match=name):
                CoreEngineActorManager(targets.leave, *arguments)
        together: list[dict[str, Any]] = [
            {"placement_groups": []},
            {"local_dp_ranks": [0]},
            {"placement_groups": [None], "needs": EngineNeeds()},
        ]
        for options in together:
            with pytest.raises(ValueError, match="placement_groups"):
                CoreEngineActorManager(targets.leave, 1, 1, **options)


class TestDeath:
    @pytest.mark.parametrize(
        ("fault", "says"),
        [
            ("die", ["connected) exited; its exit code is not known", "worker process has died"]),
            ("raise", ["connected) exited with code 1", "ArithmeticError: the model is too large"]),
        ],
    )
    async def test_before_it_is_ready_fails_the_startup(self, fault: str, says: list[str]) -> None:
        async with startup(2, 1, {1: fault}) as (made, manager):
            with pytest.raises(EngineStartupError) as caught:
                await made.wait(timeout=60)
            actor = manager.actors[1]
            says = [f"EngineCore_1 (pid {actor.pid} on {actor.host}, {says[0]}", *says[1:]]
            assert all(each in str(caught.value) for each in says), str(caught.value)
            assert list(caught.value.failed) == ["EngineCore_1"]
            assert manager.sentinels() == []

    async def test_of_a_running_one_is_noticed_and_named(self) -> None:
        async with startup(2, 1) as (made, manager):
            await made.wait(timeout=60)
            servers = APIServerProcessManager(engine_targets.serve_badly, "here", None, [None], 1, ["a"], ["b"])
            waiting = asyncio.create_task(wait_for_completion_or_failure(servers, manager))
            await asyncio.sleep(0)
            os.kill(manager.actors[1].pid, signal.SIGKILL)
            with pytest.raises(EngineDead) as caught:
                async with asyncio.timeout(60):
                    await waiting
            first, *rest = str(caught.value).splitlines()
            actor = manager.actors[1]
            assert (caught.value.engine, caught.value.pid) == (1, actor.pid)
            assert first == f"EngineCore_1 (pid {actor.pid} on {actor.host}) died"
            assert any("worker process has died" in line for line in rest)
            eventually(lambda: gone(manager.actors[0].pid))
            assert servers.finished_procs()


class TestEnd:
    async def test_is_not_cut_short(self) -> None:
        manager = await CoreEngineActorManager.start(targets.leave, 1, 0, args=([None],))
        closing = asyncio.create_task(manager.aclose())
        await asyncio.sleep(0)
        await cancelled(closing)
        assert manager.finished_procs() == {"EngineCore_0": None}

    async def test_of_one_whose_start_is_cancelled(self) -> None:
        starting = asyncio.create_task(CoreEngineActorManager.start(targets.leave, 2, 1, args=([None, None],)))
        await asyncio.sleep(0.05)
        await cancelled(starting)
        async with asyncio.timeout(60):
            while ray.available_resources().get("GPU") != sum(GPUS.values()):
                await asyncio.sleep(0.05)

    def test_of_one_that_is_forgotten(self) -> None:
        manager = CoreEngineActorManager(targets.leave, 1, 1, args=([None],))
        pid = manager.actors[0].pid
        with pytest.warns(ResourceWarning, match="was not closed"):
            del manager
        eventually(lambda: gone(pid))


FRONT_END = """
import sys
import ray
import ray_targets as targets
from aioshm.engine import CoreEngineActorManager

options = {"address": sys.argv[1], "log_to_driver": False}
with CoreEngineActorManager(targets.leave, 1, 1, args=([None],), ray_options=options) as manager:
    print(manager.actors[0].pid, flush=True)
    sys.stdin.read()
print("connected" if ray.is_initialized() else "left")
"""


@pytest.mark.parametrize("killed", [False, True])
def test_front_end_that_leaves_or_is_killed_takes_its_actors_and_its_connection_along(killed: bool) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", FRONT_END, ray.get_runtime_context().gcs_address],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert not gone(pid)
        if killed:
            process.kill()
        output, _ = process.communicate(timeout=60)
    assert (process.returncode, output) == ((-signal.SIGKILL, "") if killed else (0, "left\n"))
    eventually(lambda: gone(pid))


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"pip install 'aioshm\[ray\]'"):
        CoreEngineActorManager(targets.leave, 1, 1)


# Actors that come back

ONE_CHIP = EngineNeeds(world_size=1, device="chip")


class Nodes:
    """Nodes with one chip each, which come and leave."""

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster
        self._nodes: list[Any] = []

    def add(self) -> str:
        """Add one, and return its id."""
        self._nodes.append(self._cluster.add_node(resources={"chip": 1}, **targets.NODE))
        return str(self._nodes[-1].node_id)

    def lose(self) -> None:
        """Let the one that was added last crash, if there is any."""
        if self._nodes:
            node = self._nodes.pop()
            self._cluster.remove_node(node, allow_graceful=False)
            eventually(
                lambda: not any(each["NodeID"] == node.node_id and each["Alive"] for each in ray.nodes()), "its end"
            )


@pytest.fixture
def nodes(ray_cluster: Any) -> Iterator[Nodes]:
    made = Nodes(ray_cluster.cluster)
    yield made
    made.lose()


@asynccontextmanager
async def supervised(
    count: int, local: int, target: Callable[..., object] = targets.serve_launched, **options: Any
) -> AsyncIterator[tuple[EngineSupervisor, CoreEngineActorManager]]:
    manager_options = options.pop("manager_options", {"needs": ONE_CHIP, "timeout": 60})
    async with EngineSupervisor(
        target,
        count,
        local_engine_count=local,
        layout=EngineLayout(backend="ray", host="127.0.0.1", manager_options=manager_options),
        **options,
    ) as supervisor:
        manager = supervisor.launch.engine_manager
        assert isinstance(manager, CoreEngineActorManager)
        yield supervisor, manager


async def serves(supervisor: EngineSupervisor, rank: int, restarts: int) -> None:
    """Wait until an engine is back for so many times, and see that it serves."""

    def back() -> bool:
        info = supervisor.engines[rank]
        return info.state == "running" and info.restarts == restarts

    await until(back)
    await supervisor.wait_until_ready(30)
    assert len(await collected(supervisor.client.submit(ask(f"{rank} {restarts}"), engine=rank))) == 3


async def test_actor_comes_back_also_when_its_node_has_left(
    nodes: Nodes, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aioshm.engine.ray.manager.PROGRESS_S", 0.2)
    caplog.set_level(logging.WARNING, "aioshm.engine")
    first_node = nodes.add()
    async with supervised(3, 2) as (supervisor, manager):  # the head has no chip left
        first = supervisor.engines[2].pid
        assert first
        assert manager.actors[2].node_id == first_node
        stream = await begun(supervisor.client, "lost", engine=2)
        os.kill(first, signal.SIGKILL)
        with pytest.raises(EngineDead, match=rf"engine 2 \(pid {first} on .*\) exited|engine 2 .* is gone"):
            await collected(stream)
        await serves(supervisor, 2, restarts=1)
        assert supervisor.engines[2].pid != first
        assert manager.actors[2].node_id == first_node, "in its placement group"
        assert f"engine 2 (pid {first} on" in supervisor.engines[2].cause

        nodes.lose()
        await until(lambda: "engine 2 waits for room" in caplog.text)
        assert "Each needs 1 chip and 1 CPU. Free are:" in caplog.text
        assert len(await collected(supervisor.client.submit(ask("meanwhile")))) == 3  # the others serve
        assert supervisor.engines[2].state == "waiting"
        second_node = nodes.add()
        await serves(supervisor, 2, restarts=2)
        assert manager.actors[2].node_id == second_node
        assert [each.restarts for each in supervisor.engines] == [0, 0, 2]
        assert manager.next_incarnation(2) == 3, "each has had keys of its own"
        assert supervisor.client.stats().deaths == 2
        assert [actor.local_rank for actor in manager.actors] == [0, 1, 0]

        await supervisor.scale(2)
        await until(lambda: ray.available_resources().get("chip") == 1, "the return of its room")


async def test_actor_that_hangs_is_killed_and_comes_back_and_time_stopped_does_not_count() -> None:
    """The actor sends heartbeats; the client of the supervisor judges them."""
    needs = EngineNeeds(world_size=0)
    restart = Restart(hang_s=1.0)
    options = {"restart": restart, "target": targets.serve_hanging, "manager_options": {"needs": needs}}
    async with supervised(2, 1, **options) as (supervisor, _):
        first = supervisor.engines[0].pid or 0
        stream = supervisor.client.submit(ask("hangs", hang=True), engine=0)
        await asyncio.sleep(0.5)  # the step blocks the loop, which says nothing more
        os.kill(first, signal.SIGSTOP)
        await until(lambda: supervisor.engines[0].state == "stopped")
        os.kill(first, signal.SIGCONT)
        continued = time.monotonic()
        with pytest.raises(EngineDead, match=rf"engine 0 \(pid {first} on .*\) hung for \d+ s, and was killed"):
            await collected(stream)
        assert time.monotonic() - continued >= 1.0 + GRACE_S
        await serves(supervisor, 0, restarts=1)
        assert supervisor.engines[0].pid != first
        assert "hung for" in supervisor.engines[0].cause
