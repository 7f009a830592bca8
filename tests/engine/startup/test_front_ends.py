"""Several front ends of the same engines: each learns of deaths, returns, scaling, and a coordinator that is new."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from served_engine import Engine, ask, begun, collected, stop, until
from startups import starting, tasks
from supervised import LOOPBACK, MANY, front_end, hanging_front_end, pids, serve
from support import cancelled

from aioshm.engine import (
    ClientOptions,
    CoreEngineProcManager,
    EngineClient,
    EngineKeys,
    EngineLayout,
    EngineSupervisor,
    EngineZmqAddresses,
    HandshakeOptions,
    Restart,
    run_engine_core,
    shake_hands,
)
from aioshm.engine.startup.front_ends import FrontEnds
from aioshm.errors import EngineDead, RoleError

pytestmark = [pytest.mark.usefixtures("runtime_dir"), pytest.mark.one_loop]


@asynccontextmanager
async def supervised(
    count: int, keys: EngineKeys | None = None, **options: Any
) -> AsyncIterator[tuple[EngineSupervisor, list[EngineClient]]]:
    """Engines, and two front ends in this process; with keys over TCP."""
    layout: dict[str, Any] = {}
    if keys is not None:
        with ExitStack() as stack:
            free = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(4)]
            ports = [f"tcp://127.0.0.1:{server.getsockname()[1]}" for server in free]
        addresses = EngineZmqAddresses(ports[:2], ports[2:])
        layout = {"addresses": addresses, "handshake_address": LOOPBACK, "membership_address": LOOPBACK}
        options["client"] = ClientOptions(keys=keys)
    async with EngineSupervisor(
        serve,
        count,
        num_api_servers=2,
        restart=options.pop("restart", MANY),
        layout=EngineLayout(coordinator=False, **layout),
        **options,
    ) as supervisor:
        async with front_end(supervisor, 0, keys=keys) as one, front_end(supervisor, 1, keys=keys) as other:
            assert one.ranks == other.ranks == list(range(count))
            yield supervisor, [one, other]


async def test_leaving_engine_is_drained_by_all_front_ends() -> None:
    async with supervised(3) as (supervisor, clients):
        one, other = clients
        stream = other.submit(ask("long", None), engine=2)
        call = asyncio.create_task(one.call("later", "done", engine=2))
        await anext(stream)
        going = asyncio.create_task(supervisor.scale(2))
        for client in clients:
            await until(lambda client=client: client._link.engines[2].leaving)
            assert {client.submit(ask(f"{number}", 1)).engine for number in range(4)} == {0, 1}
            with pytest.raises(EngineDead, match="engine 2 is being taken out of service"):
                client.submit(ask("late"), engine=2)
            assert len(await client.call("add", 1)) == 2
            with pytest.raises(RoleError, match="scale its supervisor"):
                client.add_engine(7)
        assert await call == "done"
        await cancelled(going)
        for client in clients:
            await until(lambda client=client: client._link.engines[2].serves)
        going = asyncio.create_task(supervisor.scale(1))
        await until(lambda: other._link.engines[2].leaving)
        assert not going.done()
        await other.abort("long")
        await going
        assert [client.ranks for client in clients] == [[0], [0]]
        await supervisor.scale(2)
        stream = await begun(one, "endless", engine=1)
        await supervisor.scale(1, timeout=0.01)
        with pytest.raises(EngineDead, match="engine 1 was taken out of service"):
            await anext(stream)


async def test_front_ends_learn_the_cause_of_a_death(tmp_path: Path) -> None:
    """Also where nothing but its keys says which process it was; and that it will not come back."""
    crash = tmp_path / "crash"
    async with supervised(2, EngineKeys.generate(), kwargs={"crash": str(crash)}) as (supervisor, clients):
        for _ in range(2):
            streams = [await begun(client, f"{client}", engine=1) for client in clients]
            victim = pids(supervisor)[1]
            stop(victim)
            for stream in streams:
                with pytest.raises(EngineDead, match=rf"engine 1 \(pid {victim}\) was killed by SIGKILL") as caught:
                    await anext(stream)
                assert (caught.value.engine, caught.value.pid) == (1, victim)
            await until(lambda: supervisor.engines[1].state == "running", 30)
            await supervisor.wait_until_ready(30)
            for client in clients:
                assert client.deaths == {}
                assert len(await collected(client.submit(ask("a", 2), engine=1))) == 2
        supervisor._restarts.lives[1].history._policy = Restart(max_restarts=0)
        crash.touch()
        stop(pids(supervisor)[1])
        for client in clients:
            await until(lambda client=client: client._link.dead is not None)
            with pytest.raises(EngineDead, match="engine 1 is in a crash loop"):
                client.submit(ask("b"))


@pytest.mark.parametrize("servers", [0, 1])
async def test_engine_of_another_host_is_admitted_after_its_predecessors(tmp_path: Path, servers: int) -> None:
    place = f"ipc://{tmp_path}/hello"
    addresses = EngineZmqAddresses([f"ipc://{tmp_path}/in"], [f"ipc://{tmp_path}/out"])
    layout = EngineLayout(host="127.0.0.1", handshake_address=place, addresses=addresses, coordinator=False)
    remote = {"local": False, "headless": True}

    def shaking(initialize: Callable[[object], dict[str, Any]]) -> asyncio.Task[Any]:
        """Say HELLO as an engine that never registers with a client."""
        options = HandshakeOptions(**remote)
        return asyncio.create_task(shake_hands(place, 1, initialize=initialize, handshake=options))

    async with (
        await CoreEngineProcManager.start(serve, 1, 1, handshake_address=place, **remote) as there,
        EngineSupervisor(
            serve, 2, local_engine_count=1, num_api_servers=servers, restart=MANY, layout=layout
        ) as supervisor,
        AsyncExitStack() as stack,
    ):
        client = await stack.enter_async_context(front_end(supervisor, 0)) if servers else supervisor.client
        waiting = shaking(lambda _: {})
        await until(lambda: 1 in supervisor.launch.startup.handshake._early)
        assert len(await collected(client.submit(ask("a"), engine=1))) == 3
        there.processes[0].kill()
        await waiting  # READY, and gone
        await supervisor.pause(timeout=20)  # waits for no engine that may be dead
        await supervisor.resume()
        with pytest.raises(ZeroDivisionError):
            await shaking(lambda _: {"died": 1 // 0})
        there.start_engine(1)
        await client.wait_until_ready(30)
        assert len(await collected(client.submit(ask("b"), engine=1))) == 3


async def test_front_end_that_hangs_holds_up_scaling_until_it_is_cancelled_or_late(tmp_path: Path) -> None:
    stuck = tmp_path / "stuck"
    async with supervised(3, kwargs={"stuck": str(stuck)}) as (supervisor, clients):
        members = supervisor.launch.front_ends
        assert members is not None
        with hanging_front_end(supervisor):
            await until(lambda: len(members) == 3)
            stuck.touch()
            stop(pids(supervisor)[2])
            await until(lambda: supervisor.engines[2].state == "starting")
            going = asyncio.create_task(supervisor.scale(2))
            await until(lambda: supervisor.engines[2].state == "stopping")
            stuck.unlink()
            await until(lambda: supervisor.engines[2].state == "running")
            await cancelled(going)
            assert supervisor.engines[2].state == "running"
            await asyncio.wait_for(supervisor.scale(2, timeout=0.01), 20)
            gone = pids(supervisor)[1]
            going = asyncio.create_task(supervisor.scale(1, timeout=0.01))
            await until(lambda: members.ranks == [0])
            await cancelled(going)
            assert not os.path.exists(f"/proc/{gone}")
        await supervisor.scale(2)
        await supervisor.scale(1)
        assert [client.ranks for client in clients] == [[0], [0]]


async def test_waits_for_front_ends_end_with_a_crash_loop() -> None:
    async with supervised(2, restart=Restart(max_restarts=0)) as (supervisor, _):
        with hanging_front_end(supervisor):
            members = supervisor.launch.front_ends
            await until(lambda: len(members or ()) == 3)
            calls = (supervisor.wait_until_ready, supervisor.pause, supervisor.resume, lambda: supervisor.scale(1))
            waiting = [asyncio.create_task(call()) for call in calls]
            await asyncio.sleep(0)
            stop(pids(supervisor)[1])
            for result in await asyncio.gather(*waiting, *(call() for call in calls), return_exceptions=True):
                assert isinstance(result, EngineDead)
                assert "engine 1 is in a crash loop" in str(result)


async def test_engine_that_registers_before_its_front_end_knows_the_rank_is_admitted_later() -> None:
    keys = EngineKeys.generate()
    addresses = EngineZmqAddresses([LOOPBACK], [LOOPBACK])
    options: dict[str, Any] = {"keys": keys, "on_engine_death": "continue"}
    with FrontEnds(LOOPBACK, [0], keys=keys) as front_ends:
        async with (
            EngineClient(
                addresses, 1, options=ClientOptions(membership_address=front_ends.address, **options)
            ) as client,
            starting(LOOPBACK, 2, where=addresses, keys=keys) as startup,
        ):
            place = startup.handshake_address
            engines = (
                run_engine_core(Engine(), place, rank, handshake=HandshakeOptions(keys=keys.for_engine(rank)))
                for rank in (0, 1)
            )
            async with tasks(*engines):
                await startup.wait(30)
                await client.wait_until_ready(30)
                assert list(client.ready) == [0]
                front_ends.add_engine(1)
                await until(lambda: 1 in client.ready)
                assert len(await collected(client.submit(ask("r"), engine=1))) == 3
