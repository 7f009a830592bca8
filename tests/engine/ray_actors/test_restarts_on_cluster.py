"""Actors that are recreated: in place, on another node when theirs has left the cluster, or not at all."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import ray_targets as targets
from served_engine import ask, begun, collected
from support import eventually, until

from aioshm.engine import CoreEngineActorManager, EngineLayout, EngineNeeds, EngineSupervisor, Restart
from aioshm.engine.client.liveness import GRACE_S
from aioshm.errors import EngineDead

ray: Any = pytest.importorskip("ray")

# Each actor takes seconds to start, and each node some more.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("runtime_dir"),
    pytest.mark.one_loop,  # reports of actors come from Ray's threads, whatever the loop
]

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


async def test_actor_that_hangs_is_killed_and_comes_back_and_time_stopped_does_not_count(ray_cluster: Any) -> None:
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
