"""What is noticed in the guard's thread is told to the loop, whichever look at the monitor found it."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Iterator

import pytest
import zmq
from events.attacker import GREETING, ready
from support import eventually

from aioshm.zeromq.guard import GuardedMonitor, PeerLimits
from aioshm.zeromq.sentry import Sentry

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="bytes are counted by the kernel, on Linux")


class Idle(Sentry):
    """A sentry whose thread does nothing: its looks are the test's."""

    def _work(self) -> None: ...


class Watched:
    """A socket with a guarded monitor, and a peer of it.

    Attributes:
        nudges: How often the monitor has said that there is something to read.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.nudges = 0
        self.pull, self.peer = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        self.monitor = GuardedMonitor(self.pull, PeerLimits(), nudge=self._nudge)
        self.pull.bind("tcp://127.0.0.1:0")
        self.peer.connect(self.pull.getsockopt_string(zmq.LAST_ENDPOINT))
        self.peer.send(b"")
        frame = self.pull.recv(copy=False)
        self.fd = int(frame.get(zmq.SRCFD))
        list(self.monitor.events())

    def leave(self) -> None:
        """Let the peer leave; return when the monitor has something to say of that."""
        self.peer.close(linger=0)
        eventually(lambda: self.monitor.pair.poll(0), "an event of the monitor")

    def _nudge(self) -> None:
        self.nudges += 1


@pytest.fixture
def sentry(monkeypatch: pytest.MonkeyPatch) -> Iterator[Idle]:
    made = Idle()
    monkeypatch.setattr("aioshm.zeromq.guard.Sentry", Idle)
    monkeypatch.setattr(Idle, "_current", made)
    yield made
    made._end()


@pytest.fixture
def context(sentry: Idle) -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield made
    made.destroy(linger=0)


@pytest.fixture
def watched(context: zmq.Context[zmq.Socket[bytes]]) -> Iterator[Watched]:
    made = Watched(context)
    yield made
    made.monitor.close()


LOOKS: dict[str, Callable[[GuardedMonitor, int], object]] = {
    "look": lambda monitor, _: monitor.look(),
    "check": lambda monitor, fd: monitor.check(fd),
    "take_gone": lambda monitor, _: monitor.take_gone(),
    "take_departed": lambda monitor, _: monitor.take_departed(),
    "is_open": lambda monitor, fd: monitor.is_open(fd),
}


@pytest.mark.parametrize("name", LOOKS)
def test_an_event_is_told_of_whichever_look_found_it(watched: Watched, name: str) -> None:
    """A look takes away what would have woken the loop, so it has to wake the loop itself."""
    watched.leave()
    before = watched.nudges
    LOOKS[name](watched.monitor, watched.fd)
    assert watched.nudges == before + 1
    LOOKS[name](watched.monitor, watched.fd)
    assert watched.nudges == before + 1, "once is enough"
    assert [kind for kind, *_ in watched.monitor.events()] == [zmq.EVENT_DISCONNECTED]
    assert watched.monitor.is_open(watched.fd) is False


def test_a_connection_is_open_until_its_end(watched: Watched) -> None:
    assert watched.monitor.is_open(watched.fd)
    watched.leave()
    assert not watched.monitor.is_open(watched.fd)
    assert watched.monitor.take_gone() == {watched.fd}


def test_a_peer_is_counted_though_zeromq_has_read_all_that_it_said(
    sentry: Idle, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    """Its last word in the handshake is told of also where nothing of it is left when the guard looks."""
    pull = context.socket(zmq.PULL)
    monitor = GuardedMonitor(pull, PeerLimits())
    port = pull.bind_to_random_port("tcp://127.0.0.1")
    with socket.create_connection(("127.0.0.1", port)) as peer:
        eventually(lambda: monitor.pair.poll(0), "the connection")
        monitor.look()
        peer.sendall(GREETING)
        answer = b""
        while len(answer) < len(GREETING):
            answer += peer.recv(len(GREETING) - len(answer))
        eventually(lambda: sentry._epoll.poll(0) == [], "quiet")
        peer.sendall(ready(b"PUSH"))
        eventually(lambda: monitor.pair.poll(0), "the end of the handshake")
        for fd, _ in sentry._epoll.poll(0):
            if fd != monitor.pair.getsockopt(zmq.FD):
                monitor.check(fd)
        assert monitor.peers == 1
    monitor.close()
    pull.close()
