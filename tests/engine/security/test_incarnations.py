"""Each process of an engine has keys of its own, and those of a dead one are refused at every socket."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
from peers import Peers, pack, published
from served_engine import ask, collected, stop, until
from supervised import LOOPBACK, MANY, pids, serve
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from aioshm.engine import (
    ClientOptions,
    DPCoordinator,
    EngineClient,
    EngineCredentials,
    EngineKeys,
    EngineLayout,
    EngineSupervisor,
    EngineZmqAddresses,
)
from aioshm.engine.dp import CoordinatorAddresses
from aioshm.engine.security.binding import AHEAD, ENGINES, Protection
from aioshm.errors import EngineDead

pytestmark = [pytest.mark.usefixtures("runtime_dir"), pytest.mark.slow_on_uvloop]


@contextmanager
def connected(
    mine: EngineCredentials, kind: int, address: str, server: bytes | None = None
) -> Iterator[tuple[Any, Callable[[], bool]]]:
    """Give a socket with an engine's keys, and a function that blocks until it is admitted or refused."""
    with zmq.Context() as context, context.socket(kind) as socket:
        socket.linger = 0
        monitor = socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        )
        socket.curve_publickey = mine.public
        socket.curve_secretkey = mine.secret
        socket.curve_serverkey = server or mine.front_end
        if kind == zmq.DEALER:
            socket.routing_id = mine.name
        socket.connect(address)

        def admitted() -> bool:
            assert monitor.poll(20_000)
            return parse_monitor_message(monitor.recv_multipart())["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED

        try:
            yield socket, admitted
        finally:
            socket.disable_monitor()
            monitor.close(linger=0)


async def admitted(mine: EngineCredentials, kind: int, address: str, server: bytes | None = None) -> bool:
    with connected(mine, kind, address, server) as (_, done):
        return await asyncio.to_thread(done)


class TestKeys:
    def test_the_keys_of_a_secret_stay_what_they_were(self) -> None:
        """Files of keys from before there were incarnations are good for the first one."""
        keys = EngineKeys(bytes(range(32)))
        assert keys.for_engine(3).name.hex() == "0300bda25db03e291a61e1cda81b2404e7c0"

    def test_newer_keys_void_older_ones(self) -> None:
        keys = EngineKeys.generate()
        protection = Protection(keys, keys.front_end, [0, 1], secure=True)

        def who(rank: int, incarnation: int) -> str | None:
            return protection.recognise(ENGINES, z85.decode(keys.of_engine(rank, incarnation).public))

        assert (who(0, 0), who(1, 0)) == ("0.0", "1.0")
        assert who(2, 0) is None
        assert who(1, 2) == "1.2"  # nobody has told of it
        assert who(1, 0) is who(1, 1) is None
        assert protection.rank_of("1.2") == 1
        assert protection.rank_of("1.0") is None
        protection.void(1, 5)
        protection.void(1, 3)  # late
        assert [who(1, each) for each in (2, 3, 4, 5)] == [None, None, None, "1.5"]
        assert who(1, 5 + AHEAD + 1) is None
        assert who(1, 5 + AHEAD) == f"1.{5 + AHEAD}"
        assert who(0, 0) == "0.0"
        assert protection.name_of("1.5") == keys.name(1, 5)


async def test_peer_is_admitted_while_the_loop_is_busy() -> None:
    keys = EngineKeys.generate()
    addresses = EngineZmqAddresses([LOOPBACK], [LOOPBACK])
    async with EngineClient(addresses, 1, options=ClientOptions(keys=keys)):
        with connected(keys.for_engine(0), zmq.DEALER, addresses.inputs[0]) as (_, done):
            assert done()  # blocks the loop


async def test_a_dead_engine_s_keys_open_no_socket_of_the_front_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = EngineKeys.generate()
    stuck = tmp_path / "stuck"
    addresses = EngineZmqAddresses([LOOPBACK], [LOOPBACK])
    async with EngineSupervisor(
        serve,
        2,
        restart=MANY,
        kwargs={"stuck": str(stuck)},
        layout=EngineLayout(addresses=addresses, handshake_address=LOOPBACK, coordinator=False),
        client=ClientOptions(keys=keys),
    ) as supervisor:
        client = supervisor.client
        where = (
            (zmq.DEALER, supervisor.launch.handshake_address),
            (zmq.DEALER, addresses.inputs[0]),
            (zmq.PUSH, addresses.outputs[0]),
        )
        other, doomed = (client.submit(ask(f"{rank}", None), engine=rank) for rank in (0, 1))
        for stream in (other, doomed):
            await anext(stream)
        mine = keys.for_engine(1)
        with connected(mine, zmq.PUSH, addresses.outputs[0]) as (inside, done):
            assert await asyncio.to_thread(done)  # whoever has them can be the engine while it lives
            stuck.touch()
            stop(pids(supervisor)[1])
            await until(lambda: 1 in client.deaths)
            with pytest.raises(EngineDead, match="SIGKILL"):
                await anext(doomed)
            assert not any([await admitted(mine, *place) for place in where])
            caplog.clear()
            client._link._limiter._next = 0.0
            inside.send(pack([1, [{"request_id": "0", "token": 666, "finished": True}]]))
            await until(lambda: "the keys of engine 1 are void" in caplog.text)
        assert client.late_outputs == 0
        # The one that hangs has the next keys, and is killed: the one after it, too, has its own.
        await until(lambda: supervisor.engines[1].state == "starting")
        stop(pids(supervisor)[1])
        stuck.unlink()
        await supervisor.wait_until_ready(30)
        assert len(await collected(client.submit(ask("back", 2), engine=1))) == 2
        await client.abort("0")


async def test_a_dead_engine_s_keys_open_no_socket_of_the_coordinator() -> None:
    keys = EngineKeys.generate()
    async with await DPCoordinator.start(2, local_engines=False, local_front_ends=False, keys=keys) as coordinator:
        told = CoordinatorAddresses(coordinator.get_stats_publish_address(), *coordinator.get_engine_socket_addresses())
        where = ((zmq.XSUB, told.engine_input), (zmq.PUSH, told.engine_output))
        with Peers(told, keys) as friends:
            await friends.engines(2)
            front_end = await friends.front_end()
            await friends.reporter(1).send(pack([1, [], {"num_running_reqs": 3, "num_waiting_reqs": 4}]))
            while (await published(front_end))[0] != [[0, 0, 0.0], [4, 3, 0.0]]:
                pass
            coordinator.void_keys(1, 1)
            while (await published(front_end))[0] != [[0, 0, 0.0], [0, 0, 0.0]]:  # it has nothing to do any more
                pass
            for _ in range(2):
                for incarnation in (0, 1):
                    mine = keys.for_engine(1, incarnation)
                    found = [await admitted(mine, *place, mine.coordinator) for place in where]
                    assert found == [incarnation == 1] * 2
                coordinator.proc.kill()
                await asyncio.to_thread(coordinator.proc.join)
                await asyncio.to_thread(coordinator.run_again)  # whose successor knows it, too
