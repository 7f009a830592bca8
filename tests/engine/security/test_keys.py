"""Keys: derived, saved, handed to processes, refused once their process is dead, and the errors without them."""

from __future__ import annotations

import asyncio
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
from peers import Peers, pack, places, published
from served_engine import ask, collected, stop, until
from supervised import LOOPBACK, MANY, pids, serve
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from aioshm.engine import (
    ClientOptions,
    CoreEngineProcManager,
    DPCoordinator,
    EngineClient,
    EngineCredentials,
    EngineKeys,
    EngineLayout,
    EngineSupervisor,
    EngineZmqAddresses,
    ProcessManager,
    shake_hands,
)
from aioshm.engine.security.binding import AHEAD, ENGINES, Protection
from aioshm.engine.security.keys import as_attributes, keys_for_engine, keys_for_front_end, keys_to_hand_over, own_keys
from aioshm.errors import EngineDead, RoleError
from aioshm.process.manager import Job

pytestmark = [pytest.mark.usefixtures("runtime_dir"), pytest.mark.slow_on_uvloop]


def over_tcp() -> EngineZmqAddresses:
    return EngineZmqAddresses([LOOPBACK], [LOOPBACK])


class TestKeys:
    def test_each_incarnation_of_an_engine_has_its_own_only(self) -> None:
        keys = EngineKeys.generate()
        one = keys.for_engine(1)
        made = [one, keys.for_engine(1, 1), keys.for_engine(2)]
        assert [each.incarnation for each in made] == [0, 1, 0]
        assert one == EngineKeys(keys.secret).for_engine(1) == keys.for_engine(1, 0)
        assert len({text for each in made for text in (each.public, each.secret, each.name)}) == 9
        with pytest.raises(ValueError, match="incarnation must be at least 0"):
            keys.for_engine(1, -1)
        assert (one.front_end, one.coordinator) == (keys.front_end.public, keys.coordinator.public)
        assert one.to_front_end().server == keys.front_end.public
        assert one.to_coordinator().server == keys.coordinator.public
        assert keys.front_end.secret not in repr(one).encode() + pickle.dumps(one)
        assert keys.secret not in pickle.dumps(one)
        assert [*keys.__rich_repr__(), *one.__rich_repr__()] == []
        assert one.for_engine(1) is one
        with pytest.raises(RoleError, match="the keys of engine 1, and engine 2 needs its own"):
            one.for_engine(2)

    def test_bad_secrets(self) -> None:
        with pytest.raises(ValueError, match="secret must be 32 bytes, not 3"):
            EngineKeys(b"abc")
        with pytest.raises(TypeError, match="secret must be bytes, not str"):
            EngineKeys("abc")  # type: ignore[arg-type]


class TestFiles:
    @pytest.mark.parametrize("one", [False, True])
    def test_there_and_back(self, one: bool, tmp_path: Path) -> None:
        keys: Any = EngineKeys.generate()
        keys = keys.for_engine(5, 1) if one else keys
        path = tmp_path / "keys"
        keys.save(path)
        assert path.stat().st_mode & 0o777 == 0o600
        assert EngineKeys.load(path) == keys
        with pytest.raises(FileExistsError):
            keys.save(path)

    def test_file_that_other_users_can_read_is_refused(self, tmp_path: Path) -> None:
        EngineKeys.generate().save(tmp_path / "keys")
        (tmp_path / "keys").chmod(0o640)
        with pytest.raises(PermissionError, match="must be this user's alone: chmod 600"):
            EngineKeys.load(tmp_path / "keys")

    @pytest.mark.parametrize(
        "text",
        [b"", b"{}", b"[]", b'{"type":"aioshm-engine-keys"}', b'{"type":"x","secret":"AA=="}', b'{"type":"\xff"}'],
    )
    def test_file_without_keys_is_refused(self, text: bytes, tmp_path: Path) -> None:
        path = tmp_path / "keys"
        path.touch(0o600)
        path.write_bytes(text)
        with pytest.raises(ValueError, match="keys holds no keys of engines"):
            EngineKeys.load(path)

    def test_the_environment(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("aioshm.engine.security.keys._created", None)
        keys = EngineKeys.generate()
        keys.for_engine(2).save(tmp_path / "keys")
        assert own_keys() is None
        monkeypatch.setenv("AIOSHM_ENGINE_KEYS", str(tmp_path / "keys"))
        assert keys_for_engine(2) == keys.for_engine(2)
        with pytest.raises(RoleError, match="keys of engine 2"):
            keys_for_engine(3)
        with pytest.raises(RoleError, match="a front end needs all keys, EngineKeys, and has only those of engine 2"):
            keys_for_front_end()


def tell_keys(**_: Any) -> None:
    """Print the keys of this process, unless arguments or environment hold them; the target of a process."""
    found = own_keys()
    shown = repr(found)
    if isinstance(found, EngineCredentials):
        shown = f"rank {found.rank}"
        for name in ("cmdline", "environ"):
            text = Path(f"/proc/self/{name}").read_bytes()
            assert found.secret not in text
            assert b"secret" not in text
    os.write(2, f"keys {shown}\n".encode())


class TestHandingOver:
    def said(self, manager: ProcessManager) -> list[str]:
        for process in manager.processes:
            process.join(20)
            assert process.exitcode == 0
        manager.close()
        return [manager.last_lines(process.name)[-1] for process in manager.processes]

    def test_engines_get_their_own(self) -> None:
        with CoreEngineProcManager(tell_keys, 2, 3, keys=EngineKeys.generate()) as manager:
            assert self.said(manager) == ["keys rank 3", "keys rank 4"]

    def test_front_ends_get_all_and_others_none(self) -> None:
        jobs = [Job("front end", attributes=as_attributes(keys_to_hand_over(None))), Job("other")]
        with ProcessManager(tell_keys, jobs) as manager:
            assert self.said(manager) == ["keys <EngineKeys>", "keys None"]

    def test_bad_keys(self) -> None:
        with pytest.raises(TypeError, match="keys must be EngineKeys, or EngineCredentials for an engine, not 'x'"):
            CoreEngineProcManager(tell_keys, 1, keys="x")  # type: ignore[arg-type]
        with pytest.raises(RoleError, match="keys of engine 1"):
            keys_to_hand_over(EngineKeys.generate().for_engine(1), 2)

    async def test_without_any(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("aioshm.engine.security.keys._created", None)
        with pytest.raises(RoleError, match=r"engine 7 has no keys to connect.*EngineKeys\.load.*secure=F"):
            await shake_hands("tcp://127.0.0.1:1", 7, initialize=lambda metadata: None)

    async def test_where_zeromq_cannot_encrypt(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("aioshm.engine.security.keys.can_encrypt", lambda: False)
        with pytest.raises(RuntimeError, match="cannot encrypt: install a wheel of pyzmq, or use secure=False"):
            EngineClient(over_tcp(), 1).open()
        with CoreEngineProcManager(tell_keys, 1) as manager:
            assert self.said(manager) == ["keys None"]


# Incarnations


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


class TestIncarnations:
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
    addresses = over_tcp()
    async with EngineClient(addresses, 1, options=ClientOptions(keys=keys)):
        with connected(keys.for_engine(0), zmq.DEALER, addresses.inputs[0]) as (_, done):
            assert done()  # blocks the loop


async def test_a_dead_engine_s_keys_open_no_socket_of_the_front_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = EngineKeys.generate()
    stuck = tmp_path / "stuck"
    async with EngineSupervisor(
        serve,
        2,
        restart=MANY,
        kwargs={"stuck": str(stuck)},
        layout=EngineLayout(addresses=over_tcp(), handshake_address=LOOPBACK, coordinator=False),
        client=ClientOptions(keys=keys),
    ) as supervisor:
        client = supervisor.client
        addresses = supervisor.launch.addresses
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
        told = places(coordinator)
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
