"""A listener whose host notes what it is told, and readers that note what they hear."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from support import until

from aioshm.errors import HandleError
from aioshm.lifeline.dialer import Lifeline, attach, dial
from aioshm.lifeline.listener import LifelineListener, Peer
from aioshm.lifeline.protocol import Hello, Welcome
from aioshm.lifeline.sockets import sockaddr
from aioshm.ring.layout import VERSION

QUEUE_ID = b"q" * 16
TOKEN = b"t" * 32
RANKS = range(300)


def frame(body: bytes) -> bytes:
    """Put the length of a greeting before it."""
    return len(body).to_bytes(4, "big") + body


def hello(rank: int = 0, **changes: Any) -> Hello:
    return Hello(
        **{"version": VERSION, "queue_id": QUEUE_ID, "token": TOKEN, "rank": rank, "pid": os.getpid(), **changes}
    )


class Door:
    """The writer's side. What happens to it, in order, is in ``log``."""

    def __init__(self, address: str, *, backlog: int = 300) -> None:
        self.address = address
        self.listener = LifelineListener(address, QUEUE_ID, TOKEN, backlog)
        self.segment = os.memfd_create("segment")
        os.write(self.segment, b"the segment")
        self.log: list[tuple[str, int]] = []
        self.peers: dict[int, Peer] = {}
        self.missing: list[tuple[int, bool]] = []
        self.wakes = 0
        self.go_once_proven = False
        self.passes_segment = True

    def start(self) -> None:
        self.listener.start(asyncio.get_running_loop(), self)

    def close(self) -> None:
        self.listener.close()
        if self.segment >= 0:
            os.close(self.segment)
            self.segment = -1

    # What a listener tells its host

    def admit(self, greeting: Hello) -> tuple[Welcome, list[int]]:
        if greeting.rank not in RANKS:
            raise HandleError(f"no local reader has rank {greeting.rank}")
        fds = [self.segment] if self.passes_segment else []
        bells = self.listener.doorbell is not None
        return Welcome(pid=4711, secret=b"secret", segment=bool(fds), bells=bells), fds

    def awaits_end(self, hello: Hello) -> bool:
        return False

    def missed(self, greeting: Hello, said_goodbye: bool) -> None:
        self.missing.append((greeting.rank, said_goodbye))

    def attached(self, peer: Peer) -> None:
        self.log.append(("attached", peer.rank))
        self.peers[peer.rank] = peer

    def announce(self) -> None: ...

    def withdrawn(self, welcome: Welcome) -> None:
        self.log.append(("withdrawn", welcome.rank))

    def proven(self, peer: Peer) -> None:
        self.log.append(("proven", peer.rank))
        if self.go_once_proven:
            peer.go()

    def gone(self, peer: Peer, said_goodbye: bool) -> None:
        self.log.append(("left" if said_goodbye else "died", peer.rank))

    def woken(self) -> None:
        self.wakes += 1


class Reader:
    """An admitted reader. What it hears, in order, is in ``heard``; the descriptors it is passed are in ``passed``."""

    def __init__(self, lifeline: Lifeline) -> None:
        self.lifeline = lifeline
        self.heard: list[str] = []
        self.passed: list[int | None] = []
        lifeline.start(self)

    def on_go(self) -> None:
        self.heard.append("go")

    def on_wake(self) -> None:
        self.heard.append("wake")

    def on_gone(self, said_goodbye: bool) -> None:
        self.heard.append("closed" if said_goodbye else "died")

    def on_descriptor(self, fd: int | None) -> None:
        self.passed.append(fd)

    def on_held_back(self) -> None:
        self.heard.append("held back")

    def on_evicted(self) -> None:
        self.heard.append("evicted")

    @classmethod
    async def admitted(cls, address: str, rank: int = 0) -> Reader:
        return cls(await asyncio.wait_for(attach(address, hello(rank), dial(address, hello(rank))), 20))

    async def hears(self, what: str, times: int = 1) -> None:
        await until(lambda: self.heard.count(what) >= times, f"{what!r}, having heard {self.heard},")


@asynccontextmanager
async def opened(address: str, **kwargs: Any) -> AsyncIterator[Door]:
    """Give a listening door to the block; nothing may go wrong in the loop's callbacks meanwhile."""
    loop = asyncio.get_running_loop()
    failures: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: failures.append(context))
    door = Door(address, **kwargs)
    door.start()
    try:
        yield door
    finally:
        door.close()
        loop.set_exception_handler(None)
    assert failures == []


def knock(address: str, said: bytes = b"") -> socket.socket:
    """Connect to a door, say this and nothing more."""
    sock = socket.socket(socket.AF_UNIX)
    sock.setblocking(False)
    sock.connect(sockaddr(address))
    if said:
        sock.send(said)
    return sock


async def until_hung_up(sock: socket.socket) -> bytes:
    """Return what still comes over a connection before its end."""
    said = b""
    while True:
        try:
            data = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(sock, 65536), 10)
        except ConnectionResetError:
            return said
        if not data:
            return said
        said += data
