"""Engines as actors on a cluster of two simulated nodes: placed, started, one killed and named, closed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from typing import Any

import engine_targets
import pytest
import ray_targets as targets
from managed import gone
from ray_targets import GPUS
from served_engine import ask, collected
from startups import addresses
from support import cancelled, eventually

from aioshm.engine import (
    APIServerProcessManager,
    CoreEngine,
    CoreEngineActorManager,
    EngineLayout,
    EngineNeeds,
    EngineStartupCoordinator,
    get_engine_client_zmq_addr,
    launch_core_engines,
    wait_for_completion_or_failure,
)
from aioshm.errors import EngineDead, EngineStartupError

ray: Any = pytest.importorskip("ray")

pytestmark = [pytest.mark.slow, pytest.mark.one_loop]  # a cluster takes ten seconds to start, each actor some more

ADDRESS = get_engine_client_zmq_addr(False, "127.0.0.1")


@pytest.fixture(scope="module", autouse=True)
def cluster(ray_cluster: Any) -> str:
    """Return the id of the node that is not the head."""
    return str(ray_cluster.other.node_id)


@contextlib.asynccontextmanager
async def startup(count: int, local: int, faults: dict[int, str] | None = None, **options: Any) -> Any:
    """Start engines, and begin to shake hands with them."""
    engines = [CoreEngine(rank, local=rank < local) for rank in range(count)]
    async with EngineStartupCoordinator(ADDRESS, engines, addresses()) as made:
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
        with pytest.raises(EngineStartupError, match=r"too small: 3 engines are to run on the head node .* room for 2"):
            CoreEngineActorManager(targets.leave, 3, 3)
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
