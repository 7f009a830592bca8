"""What is decided when actors are made again, without a cluster."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from support import eventually

from aioshm.engine import EngineNeeds
from aioshm.engine.ray import cluster
from aioshm.engine.ray.actor import EngineActor
from aioshm.engine.ray.placement import Node
from aioshm.engine.ray.remaking import Remaking
from aioshm.errors import EngineStartupError, RoleError

NEEDS = EngineNeeds()


class Ray:
    """A cluster that does what the test says.

    Attributes:
        room: On which nodes there is room, in the order in which they are taken.
        lost: Placement groups whose nodes have left.
        slow: Placement groups in which no process is ever there.
        removed: Placement groups that were given back.
        killed: Which actors were killed, by rank.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room: list[str] = []
        self.lost: set[str] = set()
        self.slow: set[str] = set()
        self.removed: list[str] = []
        self.killed: list[int] = []
        for name in ("group_where_there_is_room", "trouble_of", "nodes_of", "remove_groups", "actor_in"):
            monkeypatch.setattr(f"aioshm.engine.ray.remaking.{name}", getattr(self, name))
        monkeypatch.setattr("aioshm.engine.ray.remaking._LOOK_S", 0.001)
        ray = self

        class Actor(EngineActor):
            def __init__(self, rank: int, local: bool, handle: Any) -> None:
                super().__init__(rank, local, FakeHandle())
                self.group = handle

            def await_process(self, timeout: float) -> bool:
                if self.group in ray.slow:
                    threading.Event().wait(0.001)
                    return False
                self.address, self.pid = "10.0.0.6", 7
                return True

            def kill(self) -> None:
                ray.killed.append(self.rank)
                self._ended.set()

        monkeypatch.setattr("aioshm.engine.ray.remaking.EngineActor", Actor)

    def group_where_there_is_room(self, rank: int, local: bool, needs: EngineNeeds) -> str:
        if not self.room:
            raise EngineStartupError("the cluster is too small")
        return f"{self.room.pop(0)} group of {rank}"

    def trouble_of(self, group: str) -> str:
        return "its node has left" if group in self.lost else ""

    def nodes_of(self, groups: list[str]) -> list[str]:
        return [group.split()[0] for group in groups]

    def remove_groups(self, groups: list[str], wait: bool = True) -> None:
        self.removed += groups

    def actor_in(self, group: str, runtime_env: object) -> str:
        return group


class FakeHandle:
    def __getattr__(self, name: str) -> Any:
        return self

    def remote(self) -> None:
        return None


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Ray:
    return Ray(monkeypatch)


@pytest.fixture
def actors() -> Iterator[list[EngineActor]]:
    made: list[EngineActor] = []
    yield made
    for each in made:
        each.release()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as made:
        yield made


def started(remaking: Remaking, rank: int) -> EngineActor:
    return remaking.start(rank, False, lambda actor: None)


def starting(remaking: Remaking, rank: int, pool: ThreadPoolExecutor) -> Future[EngineActor]:
    """Begin to start an engine, and return when that waits for room."""
    future = pool.submit(started, remaking, rank)
    eventually(lambda: rank in remaking._starting)
    return future


def test_one_comes_back_in_its_group_until_that_is_lost(ray: Ray, actors: list[EngineActor]) -> None:
    ray.room = ["a", "b"]
    groups: dict[int, Any] = {}
    remaking = Remaking(actors, groups, NEEDS, None, 1.0)
    for _ in range(2):
        actor = started(remaking, 1)
        assert (actor.node_id, groups) == ("a", {1: "a group of 1"})
        assert actors == [actor]
        with pytest.raises(RoleError, match="engine 1 still runs"):
            started(remaking, 1)
        actor.kill()
    ray.lost.add("a group of 1")
    assert started(remaking, 1).node_id == "b"
    assert ray.removed == ["a group of 1"]
    ray.lost.add("b group of 1")
    actors[0].kill()
    with pytest.raises(EngineStartupError, match=r"no room for engine 1 within 1 s: the cluster is too small"):
        started(remaking, 1)
    assert groups == {}


def test_a_node_that_leaves_before_the_process_is_there(
    ray: Ray, actors: list[EngineActor], caplog: pytest.LogCaptureFixture
) -> None:
    ray.room = ["a", "b"]
    ray.slow = ray.lost = {"a group of 1"}
    remaking = Remaking(actors, {}, NEEDS, None, 30.0)
    assert started(remaking, 1).node_id == "b"
    assert (ray.killed, ray.removed) == ([1], ["a group of 1"])
    assert "engine 1: its node has left before it was there" in caplog.text


def test_a_process_that_is_never_there(ray: Ray, actors: list[EngineActor]) -> None:
    ray.room, ray.slow = ["a"], {"a group of 1"}
    remaking = Remaking(actors, {}, NEEDS, None, 0.05)
    with pytest.raises(EngineStartupError, match="the actor of EngineCore_1 was not started in time"):
        started(remaking, 1)
    assert (ray.killed, actors) == ([1], [])


def test_engines_of_one_node_are_told_apart(ray: Ray, actors: list[EngineActor]) -> None:
    ray.room = ["a", "a", "b", "a", "a"]
    remaking = Remaking(actors, {}, NEEDS, None, 1.0)
    assert [started(remaking, rank).local_rank for rank in range(4)] == [0, 1, 0, 2]
    actors[1].kill()
    assert started(remaking, 1).local_rank == 1
    remaking.stop(0)
    ray.lost.add("b group of 2")
    actors[1].kill()
    assert started(remaking, 2).local_rank == 0, "that of the one that is stopped"
    assert [actor.rank for actor in actors] == [1, 2, 3]


def test_stopping_one_that_waits_for_room_gives_up(
    ray: Ray, actors: list[EngineActor], pool: ThreadPoolExecutor
) -> None:
    remaking = Remaking(actors, {}, NEEDS, None, 100.0)
    future = starting(remaking, 1, pool)
    with pytest.raises(RoleError, match="engine 1 still runs"):
        started(remaking, 1)
    remaking.stop(1)
    with pytest.raises(RoleError, match="engine 1 is stopped"):
        future.result()
    ray.room = ["a"]
    assert started(remaking, 1).node_id == "a"
    with pytest.raises(ValueError, match="rank must be that of one of the engines, not 2"):
        remaking.stop(2)


def test_stopping_one_that_is_there_gives_its_room_back(ray: Ray, actors: list[EngineActor]) -> None:
    ray.room = ["a"]
    remaking = Remaking(actors, {}, NEEDS, None, 1.0)
    started(remaking, 1)
    remaking.stop(1)
    assert (ray.killed, ray.removed, actors) == ([1], ["a group of 1"], [])


def test_closing_gives_up(ray: Ray, actors: list[EngineActor], pool: ThreadPoolExecutor) -> None:
    remaking = Remaking(actors, {}, NEEDS, None, 100.0)
    future = starting(remaking, 1, pool)
    remaking.close(wait=True)
    assert not remaking._starting, "Ray is not asked for anything any more"
    for attempt in (future.result, lambda: started(remaking, 1)):
        with pytest.raises(RoleError, match="is closed"):
            attempt()


def test_an_actor_that_cannot_be_told_is_killed(ray: Ray, actors: list[EngineActor]) -> None:
    ray.room = ["a"]
    remaking = Remaking(actors, {}, NEEDS, None, 1.0)

    def fail(_actor: EngineActor) -> None:
        raise TypeError("the target cannot be pickled")

    with pytest.raises(TypeError, match="pickled"):
        remaking.start(1, False, fail)
    assert (ray.killed, actors) == ([1], [])


def test_given_groups_are_not_replaced(ray: Ray, actors: list[EngineActor]) -> None:
    ray.lost.add("a group of 1")
    groups = {0: "b group of 0", 1: "a group of 1"}
    remaking = Remaking(actors, groups, None, None, 0.01)
    with pytest.raises(EngineStartupError, match=r"no room for engine 1 within 0.01 s: its node has left"):
        started(remaking, 1)
    with pytest.raises(EngineStartupError, match="engine 2 has no placement group: they were given"):
        started(remaking, 2)
    assert started(remaking, 0).node_id == "b"
    remaking.stop(0)
    assert (ray.removed, groups) == ([], {0: "b group of 0", 1: "a group of 1"})


@pytest.mark.parametrize(
    ("free", "local", "where"),
    [
        ({"head": 1, "other": 1}, True, "head"),
        ({"head": 1, "other": 1}, False, "other"),
        ({"head": 1, "other": 0}, False, "head"),
        ({"head": 0, "other": 1}, True, None),
        ({"head": 0, "other": 0}, False, None),
    ],
)
def test_where_there_is_room(
    monkeypatch: pytest.MonkeyPatch, free: dict[str, int], local: bool, where: str | None
) -> None:
    class Group:
        def wait(self, timeout: float) -> bool:
            return True

    made: list[str] = []
    monkeypatch.setattr(
        cluster, "nodes", lambda device: [Node(name, name, free[name], 8.0, head=name == "head") for name in free]
    )
    monkeypatch.setattr(cluster, "_group_on", lambda node_id, rank, needs: made.append(node_id) or Group())
    if where is None:
        with pytest.raises(EngineStartupError, match=r"too small: 1 engines are to run on .* Free are: head \(head\)"):
            cluster.group_where_there_is_room(1, local, NEEDS)
    else:
        cluster.group_where_there_is_room(1, local, NEEDS)
    assert made == ([where] if where else [])
