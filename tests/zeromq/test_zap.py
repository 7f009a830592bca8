"""The authenticator of CURVE peers: it admits recognised keys only, whatever happens to it."""

from __future__ import annotations

from contextlib import closing

import pytest
import zmq
from zmq.utils import z85

from aioshm.zeromq.sockets import Socket, Sockets
from aioshm.zeromq.zap import ZapAuthenticator, require_zap

ADMITTED_S = 10.0
REFUSED_S = 0.3

pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")


class Server:
    """A PULL socket behind an authenticator, and peers with keys of their own."""

    def __init__(self) -> None:
        self.sockets = Sockets(threads=1)
        self.recognised: dict[bytes, str | Exception] = {}
        self.authenticator = ZapAuthenticator(self.sockets.context, self._recognise, "a test")
        self.public, secret = zmq.curve_keypair()
        self.pull = self.sockets.add(self.sockets.context.socket(zmq.PULL))
        self.pull.curve_server = True
        self.pull.curve_secretkey = secret
        require_zap(self.pull, "tests")
        self.port = self.pull.bind_to_random_port("tcp://127.0.0.1")
        self.peers = Sockets()

    def _recognise(self, domain: str, key: bytes) -> str | None:
        assert domain == "tests"
        user = self.recognised.get(key)
        if isinstance(user, Exception):
            raise user
        return user

    def admits(self, user: str | Exception | None) -> bool:
        """Return whether a new peer, recognised as ``user``, can send a message."""
        public, secret = zmq.curve_keypair()
        if user is not None:
            self.recognised[z85.decode(public)] = user
        push: Socket = self.peers.add(self.peers.context.socket(zmq.PUSH))
        push.curve_serverkey = self.public
        push.curve_publickey = public
        push.curve_secretkey = secret
        push.connect(f"tcp://127.0.0.1:{self.port}")
        push.send(public)
        within_s = ADMITTED_S if isinstance(user, str) else REFUSED_S
        return bool(self.pull.poll(int(within_s * 1000))) and self.pull.recv() == public

    def close(self) -> None:
        self.peers.close()
        self.sockets.close()


def test_unknown_key_and_exception_of_recognise_refuse_their_peer_and_no_other_peer() -> None:
    with closing(Server()) as server:
        assert not server.admits(MemoryError())
        assert not server.admits(None)
        assert server.admits("a")


def test_socket_whose_authenticator_has_ended_admits_no_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ZapAuthenticator, "_serve", lambda self: self._socket.close(linger=0))
    with closing(Server()) as server:
        assert not server.admits(None)
