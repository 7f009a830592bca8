"""The engine's side of the handshake, against a socket, and over connections that are refused or go silent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from peers import BareFrontEnd
from proxy import Proxy
from startups import addresses, ready_with, tasks
from support import until

from aioshm.engine import (
    CoreEngine,
    EngineHandshakeMetadata,
    EngineKeys,
    EngineStartupCoordinator,
    EngineZmqAddresses,
    HandshakeOptions,
    StartupOptions,
    shake_hands,
)
from aioshm.zeromq import endpoint
from aioshm.zeromq.endpoint import open_socket

INIT = msgspec.msgpack.encode(EngineHandshakeMetadata(addresses(), {"data_parallel_size": 2}))

LOOPBACK = "tcp://127.0.0.1:*"
WITHIN_S = 15.0
TWO_HEADLESS = HandshakeOptions(client_handshake_address="ipc:///o", headless=True)
TWO_REMOTE = HandshakeOptions(client_handshake_address="ipc:///o", local=False)


@pytest.fixture
def front(path: str) -> Iterator[BareFrontEnd]:
    with zmq.Context() as context, closing(BareFrontEnd(context, path, b"\x05\0")) as made:
        yield made


async def test_engine_that_cannot_be_made_is_never_ready(front: BareFrontEnd, path: str) -> None:
    async with tasks(shake_hands(path, 5, initialize=lambda _: 1 / 0)) as (engine,):
        await front.hears()
        front.says(INIT)
        with pytest.raises(ZeroDivisionError):
            await engine
    await asyncio.sleep(0.02)
    assert front.idle(), "no READY"


class TestTwoFrontEnds:
    """Hybrid and external load balancing: the head node's front end, and the engine's own."""

    @pytest.fixture
    def beside(self, tmp_path: Path) -> Iterator[tuple[BareFrontEnd, str]]:
        address = f"ipc://{tmp_path}/beside"
        with zmq.Context() as context, closing(BareFrontEnd(context, address, b"\x05\0")) as made:
            yield made, address

    async def test_the_whole_way(self, front: BareFrontEnd, path: str, beside: tuple[BareFrontEnd, str]) -> None:
        own, own_path = beside
        told: list[EngineHandshakeMetadata] = []

        def initialize(metadata: EngineHandshakeMetadata) -> dict[str, Any]:
            told.append(metadata)
            return {"num_gpu_blocks": 3}

        head_says = EngineZmqAddresses(["h-in"], ["h-out"], "c-in", "c-out", "stats")
        own_says = EngineZmqAddresses(["in"], ["out"], "not", "these", "at all")
        handshake = HandshakeOptions(client_handshake_address=own_path)
        async with tasks(shake_hands(path, 5, initialize=initialize, handshake=handshake)) as (engine,):
            assert await front.hears() == {"status": "HELLO", "local": False, "headless": False}
            front.says(msgspec.msgpack.encode(EngineHandshakeMetadata(head_says, {"data_parallel_size": 9})))
            assert await own.hears() == {"status": "HELLO", "local": True, "headless": False}
            assert not told
            own.says(msgspec.msgpack.encode(EngineHandshakeMetadata(own_says, {"data_parallel_size": 1})))
            ready = {"status": "READY", "headless": False, "num_gpu_blocks": 3}
            assert await own.hears() == {**ready, "local": True}
            assert await front.hears() == {**ready, "local": False}
            metadata = await engine
        assert told == [metadata]
        assert metadata.addresses == EngineZmqAddresses(["in"], ["out"], "c-in", "c-out", "stats")
        assert metadata.parallel_config == {"data_parallel_size": 9}

    @pytest.mark.slow_on_uvloop
    @pytest.mark.parametrize("silent", ["head", "own"])
    async def test_silent_front_end_is_named(
        self, silent: str, front: BareFrontEnd, path: str, beside: tuple[BareFrontEnd, str]
    ) -> None:
        own, own_path = beside
        timeout = 1.0 if silent == "own" else 0.3  # the first answer has to come in time
        handshake = HandshakeOptions(client_handshake_address=own_path)
        async with tasks(shake_hands(path, 5, initialize=ready_with(), timeout=timeout, handshake=handshake)) as (
            engine,
        ):
            await front.hears()
            if silent == "own":
                front.says(INIT)
                await own.hears()
            named = own_path if silent == "own" else path
            with pytest.raises(TimeoutError, match=f"engine 5: no answer from {named} within {timeout} s"):
                await engine


@pytest.mark.parametrize(
    ("address", "options", "error", "text"),
    [
        ("nowhere", {}, OSError, "nowhere"),
        ("ipc:///tmp/x", {"timeout": 0}, ValueError, "timeout"),
        ("ipc:///tmp/x", {"handshake": TWO_HEADLESS}, ValueError, "must be local and not headless"),
        ("ipc:///tmp/x", {"handshake": TWO_REMOTE}, ValueError, "must be local and not headless"),
    ],
)
async def test_invalid_arguments_are_refused(
    address: str, options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        await shake_hands(address, 5, initialize=ready_with(), **options)


@pytest.mark.slow_on_uvloop
@pytest.mark.parametrize("secure", [True, False])
async def test_front_end_that_hangs_up_in_the_handshake_is_named(secure: bool) -> None:
    """Like a proxy without a backend. With keys the front end may also refuse the keys."""

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    address = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    keys = EngineKeys.generate() if secure else None
    with pytest.raises(TimeoutError) as caught:
        await shake_hands(
            address,
            5,
            initialize=lambda metadata: None,
            timeout=1,
            handshake=HandshakeOptions(keys=keys, secure=secure),
        )  # type: ignore[arg-type,return-value]
    server.close()
    await server.wait_closed()
    end = ", or the front end refuses these keys, which have to be of its EngineKeys" if secure else ""
    assert str(caught.value).endswith(f"{address}: the connection ended during the handshake{end}")


@pytest.mark.slow_on_uvloop
@pytest.mark.parametrize(("secure", "hint"), [(True, "secure=False is needed"), (False, "leave out secure=False")])
async def test_front_end_that_encrypts_or_does_not_is_named(secure: bool, hint: str) -> None:
    keys = EngineKeys.generate()
    curve = None if secure else keys.front_end
    with zmq.Context() as context, open_socket(context, zmq.ROUTER, LOOPBACK, bind=True, hwm=1, curve=curve) as router:
        router.bind(LOOPBACK)
        address = router.getsockopt_string(zmq.LAST_ENDPOINT)
        handshake = HandshakeOptions(keys=keys, secure=secure)
        errors: list[str] = []
        for timeout in (1, 4, 16):  # the end that hangs up first may be the other end for some attempts
            with pytest.raises(TimeoutError) as caught:
                await shake_hands(address, 5, initialize=lambda _: None, timeout=timeout, handshake=handshake)
            errors.append(str(caught.value))
            if "only one of the two ends encrypts; " in errors[-1]:
                break
        assert hint in errors[-1].partition("only one of the two ends encrypts; ")[2]


async def serve(address: str, initialize: Callable[[Any], Any], **options: Any) -> None:
    """Shake hands, and go on for ever, as an engine does."""
    await shake_hands(address, 0, initialize=initialize, handshake=HandshakeOptions(**options))
    await asyncio.Event().wait()


@pytest.mark.slow_on_uvloop
@pytest.mark.parametrize("secure", [False, True], ids=["plain", "encrypted"])
async def test_engine_whose_connections_are_refused_or_go_silent_gets_ready(
    secure: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HELLO waits for a connection, and READY for the next one if the first goes silent while the engine starts."""
    monkeypatch.setattr(endpoint, "SILENCE_S", 1.0)
    keys = EngineKeys.generate()
    options = StartupOptions(keys=keys, secure=secure)
    async with (
        EngineStartupCoordinator("tcp://127.0.0.1:0", [CoreEngine(0)], addresses(), options=options) as startup,
        Proxy(startup.handshake_address) as proxy,
    ):

        async def initialize(_: object) -> dict[str, Any]:
            # Without keys nobody takes an engine's place: heartbeats let the front end drop the old connection.
            await until(lambda: proxy.pings or secure, "a heartbeat")
            proxy.stall()
            before = proxy.connections
            await until(lambda: proxy.connections == before + 1, "another connection")
            proxy.resume()
            return {"num_gpu_blocks": 7}

        proxy.refusing = True
        async with tasks(serve(proxy.endpoint, initialize, keys=keys, secure=secure)):
            await until(lambda: proxy.refused == 2, "two connections that are refused")
            proxy.refusing = False
            report = await startup.wait(WITHIN_S)
        sent = {"local": True, "headless": False}
        assert report.engines[0].hello == {"status": "HELLO", **sent}
        assert report.engines[0].ready == {"status": "READY", **sent, "num_gpu_blocks": 7}
