"""Where engines are placed, and how actors are recreated and stopped, on a cluster that does as a test says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
from support import eventually

from aioshm import Placement
from aioshm.engine import CoreEngineActorManager, EngineNeeds
from aioshm.engine.ray import actor as acting
from aioshm.engine.ray import cluster
from aioshm.engine.ray import manager as managing
from aioshm.engine.ray.cluster import Node, place_engines
from aioshm.errors import EngineStartupError, RoleError

NEEDS = EngineNeeds()
HEAD = Node("h", "10.0.0.1", devices=4, cpus=8, head=True)
SMALL = Node("s", "10.0.0.2", devices=2, cpus=8)
LARGE = Node("l", "10.0.0.3", devices=8, cpus=8)
CLUSTER = [SMALL, HEAD, LARGE]


def places(*arguments: Any, **needs: Any) -> str:
    return "".join(node.id for node in place_engines(*arguments, EngineNeeds(**needs)))


class TestPlaces:
    @pytest.mark.parametrize(
        ("engines", "local", "needs", "expected"),
        [
            (1, 1, {}, "h"),
            (1, 0, {}, "l"),
            (3, 2, {}, "hhl"),
            (4, 1, {"world_size": 4}, None),
            (3, 1, {"world_size": 4}, "hll"),
            (4, 2, {"world_size": 2, "cpus": 7}, None),
            (7, 2, {"world_size": 2}, "hhlllls"),
            (3, 0, {"world_size": 0, "cpus": 4}, "lls"),
            (6, 2, {"world_size": 2, "pack_strategy": "strict"}, None),
            (4, 2, {"world_size": 2, "pack_strategy": "strict"}, "hhll"),
            (3, 1, {"world_size": 2, "pack_strategy": "strict"}, "hls"),
        ],
    )
    def test_are_as_documented(self, engines: int, local: int, needs: dict[str, Any], expected: Any) -> None:
        if expected is None:
            with pytest.raises(EngineStartupError, match=r"^the cluster is too small: "):
                places(CLUSTER, engines, local, **needs)
        else:
            assert places(CLUSTER, engines, local, **needs) == expected


class TestErrors:
    def test_too_few_devices_on_the_head(self) -> None:
        with pytest.raises(EngineStartupError) as caught:
            places(CLUSTER, 3, 3, world_size=2)
        assert str(caught.value) == (
            "the cluster is too small: 3 engines are to run on the head node 10.0.0.1 with room for 2. "
            "Each needs 2 GPU and 1 CPU. Free are: "
            "10.0.0.2: 2 GPU, 8 CPU; 10.0.0.1 (head): 4 GPU, 8 CPU; 10.0.0.3: 8 GPU, 8 CPU"
        )

    def test_no_nodes(self) -> None:
        with pytest.raises(EngineStartupError, match=r"a head node, which is missing.*no nodes"):
            places([], 1, 1)
        with pytest.raises(EngineStartupError, match="no nodes"):
            places([], 1, 0)

    @pytest.mark.parametrize(
        "needs", [{"world_size": -1}, {"world_size": "1"}, {"cpus": 0}, {"cpus": float("inf")}, {"pack_strategy": "x"}]
    )
    def test_bad_needs_are_named(self, needs: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=next(iter(needs))):
            EngineNeeds(**needs)


@pytest.mark.parametrize(
    ("needs", "bundles"),
    [
        ({}, [{"GPU": 1, "CPU": 1}]),
        ({"world_size": 4, "device": "TPU", "cpus": 2.5}, [{"TPU": 4, "CPU": 2.5}]),
        ({"world_size": 0}, [{"CPU": 1}]),
        ({"world_size": 2, "worker_bundles": True}, [{"GPU": 1}, {"GPU": 1}, {"CPU": 1}]),
    ],
)
def test_bundles_are_as_documented(needs: dict[str, Any], bundles: list[dict[str, float]]) -> None:
    assert EngineNeeds(**needs).bundles() == bundles


# Actors that are recreated


class Handle:
    """Ray's handle of an actor."""

    def __init__(self, ray: Ray, group: str) -> None:
        self.rank = int(group.split()[-1])
        self.where = SimpleNamespace(remote=lambda: None)
        self.run = SimpleNamespace(remote=self._run)
        self.outcome = Future[None]()
        self._ray = ray

    def _run(self, *_: Any) -> Any:
        if self._ray.refuses:
            raise TypeError("the target cannot be pickled")
        return SimpleNamespace(future=lambda: self.outcome)


class Ray:
    """A cluster; placement groups are named "NODE group of RANK"."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room: list[str] = []  # the nodes with room, in the order of their use
        self.lost: set[str] = set()  # groups whose nodes have left
        self.slow: set[str] = set()  # groups in which no process ever runs
        self.removed: list[str] = []
        self.killed: list[int] = []  # ranks
        self.refuses = False  # whether running an engine fails
        util = SimpleNamespace(get_node_ip_address=lambda: "10.0.0.6")
        package = SimpleNamespace(util=util, is_initialized=lambda: True, kill=self.kill)
        for name in ("reserve_room", "trouble_of", "node_of", "remove_groups", "create_dp_placement_groups"):
            monkeypatch.setattr(cluster, name, getattr(self, name))
        for name in ("connect", "disconnect", "await_groups"):
            monkeypatch.setattr(cluster, name, lambda *_: None)
        monkeypatch.setattr(cluster, "require_ray", lambda: package)
        monkeypatch.setattr(acting, "require_ray", lambda: package)
        monkeypatch.setattr(acting, "_create", lambda group, _: Handle(self, group))
        monkeypatch.setattr(acting.EngineActor, "await_process", lambda actor, _: self.await_process(actor))
        monkeypatch.setattr(managing, "_POLL_S", 0.001)

    def create_dp_placement_groups(self, count: int, local: int, needs: EngineNeeds, timeout: float) -> Any:
        return [self.reserve_room(rank, rank < local, needs) for rank in range(count)], []

    def reserve_room(self, rank: int, local: bool, needs: EngineNeeds) -> str:
        if not self.room:
            raise EngineStartupError("the cluster is too small")
        return f"{self.room.pop(0)} group of {rank}"

    def trouble_of(self, group: str) -> str:
        return "its node has left" if group in self.lost else ""

    def node_of(self, group: str) -> str:
        return group.split()[0]

    def remove_groups(self, groups: list[str], wait: bool = True) -> None:
        self.removed += groups

    def await_process(self, actor: acting.EngineActor) -> bool:
        if actor.group in self.slow:
            Event().wait(0.001)
            return False
        actor.host = "10.0.0.6"
        actor.pid = 7
        return True

    def kill(self, handle: Handle) -> None:
        self.killed.append(handle.rank)
        if not handle.outcome.done():
            handle.outcome.set_result(None)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Ray:
    return Ray(monkeypatch)


Managed = Callable[..., CoreEngineActorManager]


@pytest.fixture
def managed(ray: Ray) -> Iterator[Managed]:
    """Create managers whose engines run on these nodes at first."""
    made: list[CoreEngineActorManager] = []

    def create(*nodes: str, timeout: float = 100.0, **options: Any) -> CoreEngineActorManager:
        ray.room = [*nodes]
        manager = CoreEngineActorManager(print, len(nodes), 0, timeout=timeout, **options)
        made.append(manager)
        return manager

    yield create
    for each in made:
        each.close()


def nodes(manager: CoreEngineActorManager) -> list[tuple[str, int]]:
    return [(actor.node_id, actor.local_rank) for actor in manager.actors]


def test_given_local_rank_is_kept_by_a_recreated_actor(managed: Managed) -> None:
    groups = ["a group of 0", "a group of 1"]
    manager = managed("a", "a", placement_groups=groups, local_dp_ranks=[4, 5])
    manager.actors[0].kill()
    manager.start_engine(0)
    assert nodes(manager) == [("a", 4), ("a", 5)]


def test_actor_comes_back_in_its_group_until_the_group_is_lost(ray: Ray, managed: Managed) -> None:
    manager = managed("a", timeout=0.2)
    for _ in range(2):
        with pytest.raises(RoleError, match="engine 0 still runs"):
            manager.start_engine(0)
        manager.actors[0].kill()
        actor = manager.start_engine(0)
        assert manager.actors == manager.processes == [actor]
        assert (actor.node_id, manager.created_placement_groups) == ("a", ["a group of 0"])
    assert manager.next_incarnation(0) == 3
    ray.room = ["b"]
    ray.lost.add("a group of 0")
    actor.kill()
    assert manager.start_engine(0).node_id == "b"
    assert ray.removed == ["a group of 0"]
    ray.lost.add("b group of 0")
    manager.actors[0].kill()
    with pytest.raises(EngineStartupError, match=r"no room for engine 0 within 0.2 s: the cluster is too small"):
        manager.start_engine(0)
    assert manager.created_placement_groups == []


def test_engines_of_one_node_have_different_local_ranks(ray: Ray, managed: Managed) -> None:
    manager = managed("a", "a", "b", "a")
    assert nodes(manager) == [("a", 0), ("a", 1), ("b", 0), ("a", 2)]
    manager.actors[1].kill()
    assert manager.start_engine(1).local_rank == 1
    manager._stop(0)
    ray.lost.add("b group of 2")
    ray.room = ["a"]
    manager.actors[1].kill()
    assert manager.start_engine(2).local_rank == 0, "of the stopped engine"
    assert [actor.rank for actor in manager.actors] == [1, 2, 3]


@pytest.mark.parametrize("by", ["stop", "close"])
def test_stopping_or_closing_ends_the_wait_for_room(by: str, ray: Ray, managed: Managed) -> None:
    manager = managed("a")
    with ThreadPoolExecutor() as pool:
        future = pool.submit(manager.start_engine, 1)
        eventually(lambda: 1 in manager._engines and manager._engines[1].busy.locked())
        with pytest.raises(RoleError, match="engine 1 still runs"):
            manager.start_engine(1)
        if by == "stop":
            manager._stop(1)
        else:
            manager.close()
        assert not manager._engines[1].busy.locked(), "no thread uses Ray any more"
        with pytest.raises(RoleError, match="engine 1 is stopped" if by == "stop" else "is closed"):
            future.result()
    ray.room = ["a"]
    if by == "stop":
        assert manager.start_engine(1).node_id == "a"
        with pytest.raises(ValueError, match="rank must be that of one of the engines, not 2"):
            manager._stop(2)
    else:
        with pytest.raises(RoleError, match="is closed"):
            manager.start_engine(1)


def test_actor_that_gets_no_engine_is_killed(ray: Ray, managed: Managed) -> None:
    manager = managed("a")
    ray.room = ["a"]
    ray.refuses = True
    with pytest.raises(TypeError, match="pickled"):
        manager.start_engine(1)
    assert (ray.killed, len(manager.actors)) == ([1], 1)


def test_actor_that_cannot_be_created_leaves_no_group(
    ray: Ray, managed: Managed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(group: str, _: Any) -> Any:
        raise ValueError("runtime_env is invalid")

    monkeypatch.setattr(acting, "_create", refuse)
    with pytest.raises(ValueError, match="runtime_env is invalid"):
        managed("a", "b")
    assert ray.removed == ["a group of 0", "b group of 1"]


def test_given_groups_are_not_replaced(ray: Ray, managed: Managed) -> None:
    manager = managed("a", "b", placement_groups=["b group of 0", "a group of 1"], timeout=0.2)
    assert manager.max_engines == 2
    for actor in manager.actors:
        actor.kill()
    ray.lost = ray.slow = {"a group of 1"}
    with pytest.raises(EngineStartupError, match="EngineCore_1 was not started in time: its node has left"):
        manager.start_engine(1)
    with pytest.raises(EngineStartupError, match="engine 2 has no placement group: 2 were given"):
        manager.start_engine(2)
    assert manager.start_engine(0).node_id == "b"
    manager._stop(0)
    assert ray.removed == []


@pytest.mark.parametrize(
    ("head", "other", "local", "where"), [(1, 1, False, ["other"]), (1, 0, False, ["head"]), (0, 1, True, [])]
)
def test_room_is_reserved_where_there_is_any(
    monkeypatch: pytest.MonkeyPatch, head: int, other: int, local: bool, where: list[str]
) -> None:
    made: list[str] = []
    group = SimpleNamespace(wait=lambda _timeout: True)
    nodes = [Node("head", "head", head, 8.0, head=True), Node("other", "other", other, 8.0)]
    monkeypatch.setattr(cluster, "nodes", lambda _device: nodes)
    monkeypatch.setattr(cluster, "_group_on", lambda node, *_: made.append(node.id) or group)
    text = r"too small: 1 engines are to run on .* Free are: head \(head\)"
    with nullcontext() if where else pytest.raises(EngineStartupError, match=text):
        cluster.reserve_room(1, local, NEEDS)
    assert made == where


def test_actors_get_the_environment_of_their_rank(managed: Managed, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    create = acting._create
    monkeypatch.setattr(acting, "_create", lambda group, env: given.append(env) or create(group, env))
    placement = Placement(env=lambda rank: {"DEVICE": str(rank)})
    manager = managed("a", "b", placement=placement, runtime_env={"pip": ["x"], "env_vars": {"MODE": "fast"}})
    manager.actors[1].kill()
    manager.start_engine(1)
    assert given == [{"pip": ["x"], "env_vars": {"MODE": "fast", "DEVICE": rank}} for rank in "011"]


@pytest.mark.parametrize(
    ("placement", "text"),
    [
        (Placement(cpus=[0]), r"placement must have env only with Ray, .* needs=EngineNeeds\(cpus=...\)"),
        (Placement(numa_node=0), r"placement must have env only with Ray"),
        (Placement(env={"DEVICE": None}), "placement.env of rank 0 must not unset DEVICE: Ray only sets variables"),
    ],
)
def test_placement_that_ray_cannot_have_is_an_error(managed: Managed, placement: Placement, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        managed("a", placement=placement)
