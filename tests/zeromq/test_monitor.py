"""A monitor names why a handshake failed, at either end of the connection."""

from __future__ import annotations

import socket

import pytest
import zmq
from support import eventually

from aioshm.zeromq.endpoint import CurveKeys, open_socket
from aioshm.zeromq.monitor import ENDED, TIMED_OUT, Monitor

ANY = "tcp://127.0.0.1:*"


def wait_for_failure(monitor: Monitor, reason: str) -> None:
    """Of two ends that do not match, one may at first find the other gone."""
    reasons: list[str] = []

    def read() -> bool:
        reasons.extend(failure.reason for failure in monitor.read()[1])
        return reason in reasons

    eventually(read, f"a handshake that fails because {reason}")
    monitor.close()


@pytest.mark.parametrize("bound", [True, False])
def test_peer_that_says_nothing_is_named(bound: bool) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.HANDSHAKE_IVL, 200)
        monitor = Monitor(dealer)
        if bound:
            port = dealer.bind_to_random_port("tcp://127.0.0.1")
            peer = socket.create_connection(("127.0.0.1", port))
        else:
            with socket.create_server(("127.0.0.1", 0)) as listener:
                dealer.connect(f"tcp://127.0.0.1:{listener.getsockname()[1]}")
                peer, _ = listener.accept()
        with peer:
            wait_for_failure(monitor, TIMED_OUT)


def test_peer_with_other_keys_is_named() -> None:
    server = CurveKeys.generate()
    client = CurveKeys.generate(CurveKeys.generate().public)
    with zmq.Context() as context, open_socket(context, zmq.PULL, ANY, bind=True, hwm=1, curve=server) as bound:
        monitor = Monitor(bound)
        bound.bind(ANY)
        endpoint = bound.getsockopt_string(zmq.LAST_ENDPOINT)
        with open_socket(context, zmq.PUSH, endpoint, bind=False, hwm=1, curve=client) as peer:
            peer_monitor = Monitor(peer)
            peer.connect(endpoint)
            wait_for_failure(monitor, "the peer has other keys")
            wait_for_failure(peer_monitor, ENDED)


def test_handshake_that_fails_ends_no_connection() -> None:
    with zmq.Context() as context, context.socket(zmq.SUB) as bound, context.socket(zmq.PUB) as peer:
        monitor = Monitor(bound)
        port = bound.bind_to_random_port("tcp://127.0.0.1")
        peer.connect(f"tcp://127.0.0.1:{port}")
        eventually(lambda: monitor.changed())
        socket.create_connection(("127.0.0.1", port)).close()
        eventually(lambda: not monitor.changed() and monitor.take_gone())
        assert (monitor.connections, monitor.down_since) == (1, None)
        peer.close(linger=0)
        eventually(lambda: monitor.changed() and not monitor.connections)
        monitor.close()
