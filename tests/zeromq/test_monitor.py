"""A monitor names why a handshake failed, at either end of the connection."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

import pytest
import zmq
from support import eventually

from aioshm.zeromq.endpoint import CurveKeys, open_socket
from aioshm.zeromq.monitor import ENDED, MISMATCH, TIMED_OUT, Monitor

ANY = "tcp://127.0.0.1:*"
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
SERVER = CurveKeys.generate()


Monitored = Callable[..., Monitor]


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield made
    made.destroy(linger=0)


@pytest.fixture
def monitored(context: zmq.Context[zmq.Socket[bytes]]) -> Iterator[Monitored]:
    """Give a function that monitors a socket; monitors and sockets are closed when the test is over."""
    made: list[tuple[Monitor, zmq.Socket[bytes]]] = []

    def monitor(socket: zmq.Socket[bytes]) -> Monitor:
        made.append((Monitor(socket), socket))
        return made[-1][0]

    yield monitor
    for each, sock in made:
        each.close()
        sock.close(linger=0)


def fails(monitor: Monitor, reason: str) -> bool:
    """Wait for such a failure: of two ends that do not match, one may at first find the other gone."""
    reasons: list[str] = []

    def read() -> bool:
        reasons.extend(failure.reason for failure in monitor.read()[1])
        return reason in reasons

    eventually(read, f"a handshake that fails because {reason}")
    return True


def hang_up(peer: socket.socket) -> None:
    peer.close()


def greet_and_hang_up(peer: socket.socket) -> None:
    peer.sendall(GREETING)
    peer.recv(len(GREETING), socket.MSG_WAITALL)
    peer.close()


def stay_silent(peer: socket.socket) -> None: ...


@pytest.mark.parametrize(("act", "reason"), [(hang_up, ENDED), (greet_and_hang_up, ENDED), (stay_silent, TIMED_OUT)])
def test_bound_socket_names_a_peer_that_ends_before_its_handshake(
    context: zmq.Context[zmq.Socket[bytes]],
    monitored: Monitored,
    act: Callable[[socket.socket], None],
    reason: str,
) -> None:
    bound = context.socket(zmq.PULL)
    bound.setsockopt(zmq.HANDSHAKE_IVL, 200 if act is stay_silent else 30_000)
    monitor = monitored(bound)
    port = bound.bind_to_random_port("tcp://127.0.0.1")
    with socket.create_connection(("127.0.0.1", port)) as peer:
        act(peer)
        assert fails(monitor, reason)


@pytest.mark.parametrize(("act", "reason"), [(hang_up, ENDED), (stay_silent, TIMED_OUT)])
def test_connecting_socket_names_a_listener_that_ends_before_its_handshake(
    context: zmq.Context[zmq.Socket[bytes]], monitored: Monitored, act: Callable[[socket.socket], None], reason: str
) -> None:
    """As a proxy does that has no backend."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        dealer = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.HANDSHAKE_IVL, 200 if act is stay_silent else 30_000)
        monitor = monitored(dealer)
        dealer.connect(f"tcp://127.0.0.1:{listener.getsockname()[1]}")
        peer, _ = listener.accept()
        act(peer)
        assert fails(monitor, reason)
        peer.close()


@pytest.mark.parametrize(
    ("bound_keys", "peer_keys", "reason", "peer_reason"),
    [
        (SERVER, CurveKeys.generate(CurveKeys.generate().public), "the peer has other keys", ENDED),
        (SERVER, None, MISMATCH, MISMATCH),
        (None, CurveKeys.generate(SERVER.public), MISMATCH, MISMATCH),
    ],
    ids=["other keys", "plain to encrypted", "encrypted to plain"],
)
def test_keys_that_do_not_fit_are_named(
    context: zmq.Context[zmq.Socket[bytes]],
    monitored: Monitored,
    bound_keys: CurveKeys | None,
    peer_keys: CurveKeys | None,
    reason: str,
    peer_reason: str,
) -> None:
    bound = open_socket(context, zmq.PULL, ANY, bind=True, hwm=1, curve=bound_keys)
    monitor = monitored(bound)
    bound.bind(ANY)
    endpoint = bound.getsockopt_string(zmq.LAST_ENDPOINT)
    peer = open_socket(context, zmq.PUSH, endpoint, bind=False, hwm=1, curve=peer_keys)
    peer_monitor = monitored(peer)
    peer.connect(endpoint)
    assert fails(monitor, reason)
    assert fails(peer_monitor, peer_reason)
