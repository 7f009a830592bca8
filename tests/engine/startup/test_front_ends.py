"""Several front ends of the same engines: each learns of deaths, returns, scaling, and a coordinator that is new."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import front_end_targets as targets
import pytest
from served_engine import Engine, ask, collected, stop, until
from startups import starting
from supervised import LOOPBACK, MANY, pids, serve

from aioshm.engine import (
    APIServerProcessManager,
    ClientOptions,
    EngineClient,
    EngineKeys,
    EngineLayout,
    EngineSupervisor,
    EngineZmqAddresses,
    HandshakeOptions,
    Restart,
    run_engine_core,
)
from aioshm.engine.startup.front_ends import FrontEnds
from aioshm.errors import EngineDead, RoleError

pytestmark = [pytest.mark.usefixtures("runtime_dir"), pytest.mark.slow_on_uvloop]


class FrontEndProcesses:
    """Two front ends in processes of their own, under load."""

    def __init__(self, supervisor: EngineSupervisor, directory: Path) -> None:
        launch = supervisor.launch
        assert launch.coordinator is not None
        self.directory = directory
        self.manager = APIServerProcessManager(
            targets.serve_front_end,
            "",
            None,
            str(directory),
            2,
            launch.addresses.inputs,
            launch.addresses.outputs,
            launch.coordinator.get_stats_publish_address(),
            membership_address=launch.membership_address,
        )

    def said(self, index: int) -> dict[str, Any]:
        try:
            said: dict[str, Any] = json.loads((self.directory / f"{index}.json").read_text())
        except FileNotFoundError:
            return {"answered": 0, "used": {}, "failed": [], "ranks": [], "deaths": [], "published": 0}
        return {"published": 0, **said}

    def both(self, name: str) -> list[Any]:
        return [self.said(index)[name] for index in range(2)]

    async def use(self, *ranks: int, fronts: tuple[int, ...] = (0, 1)) -> None:
        """Wait until each has had a request answered by each of these engines from now on."""
        before = {index: self.said(index)["used"] for index in fronts}

        def used() -> bool:
            now = {index: self.said(index)["used"] for index in fronts}
            return all(
                now[index].get(str(rank), 0) > before[index].get(str(rank), 0) for index in fronts for rank in ranks
            )

        await until(used, 30)


@pytest.mark.slow
@pytest.mark.one_loop
async def test_front_ends_in_processes_lose_nothing(tmp_path: Path) -> None:
    """Both have a steady load all the time."""
    async with EngineSupervisor(serve, 2, restart=MANY, num_api_servers=2) as supervisor:
        fronts = FrontEndProcesses(supervisor, tmp_path)
        async with fronts.manager:
            members = supervisor.launch.front_ends
            assert members is not None
            await fronts.use(0, 1)
            assert len(members) == 2

            # More engines, and fewer.
            await supervisor.scale(4)
            await fronts.use(0, 1, 2, 3)
            went = pids(supervisor)[1:]
            await supervisor.scale(1)
            assert not any(os.path.exists(f"/proc/{each}") for each in went)
            await fronts.use(0)
            assert fronts.both("ranks") == [[0], [0]]
            await supervisor.scale(2)
            await fronts.use(0, 1)
            assert fronts.both("failed") == [[], []]

            # An engine dies, and comes back.
            victim = pids(supervisor)[1]
            stop(victim)
            await until(lambda: supervisor.engines[1].restarts == 1 and supervisor.engines[1].state == "running", 30)
            await supervisor.wait_until_ready(30)
            await fronts.use(0, 1)
            for failed in fronts.both("failed"):
                assert all(f"engine 1 (pid {victim})" in text and "SIGKILL" in text for text in failed), failed
                assert len(failed) <= targets.ASKING

            # So does the coordinator, and all of them find it again.
            coordinator = supervisor.launch.coordinator
            assert coordinator is not None
            for _ in range(2):
                former = coordinator.proc
                stop(former.pid or 0)
                await until(lambda former=former: former.exitcode is not None)
                before = fronts.both("published")
                await until(
                    lambda before=before: all(
                        now > then + 2 for now, then in zip(fronts.both("published"), before, strict=True)
                    ),
                    30,
                )
            await fronts.use(0, 1)

            # A front end that dies is not waited for.
            failed = [len(texts) for texts in fronts.both("failed")]
            fronts.manager.processes[1].kill()
            await supervisor.scale(1)
            assert len(members) == 1
            await supervisor.scale(2)
            await fronts.use(0, 1, fronts=(0,))
            (tmp_path / "stop").touch()
            await until(lambda: fronts.manager.processes[0].exitcode == 0, 30)
            last = fronts.said(0)
            assert len(last["failed"]) == failed[0]
            assert last["asked"] == last["answered"] + len(last["failed"])


@asynccontextmanager
async def supervised(
    count: int, keys: EngineKeys | None = None, **options: Any
) -> AsyncIterator[tuple[EngineSupervisor, list[EngineClient]]]:
    """Engines, and two front ends in this process; with keys over TCP."""
    layout: dict[str, Any] = {}
    if keys is not None:
        addresses = EngineZmqAddresses([LOOPBACK] * 2, [LOOPBACK] * 2)
        layout = {"addresses": addresses, "handshake_address": LOOPBACK, "membership_address": LOOPBACK}
        options["client"] = ClientOptions(keys=keys)
        ports = [_free_port() for _ in range(4)]
        addresses.inputs = [f"tcp://127.0.0.1:{port}" for port in ports[:2]]
        addresses.outputs = [f"tcp://127.0.0.1:{port}" for port in ports[2:]]
    async with EngineSupervisor(
        serve, count, num_api_servers=2, restart=MANY, layout=EngineLayout(coordinator=False, **layout), **options
    ) as supervisor:
        launch = supervisor.launch
        common: dict[str, Any] = {
            "on_engine_death": "continue",
            "keys": keys,
            "membership_address": launch.membership_address,
        }
        async with (
            EngineClient(launch.addresses, count, options=ClientOptions(client_index=0, **common)) as one,
            # One that was started again does not know how many there are.
            EngineClient(launch.addresses, 1, options=ClientOptions(client_index=1, **common)) as other,
        ):
            for client in (one, other):
                await client.wait_until_ready(30)
                assert client.ranks == list(range(count))
            yield supervisor, [one, other]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


async def test_leaving_engine_is_drained_by_all_front_ends() -> None:
    async with supervised(3) as (supervisor, clients):
        one, other = clients
        stream = other.submit(ask("long", None), engine=2)
        call = asyncio.create_task(one.call("later", "done", engine=2))
        await anext(stream)
        going = asyncio.create_task(supervisor.scale(2))
        for client in clients:
            await until(lambda client=client: 2 in client._link.engines.leaving)
            assert {client.submit(ask(f"{number}", 1)).engine for number in range(4)} == {0, 1}
            with pytest.raises(EngineDead, match="engine 2 is being taken out of service"):
                client.submit(ask("late"), engine=2)
            assert len(await client.call("add", 1)) == 2
            with pytest.raises(RoleError, match="scale its supervisor"):
                client.add_engine(7)
        assert await call == "done"
        going.cancel()
        with pytest.raises(asyncio.CancelledError):
            await going
        for client in clients:
            await until(lambda client=client: 2 in client._link.engines.balance.choices)
        going = asyncio.create_task(supervisor.scale(1))
        await until(lambda: 2 in other._link.engines.leaving)
        assert not going.done()
        await other.abort("long")
        await going
        assert [client.ranks for client in clients] == [[0], [0]]
        await supervisor.scale(2)
        stream = one.submit(ask("endless", None), engine=1)
        await anext(stream)
        await supervisor.scale(1, timeout=0.01)
        with pytest.raises(EngineDead, match="engine 1 was taken out of service"):
            await anext(stream)


@pytest.mark.parametrize("secure", [pytest.param(False, marks=pytest.mark.slow), True])
async def test_front_ends_learn_the_cause_of_a_death(secure: bool, tmp_path: Path) -> None:
    """Also where nothing but its keys says which process it was; and that it will not come back."""
    crash = tmp_path / "crash"
    keys = EngineKeys.generate() if secure else None
    async with supervised(2, keys, kwargs={"crash": str(crash)}) as (supervisor, clients):
        for _ in range(2):
            streams = [client.submit(ask(f"{client}", None), engine=1) for client in clients]
            for stream in streams:
                await anext(stream)
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


async def test_membership_address_needs_continue(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="membership_address needs on_engine_death='continue'"):
        EngineClient(
            EngineZmqAddresses(["ipc:///a"], ["ipc:///b"]), 1, options=ClientOptions(membership_address="ipc:///c")
        )


@pytest.mark.parametrize("late", [False, pytest.param(True, marks=pytest.mark.slow)])
async def test_engine_that_registers_before_its_front_end_knows_the_rank_is_admitted_later(
    late: bool, caplog: pytest.LogCaptureFixture
) -> None:
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
            running = [asyncio.ensure_future(each) for each in engines]
            await startup.wait(30)
            await client.wait_until_ready(30)
            if late:
                await until(lambda: "the keys were refused" in caplog.text)
            assert list(client.ready) == [0]
            front_ends.add_engine(1)
            await until(lambda: 1 in client.ready)
            assert len(await collected(client.submit(ask("r"), engine=1))) == 3
            for task in running:
                task.cancel()
            await asyncio.wait(running)
