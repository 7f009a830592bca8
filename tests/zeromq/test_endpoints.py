"""Endpoints and keys that no ZeroMQ socket can have: typed errors that name them and say what to do."""

from __future__ import annotations

import errno
import re
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any
from unittest.mock import Mock

import pytest
import zmq

from aioshm import EndpointError
from aioshm.engine import CoreEngine, EngineClient, EngineStartupCoordinator, EngineZmqAddresses, run_engine_core
from aioshm.events import EventSubscriber, ThreadedEventPublisher, ZmqEventPublisher
from aioshm.zeromq.endpoint import CurveKeys, attach, open_socket

FREE = "tcp://127.0.0.1:*"
NO_PORT = "no port is free: .* widen net.ipv4.ip_local_port_range"


@pytest.fixture
def taken() -> Iterator[str]:
    """An endpoint that somebody else has."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield f"tcp://127.0.0.1:{listening.getsockname()[1]}"


async def enter(made: Any) -> None:
    if isinstance(made, AbstractAsyncContextManager):
        async with made:
            pass
    elif isinstance(made, Awaitable):
        await made
    else:
        made.close()


Make = Callable[..., Any]

BINDS: dict[str, Make] = {
    "publisher": lambda endpoint: ZmqEventPublisher(0, endpoint),
    "replay of a publisher": lambda endpoint: ZmqEventPublisher(0, FREE, endpoint),
    "threaded publisher": lambda endpoint: ThreadedEventPublisher(0, endpoint),
    "requests": lambda endpoint: EngineClient(EngineZmqAddresses([endpoint], [FREE]), 1),
    "outputs": lambda endpoint: EngineClient(EngineZmqAddresses([FREE], [endpoint]), 1),
    "handshake": lambda endpoint: EngineStartupCoordinator(
        endpoint, [CoreEngine(0)], EngineZmqAddresses([FREE], [FREE])
    ),
}
ENGINE = Mock(spec=["initialize", "add_request", "abort_requests", "step"])
CONNECTS: dict[str, Make] = {
    "subscriber": EventSubscriber,
    "engine": lambda endpoint: run_engine_core(ENGINE, endpoint, 0),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("make", BINDS.values(), ids=BINDS)
async def test_one_that_cannot_be_bound(make: Make, taken: str) -> None:
    bound = taken.replace("127.0.0.1", "*") if make in (BINDS["publisher"], BINDS["threaded publisher"]) else taken
    for endpoint, number, remedy in (
        (bound, errno.EADDRINUSE, "port * for a free port"),
        ("ipc:///nowhere/at/all", errno.ENOENT, "create its directory"),
        ("ipc:///tmp/" + "x" * 300, errno.ENAMETOOLONG, "a shorter directory"),
    ):
        with pytest.raises(EndpointError, match="cannot bind") as caught:
            await enter(make(endpoint))
        assert caught.value.errno == number
        assert endpoint in str(caught.value)
        assert remedy in str(caught.value)


@pytest.mark.parametrize("endpoint", ["tcp://*:*", "tcp://127.0.0.1:*", "tcp://[::1]:0"])
def test_error_for_any_port_where_none_is_free_says_so(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise zmq.ZMQError(errno.EADDRINUSE)

    monkeypatch.setattr(zmq.Socket, "bind", refuse)
    with zmq.Context() as context, context.socket(zmq.PUB) as publisher:
        with pytest.raises(EndpointError, match=f"cannot bind {re.escape(endpoint)}: .*{NO_PORT}") as caught:
            attach(publisher, endpoint, bind=True)
    assert caught.value.errno == errno.EADDRINUSE
    assert "use another" not in str(caught.value)


@pytest.mark.parametrize("make", [*BINDS.values(), *CONNECTS.values()], ids=[*BINDS, *CONNECTS])
async def test_one_that_is_none(make: Make) -> None:
    for endpoint in (5, b"tcp://127.0.0.1:5", "ipc:///tmp/a\0b", "ipc:///tmp/\udc80", "foo", "tcp://"):
        with pytest.raises((TypeError, ValueError, EndpointError), match=r"endpoint|address|iterable"):
            await enter(make(endpoint))


@pytest.mark.parametrize("make", [ZmqEventPublisher, EventSubscriber])
async def test_keys(make: Any) -> None:
    good = CurveKeys.generate(CurveKeys.generate().public)
    place = (FREE.replace("*", "5"),) if make is EventSubscriber else (0, FREE)
    secret = b"0123456789"
    for bad, name in (
        (CurveKeys(public=b"x", secret=good.secret, server=good.server), "curve.public"),
        (CurveKeys(public=good.public, secret=secret, server=good.server), "curve.secret"),
        (CurveKeys(public="x", secret=good.secret, server=good.server), "curve.public"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ValueError, match=name) as caught:
            await enter(make(*place, curve=bad))
        assert secret.decode() not in str(caught.value)
    for nonsense in (5, "keys", object()):
        with pytest.raises(TypeError, match="curve must be CurveKeys or None"):
            await enter(make(*place, curve=nonsense))


def options_of(kind: int, endpoint: str, *, bind: bool, **options: Any) -> dict[str, int]:
    """Return the options that watch the connections of a socket, in milliseconds or as the system has them."""
    watching = {
        "connect": zmq.CONNECT_TIMEOUT,
        "unacknowledged": zmq.TCP_MAXRT,
        "keepalive": zmq.TCP_KEEPALIVE,
        "heartbeats": zmq.HEARTBEAT_IVL,
    }
    with zmq.Context() as context, open_socket(context, kind, endpoint, bind=bind, hwm=1, curve=None, **options) as it:
        return {name: int(it.getsockopt(option)) for name, option in watching.items()}


def test_tcp_sockets_give_a_silent_host_up() -> None:
    found = options_of(zmq.SUB, "tcp://127.0.0.1:1", bind=False)
    assert found == {"connect": 5000, "unacknowledged": 10_000, "keepalive": 1, "heartbeats": 0}
    assert options_of(zmq.PUB, FREE, bind=True)["unacknowledged"] >= 600_000, "peers connect again"
    found = options_of(zmq.ROUTER, FREE, bind=True, silence_s=1.0, heartbeats=True)
    assert (found["unacknowledged"], found["heartbeats"]) == (1000, 200)
    assert options_of(zmq.SUB, "ipc:///tmp/nobody", bind=False, heartbeats=True)["heartbeats"] == 0
