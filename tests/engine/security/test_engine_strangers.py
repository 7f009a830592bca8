"""What strangers at the ports do harms nobody: with keys, and, as far as it is promised, without."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq
from peers import Peers, complete, pack, places, published, start, starts
from served_engine import Engine, Serving, ask, begun, collected, served
from startups import engine, starting
from support import tell_to_end, until

from aioshm.config import Options
from aioshm.engine import ClientOptions, DPCoordinator, EngineClient, EngineKeys, EngineZmqAddresses
from aioshm.engine.protocol.messages import EngineCoreOutputs, UtilityOutput, encode
from aioshm.errors import EngineDead, HandshakeError
from aioshm.zeromq.monitor import ENDED, MISMATCH

pytestmark = [pytest.mark.usefixtures("runtime_dir"), pytest.mark.slow_on_uvloop]

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
LOOPBACK = "tcp://127.0.0.1:0"
NOBODY = 65534
MOST_S = 0.05
MOST_BYTES = 64 << 20
ATTACK_S = 0.6
PATIENCE_S = 30.0


async def attack(
    name: str, *addresses: str, uid: int | None = None, until: Callable[[], object] | None = None
) -> bytes:
    """Let a stranger attack addresses for a fixed time, or until a condition holds; return what the stranger heard."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(Path(__file__).with_name("stranger.py")),
        name,
        str(os.geteuid() if uid is None else uid),
        str(ATTACK_S if until is None else PATIENCE_S),
        *addresses,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(2 * PATIENCE_S):
            while until is not None and not until() and process.returncode is None:
                await asyncio.sleep(0.005)
            if until is not None and process.returncode is None:
                tell_to_end(process)
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    *heard, last = output.decode().splitlines()
    assert last == "done"
    assert until is None or until(), "the attack has not come to that"
    return bytes.fromhex("".join(line.removeprefix("heard ") for line in heard))


class Watcher:
    """Finds out for how long a turn of the loop holds the processor, and what memory is taken."""

    async def __aenter__(self) -> Watcher:
        gc.collect()
        self.before = self.most = psutil.Process().memory_info().rss
        self.longest = 0.0
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _watch(self) -> None:
        """Measure the thread's own time: others that want the processor are not the loop's fault."""
        used = time.thread_time()
        process = psutil.Process()
        while True:
            await asyncio.sleep(0.0005)  # what comes is read in a turn of the loop that begins meanwhile
            now = time.thread_time()
            self.longest = max(self.longest, now - used)
            self.most = max(self.most, process.memory_info().rss)
            used = time.thread_time()

    def check(self, on_its_way: int = 0) -> None:
        assert self.longest < MOST_S
        assert self.most - self.before < MOST_BYTES + on_its_way


@asynccontextmanager
async def over_tcp(secure: bool) -> AsyncIterator[tuple[Serving, list[str]]]:
    addresses = EngineZmqAddresses([LOOPBACK], [LOOPBACK])
    encrypted: dict[str, Any] = {"secure": secure, "options": Options(secure=secure)}
    async with served(Engine(), addresses=addresses, handshake=LOOPBACK, **encrypted) as serving:
        yield serving, [addresses.inputs[0], addresses.outputs[0]]


class TestSecure:
    @pytest.mark.parametrize(("said", "reason"), [(b"", ENDED), (GREETING, MISMATCH)])
    async def test_peer_that_leaves_or_does_not_encrypt_is_named(
        self, said: bytes, reason: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with over_tcp(True) as (_, ports):
            _, writer = await asyncio.open_connection("127.0.0.1", int(ports[0].rpartition(":")[2]))
            writer.write(said)
            if not said:
                writer.close()
            await until(lambda: f"a connection to {ports[0]} failed (and 0 more): {reason}" in caplog.text, reason)
            writer.close()

    @pytest.mark.parametrize(
        "name", ["dead", "rank", "handshake_frame", pytest.param("endless", marks=pytest.mark.slow)]
    )
    async def test_a_client(self, name: str, caplog: pytest.LogCaptureFixture) -> None:
        async with over_tcp(True) as (serving, ports):
            stream = serving.client.submit(ask("r", None))
            assert (await anext(stream))["token"] == 0
            async with Watcher() as watcher:
                assert await attack(name, *ports) == b""
            assert len(await collected(serving.client.submit(ask("s", 5)))) == 5
            assert serving.client.in_flight == 1  # untouched
            await stream.aclose()
        watcher.check()
        assert len(caplog.records) <= 4

    @pytest.mark.parametrize("name", ["hello", "garbage"])
    async def test_a_startup(self, name: str, caplog: pytest.LogCaptureFixture) -> None:
        where = EngineZmqAddresses(["tcp://secret:1"], ["tcp://secret:2"])
        async with starting(LOOPBACK, where=where) as startup:
            place = startup.handshake_address
            async with Watcher() as watcher:
                assert await attack(name, place, place, place) == b""
            joining = asyncio.ensure_future(engine(place, 0))
            assert (await startup.wait(20)).num_gpu_blocks == 100
            await joining
        watcher.check()
        assert len(caplog.records) <= 4

    async def test_an_engine_cannot_be_another_one(self, caplog: pytest.LogCaptureFixture) -> None:
        """Engine 1's keys are no use for rank 0: not under its name, and not in what is said."""
        keys = EngineKeys.generate()
        addresses = EngineZmqAddresses([LOOPBACK], [LOOPBACK])
        async with EngineClient(addresses, 2, options=ClientOptions(keys=keys)) as client:
            with zmq.Context() as context:
                mine = keys.for_engine(1).to_front_end()
                for identity in (keys.name(0), b"\0\0"):
                    with curved(context, zmq.DEALER, addresses.inputs[0], mine, identity) as dealer:
                        dealer.send(b"")
                        await until_logged(
                            caplog, "keys of engine 1" if identity != b"\0\0" else "unknown engine", client
                        )
            assert client.ready == {}
        async with served(
            Engine(), Engine(), addresses=EngineZmqAddresses([LOOPBACK], [LOOPBACK]), keys=keys
        ) as serving:
            stream = await begun(serving.client, "r", engine=0)
            call = asyncio.create_task(serving.client.call("never", engine=0))
            await until(lambda: serving.client._link.pending.calls)
            (call_id,) = serving.client._link.pending.calls
            with zmq.Context() as context:
                with curved(context, zmq.PUSH, serving.client.addresses.outputs[0], mine) as push:
                    push.send(pack([0, [{"request_id": "r", "token": 666, "finished": True}]]))
                    push.send(pack([1, [{"request_id": "r", "token": 666, "finished": True}], None, 0.0, None, ["r"]]))
                    await until_logged(caplog, "engine 1 speaks for engine 0", serving.client)
                    answer = EngineCoreOutputs(1, utility_output=UtilityOutput(call_id, None, (None, 666)))
                    push.send(encode(answer))
                    await until_logged(caplog, "engine 1 answers a call of engine 0", serving.client)
            await asyncio.sleep(0.05)
            assert serving.client.in_flight == 1
            assert not call.done()
            call.cancel()
            await stream.aclose()

    @pytest.mark.parametrize(
        ("name", "secure"),
        [
            ("wave", True),
            ("wave", False),
            pytest.param("subscribe", True, marks=pytest.mark.slow),
            pytest.param("endless", True, marks=pytest.mark.slow),
        ],
    )
    async def test_a_coordinator(self, name: str, secure: bool) -> None:
        keys = EngineKeys.generate() if secure else None
        where: dict[str, Any] = {"local_engines": False, "local_front_ends": False}
        async with AsyncExitStack() as stack:
            opening = DPCoordinator.start(2, **where, keys=keys, secure=secure)
            coordinator = await stack.enter_async_context(await opening)
            stats, engines_at, reports_at = places(coordinator)
            peers = stack.enter_context(Peers(places(coordinator), keys))
            if name == "subscribe":
                await attack(name, "", "", "", reports_at, engines_at)
                lonely = await peers.subscriber(engines_at, 0)
                assert not await lonely.poll(300)  # READY would have come
                second = await peers.subscriber(engines_at, 1)
                assert await second.recv() == b"READY"
                engines = [lonely, second]
                await lonely.recv()
            else:
                engines = await peers.engines(2)
            front_end = await peers.front_end()
            reporter = peers.reporter(0)
            await published(front_end)
            process = psutil.Process(coordinator.proc.pid)
            before = process.memory_info().rss
            if name == "wave":
                await attack(name, "", "", "", reports_at)
            elif name != "subscribe":
                await attack(name, engines_at, reports_at, stats)
            assert process.memory_info().rss - before < MOST_BYTES
            await reporter.send(start(0, 0))
            assert [(await starts(each))[0] for each in engines] == [0, 0]
            await reporter.send(complete(0, 0))
            async with asyncio.timeout(PATIENCE_S):
                while (await published(front_end))[1] != 1:
                    pass


class TestInsecure:
    """With ``secure=False`` on the loopback: what is promised all the same; SECURITY.md lists what is not."""

    @pytest.mark.parametrize(("name", "said"), [("rank", ""), ("empties", "more than 50000 objects")])
    async def test_a_client(self, name: str, said: str, caplog: pytest.LogCaptureFixture) -> None:
        async with over_tcp(False) as (serving, ports):
            async with Watcher() as watcher:
                await attack(name, *ports, until=(lambda: said in caplog.text) if said else None)
            assert len(await collected(serving.client.submit(ask("s", 5)))) == 5
        watcher.check(100_000_000 if name == "empties" else 0)

    async def test_garbage_ends_a_startup_and_its_sender_is_named(self) -> None:
        async with starting(LOOPBACK, secure=False) as startup:
            place = startup.handshake_address
            attacking = asyncio.create_task(attack("garbage", place, place, place))
            with pytest.raises(HandshakeError, match=r"engine 9 .*it came from 127\.0\.0\.1"):
                await startup.wait(20)
            assert await attacking == b""

    async def test_tokens_without_the_generation_reach_no_request(self) -> None:
        async with over_tcp(False) as (serving, ports):
            stream = serving.client.submit(ask("r", None))
            other = serving.client.submit(ask("secret", None))
            assert [(await anext(each))["token"] for each in (stream, other)] == [0, 0]
            await attack("tokens", *ports, until=lambda: serving.client.late_outputs)
            assert len(await collected(serving.client.submit(ask("s", 5)))) == 5
            assert serving.client.in_flight == 2
            for each in (stream, other):
                await each.aclose()


@pytest.mark.skipif(os.geteuid() != 0, reason="root can be another user")
class TestOtherUsers:
    """At sockets with files."""

    @pytest.fixture
    def runtime_dir(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
        """Give sockets a directory that is not below pytest's, which other users cannot enter."""
        with tempfile.TemporaryDirectory(prefix="aioshm-") as base:
            monkeypatch.setenv("AIOSHM_RUNTIME_DIR", f"{base}/run")
            yield Path(base, "run")

    @pytest.mark.parametrize("secure", [True, False])
    async def test_directory_and_peer_credentials_keep_other_users_out(self, secure: bool, runtime_dir: Path) -> None:
        """The directory does; and without it, unless ``secure=False``, the kernel's word on who connects."""
        async with served(Engine(), secure=secure) as serving:
            ports = serving.client.addresses.inputs[0], serving.client.addresses.outputs[0]
            stream = await begun(serving.client, "r")
            await attack("dead", *ports, uid=NOBODY)
            assert len(await collected(serving.client.submit(ask("s", 5)))) == 5
            for directory in (runtime_dir.parent, runtime_dir):
                directory.chmod(0o711)
            for port in ports:
                Path(port.removeprefix("ipc://")).chmod(0o777)
            link = serving.client._link
            await attack("dead", *ports, uid=NOBODY, until=None if secure else lambda: link.dead)
            if secure:
                assert len(await collected(serving.client.submit(ask("t", 5)))) == 5
                await stream.aclose()
            else:
                with pytest.raises(EngineDead):
                    await collected(stream)


def connect(address: str, greeting: bytes, *messages: bytes) -> socket.socket:
    """Connect, and send messages of one frame."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    peer = socket.create_connection((host, int(port)))
    peer.sendall(greeting)
    peer.settimeout(20)
    peer.recv(10)  # ZeroMQ has let the peer in
    for message in messages:
        peer.sendall(message)
    return peer


async def test_old_peers_are_ignored_and_block_no_engine() -> None:
    """ZeroMQ lets in strangers whose ZMTP is older than 3.0, and knows only what they send."""
    wrong: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: wrong.append(context))
    zmtp_2 = b"\xff" + bytes(8) + b"\x7f\x01"
    async with over_tcp(False) as (serving, [inputs, outputs]):
        with ExitStack() as stack:
            for number in range(10):
                body = b"\x00\x04" + number.to_bytes(4, "big")  # ZMTP 2.0: flags, length, frame
                stack.enter_context(connect(inputs, zmtp_2 + b"\x05\0\0", body, body))  # DEALER
                stack.enter_context(connect(outputs, zmtp_2 + b"\x08\0\0", body, body))  # PUSH
                stack.enter_context(connect(outputs, b"\x01\x00", b"\x05\x00" + bytes(4)))  # ZMTP 1.0
                assert len(await collected(serving.client.submit(ask(f"r{number}", 3)))) == 3
    assert not wrong


class TestWarning:
    def test_one_warning_for_addresses_that_other_hosts_reach(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        from aioshm.engine.security import binding as security

        monkeypatch.setattr(security, "_warned", False)
        security.warn_of_strangers(["ipc:///x", "tcp://127.0.0.1:1", "tcp://[::1]:1", "tcp://localhost:5"])
        assert not caplog.records
        for _ in range(2):
            security.warn_of_strangers(["tcp://0.0.0.0:5", "tcp://node-3:1"])
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "tcp://0.0.0.0:5 is open to every host that reaches it" in caplog.text


def curved(context: Any, kind: int, address: str, keys: Any, identity: bytes = b"") -> Any:
    peer = context.socket(kind)
    peer.linger = 0
    peer.curve_publickey = keys.public
    peer.curve_secretkey = keys.secret
    peer.curve_serverkey = keys.server
    if identity:
        peer.routing_id = identity
    peer.connect(address)
    return peer


async def until_logged(caplog: pytest.LogCaptureFixture, text: str, client: EngineClient) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while text not in caplog.text:
            await asyncio.sleep(0.005)
    caplog.clear()
    client._link._limiter._next = 0.0  # the next one shall be logged, too
