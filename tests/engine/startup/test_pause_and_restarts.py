"""Engines that are paused while they die, restart and scale; and front ends that pause together."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from served_engine import Engine, ask, begun, collected, stop, until
from supervised import MANY, front_end, hanging_front_end, pids

from aioshm.engine import EngineClient, EngineLayout, EngineSupervisor, die_with_parent, run_engine_core
from aioshm.errors import QueueClosed, RequestAborted

pytestmark = [pytest.mark.usefixtures("runtime_dir"), pytest.mark.slow_on_uvloop]


class Restless(Engine):
    """Has work without requests, and counts steps."""

    def __init__(self, lockstep: bool, busy: str) -> None:
        super().__init__()
        self.steps = 0
        self.busy = busy
        if lockstep:
            self.has_unfinished_dp = lambda unfinished: unfinished

    async def initialize(self, metadata: Any) -> dict[str, Any]:  # type: ignore[override]
        while os.path.exists(self.busy):
            await asyncio.sleep(0.01)
        return super().initialize(metadata)

    def has_work(self) -> bool:
        return True

    def _step(self) -> list[Any]:
        self.steps += 1
        return super()._step()

    def count(self) -> int:
        return self.steps


def serve(handshake_address: str, dp_rank: int, local_dp_rank: int, hold: str, lockstep: bool = False) -> None:
    """Run an engine; while the file ``hold`` is there, it waits before HELLO, or with the suffix .busy before READY."""
    die_with_parent()

    async def run() -> None:
        while os.path.exists(hold):
            await asyncio.sleep(0.01)
        await run_engine_core(Restless(lockstep, f"{hold}.busy"), handshake_address, dp_rank)

    asyncio.run(run())


@asynccontextmanager
async def supervised(hold: Path, count: int = 2, **options: Any) -> AsyncIterator[EngineSupervisor]:
    layout = EngineLayout(coordinator=False)
    kwargs = {"hold": str(hold), "lockstep": options.get("lockstep", False)}
    async with (
        asyncio.timeout(100),
        EngineSupervisor(serve, count, restart=MANY, layout=layout, kwargs=kwargs, **options) as supervisor,
    ):
        yield supervisor


async def check_paused(client: EngineClient) -> None:
    """Check that no engine steps."""
    before = await client.call("count")
    await asyncio.sleep(0.03)
    assert await client.call("count") == before


@pytest.mark.parametrize("lockstep", [False, True])
async def test_engines_that_come_back_or_are_added_stay_paused(tmp_path: Path, lockstep: bool) -> None:
    async with supervised(tmp_path / "hold", lockstep=lockstep) as supervisor:
        client = supervisor.client
        await supervisor.pause()
        assert supervisor.paused == client.paused == "finish"
        victim = pids(supervisor)[1]
        stop(victim)
        await until(lambda: pids(supervisor)[1] != victim and supervisor.engines[1].state == "running")
        await supervisor.wait_until_ready(30)
        assert (await client.call("count"))[1] == 0  # not one step
        streams = [client.submit(ask(f"{number}")) for number in range(4)]
        if not lockstep:
            streams.append(client.submit(ask("bound"), engine=1))
            await supervisor.scale(4)
            assert (await client.call("count"))[2:] == [0, 0]
            await supervisor.scale(1)
            await check_paused(client)
            await supervisor.scale(2)
        await check_paused(client)
        await supervisor.resume()
        for stream in streams:
            assert len(await collected(stream)) == 3


async def test_order_that_comes_while_an_engine_starts_is_obeyed(tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    busy = tmp_path / "hold.busy"
    async with supervised(hold) as supervisor:
        client = supervisor.client
        await supervisor.pause("keep")
        hold.touch()
        stop(pids(supervisor)[1])
        await until(lambda: 1 in client.deaths)
        waiting = client.submit(ask("a"))
        hold.unlink()
        await until(lambda: 1 in supervisor.launch.startup.handshake.hello)  # INIT says that the engine is paused
        await supervisor.resume()
        assert len(await collected(waiting)) == 3
        await supervisor.wait_until_ready(30)
        assert len(await collected(client.submit(ask("b"), engine=1))) == 3

        busy.touch()
        stop(pids(supervisor)[1])
        await until(lambda: 1 in client.deaths and 1 in supervisor.launch.startup.handshake.hello)
        await supervisor.pause()  # after INIT, and before the engine has registered
        busy.unlink()
        await supervisor.wait_until_ready(30)
        await check_paused(client)
        stream = client.submit(ask("c"), engine=1)
        await supervisor.resume()
        assert len(await collected(stream)) == 3


async def test_front_ends_pause_together_and_the_pause_outlives_its_front_end(tmp_path: Path) -> None:
    async with supervised(tmp_path / "hold", num_api_servers=3) as supervisor, front_end(supervisor, 1) as other:
        async with front_end(supervisor, 0) as one:
            stream = await begun(other, "a")
            pausing = asyncio.create_task(one.pause())
            await until(lambda: other.paused == supervisor.paused == "finish")
            assert not pausing.done()
            waiting = [other.submit(ask("b"))]
            await stream.aclose()
            await pausing
        await until(lambda: len(supervisor.launch.front_ends or ()) == 1)
        assert other.paused == supervisor.paused == "finish"
        async with front_end(supervisor, 0) as one, front_end(supervisor, 2) as late:  # a replacement, and a new one
            for client in (one, late):
                assert client.paused == "finish"
                waiting.append(client.submit(ask(f"{client.stats().index}")))
            await check_paused(one)
            assert {stream.engine for stream in waiting} == {-1}
            await other.resume()
            for each in waiting:
                assert len(await collected(each)) == 3
            await until(lambda: one.paused is late.paused is supervisor.paused is None)


async def test_supervisor_pauses_the_engines_of_its_front_ends(tmp_path: Path) -> None:
    async with (
        supervised(tmp_path / "hold", num_api_servers=2) as supervisor,
        front_end(supervisor, 0) as one,
        front_end(supervisor, 1) as other,
    ):
        streams = [await begun(client, f"{client.stats().index}", engine=1) for client in (one, other)]
        with pytest.raises(TimeoutError, match=r"engines 1 have not paused after 0\.2 s"):
            await supervisor.pause(timeout=0.2)
        await supervisor.pause("abort")
        for stream in streams:
            with pytest.raises(RequestAborted, match="paused"):
                await collected(stream)
        await check_paused(one)
        stop(pids(supervisor)[1])
        await until(lambda: 1 in one.deaths and 1 in other.deaths)
        waiting = [client.submit(ask(f"{client.stats().index}")) for client in (one, other)]
        await supervisor.wait_until_ready(30)
        assert (await one.call("count"))[1] == 0
        await check_paused(one)
        await supervisor.scale(3)
        assert (await other.call("count"))[2] == 0
        await supervisor.resume()
        for stream in waiting:
            assert len(await collected(stream)) == 3
        await supervisor.resume()
        assert one.paused is other.paused is None


async def test_supervisor_without_a_front_end_waits_for_one_to_pause_the_engines(tmp_path: Path) -> None:
    async with supervised(tmp_path / "hold", num_api_servers=2) as supervisor:
        with pytest.raises(TimeoutError, match=r"have not paused after 0\.05 s: no front end is connected"):
            await supervisor.pause("keep", timeout=0.05)
        await supervisor.resume()
        with pytest.raises(TypeError, match="timeout must be a number of seconds, not '1'"):
            await supervisor.pause("keep", timeout="1")  # type: ignore[arg-type]
        assert supervisor.paused is None
        pausing = asyncio.create_task(supervisor.pause("keep"))
        async with front_end(supervisor, 0) as one:
            await pausing
            await check_paused(one)
        pausing = asyncio.create_task(supervisor.pause("keep"))  # its only front end is gone
        await asyncio.sleep(0.05)
        assert not pausing.done()
        stop(pids(supervisor)[1])
        async with front_end(supervisor, 1) as one:
            await pausing
            assert one.paused == "keep"
            await supervisor.resume()


async def test_pause_names_a_front_end_that_does_not_answer_and_ends_with_the_supervisor(tmp_path: Path) -> None:
    async with supervised(tmp_path / "hold", num_api_servers=2) as supervisor, front_end(supervisor, 0):
        with hanging_front_end(supervisor):
            await until(lambda: len(supervisor.launch.front_ends or ()) == 2)
            with pytest.raises(TimeoutError, match=r"have not paused after 0\.2 s: 1 front ends have not answered"):
                await supervisor.pause(timeout=0.2)
            pausing = asyncio.create_task(supervisor.pause())
            await asyncio.sleep(0)
            await supervisor.aclose()
            with pytest.raises(QueueClosed):
                await pausing
