"""Several front ends of the same engines: each learns of deaths, returns, scaling, and a coordinator that is new."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
from served_engine import Engine, ask, collected, stop, until
from startups import starting
from supervised import LOOPBACK, MANY, api_servers, front_end, pids, serve

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
from aioshm.engine.protocol.messages import Progress, encode
from aioshm.engine.startup.front_ends import FrontEnds
from aioshm.errors import EngineDead, RoleError

pytestmark = [pytest.mark.usefixtures("runtime_dir"), pytest.mark.slow_on_uvloop]

ASKING = 3


def ask_without_pause(listen_address: str, sock: None, directory: str, config: dict[str, Any]) -> None:
    """Ask engines until a file ``stop`` exists, and write counts into a file; the target of an API server."""
    counts: Counter[str] = Counter()
    used: Counter[int] = Counter()
    failed: list[str] = []
    stop = Path(directory, "stop")

    async def ask_on(client: EngineClient, who: int) -> None:
        while not stop.exists():
            counts["asked"] += 1
            try:
                stream = client.submit(ask(f"{os.getpid()} {who} {counts['asked']}", 5))
                assert [output["token"] for output in await collected(stream)] == [0, 1, 2, 3, 4]
                counts["answered"] += 1
                used[stream.engine] += 1
            except EngineDead as error:
                failed.append(str(error))
                await asyncio.sleep(0.01)

    async def write(client: EngineClient) -> None:
        path = Path(directory, f"{config['client_index']}.json")
        while True:
            said = {**counts, "failed": failed, "used": used, "ranks": client.ranks}
            path.with_suffix(".new").write_text(json.dumps(said))
            path.with_suffix(".new").replace(path)
            await asyncio.sleep(0.02)

    async def work() -> None:
        addresses = EngineZmqAddresses(
            [config["input_address"]],
            [config["output_address"]],
            frontend_stats_publish_address=config["stats_update_address"],
        )
        options = ClientOptions(
            on_engine_death="continue", resubmit="unstarted", membership_address=config["membership_address"]
        )
        async with EngineClient(addresses, 2, options) as client:
            await client.wait_until_ready(30)
            published = client._link.counts

            def counted(payload: bytes) -> None:
                counts["published"] += 1
                published(payload)

            client._link.counts = counted  # type: ignore[method-assign]
            writing = asyncio.create_task(write(client))
            await asyncio.gather(*(ask_on(client, who) for who in range(ASKING)))
            await asyncio.sleep(0.1)
            writing.cancel()

    asyncio.run(work())


@pytest.mark.slow
@pytest.mark.one_loop
async def test_front_ends_in_processes_lose_nothing(tmp_path: Path) -> None:
    """Both have a steady load all the time."""

    def said(index: int) -> dict[str, Any]:
        try:
            return {"published": 0, **json.loads((tmp_path / f"{index}.json").read_text())}
        except FileNotFoundError:
            return {"used": {}, "failed": [], "ranks": [], "published": 0}

    async def both_use(*ranks: int) -> None:
        """Wait until both have new answers of these engines."""
        before = [said(index)["used"] for index in (0, 1)]
        for index in (0, 1):
            for rank in map(str, ranks):
                await until(lambda i=index, r=rank: said(i)["used"].get(r, 0) > before[i].get(r, 0))

    async with EngineSupervisor(serve, 2, restart=MANY, num_api_servers=2) as supervisor:
        launch = supervisor.launch
        members = launch.front_ends
        coordinator = launch.coordinator
        assert members is not None
        assert coordinator is not None
        stats_address = coordinator.get_stats_publish_address()
        async with api_servers(
            supervisor, ask_without_pause, str(tmp_path), stats_update_address=stats_address
        ) as servers:
            await both_use(0, 1)
            await supervisor.scale(4)
            await both_use(0, 1, 2, 3)
            went = pids(supervisor)[1:]
            await supervisor.scale(1)
            assert not any(os.path.exists(f"/proc/{each}") for each in went)
            await both_use(0)
            await supervisor.scale(2)
            await both_use(0, 1)
            assert [said(index)["ranks"] for index in (0, 1)] == [[0, 1], [0, 1]]
            assert [said(index)["failed"] for index in (0, 1)] == [[], []]

            victim = pids(supervisor)[1]
            stop(victim)
            await until(lambda: supervisor.engines[1].restarts == 1 and supervisor.engines[1].state == "running")
            await supervisor.wait_until_ready(30)
            await both_use(0, 1)
            for failed in [said(index)["failed"] for index in (0, 1)]:
                assert all(f"engine 1 (pid {victim})" in text and "SIGKILL" in text for text in failed), failed
                assert len(failed) <= ASKING

            former = coordinator.proc
            stop(former.pid or 0)
            await until(lambda: former.exitcode is not None)
            before = [said(index)["published"] for index in (0, 1)]
            await until(lambda: all(said(index)["published"] > before[index] + 2 for index in (0, 1)))

            stop(servers.servers[1].pid or 0)
            await supervisor.scale(1)  # waits for no dead front end
            await until(lambda: servers.servers[1].state == "running" and len(members) == 2)
            await supervisor.scale(2)
            await both_use(0, 1)
            (tmp_path / "stop").touch()
            await servers.wait()
            for index in (0, 1):
                last = said(index)
                assert last["asked"] == last["answered"] + len(last["failed"])


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
        async with (
            front_end(supervisor, 0, keys=keys) as one,
            front_end(supervisor, 1, keys=keys) as other,
        ):
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
        going.cancel()
        with pytest.raises(asyncio.CancelledError):
            await going
        for client in clients:
            await until(lambda client=client: client._link.engines[2].serves)
        going = asyncio.create_task(supervisor.scale(1))
        await until(lambda: other._link.engines[2].leaving)
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
        with pytest.raises(ZeroDivisionError):
            await shaking(lambda _: {"died": 1 // 0})
        there.start_engine(1)
        await client.wait_until_ready(30)
        assert len(await collected(client.submit(ask("b"), engine=1))) == 3


@contextmanager
def hanging_front_end(supervisor: EngineSupervisor) -> Iterator[None]:
    """Connect a front end that never says which membership it knows."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.connect(supervisor.launch.membership_address or "")
        dealer.send(encode(Progress()))
        yield


async def test_front_end_that_hangs_holds_up_no_scaling_with_a_timeout() -> None:
    async with supervised(3) as (supervisor, clients):
        members = supervisor.launch.front_ends
        assert members is not None
        with hanging_front_end(supervisor):
            await until(lambda: len(members) == 3)
            await asyncio.wait_for(supervisor.scale(2, timeout=0.01), 20)
            gone = pids(supervisor)[1]
            going = asyncio.create_task(supervisor.scale(1, timeout=0.01))
            await until(lambda: members.ranks == [0])
            going.cancel()
            with pytest.raises(asyncio.CancelledError):
                await going
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


def test_membership_address_needs_continue() -> None:
    with pytest.raises(ValueError, match="membership_address needs on_engine_death='continue'"):
        EngineClient(EngineZmqAddresses(["ipc:///a"], ["ipc:///b"]), 1, ClientOptions(membership_address="ipc:///c"))
