"""The front end's socket of the handshake."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable

import zmq

from aioshm.engine.protocol.addresses import identity
from aioshm.engine.security.binding import Protection, over_tcp, warn_of_strangers
from aioshm.engine.security.doorkeeper import Doorkeeper
from aioshm.engine.security.guard import STRANGE_BYTES, Guard
from aioshm.engine.security.keys import EngineKeys
from aioshm.engine.security.reading import MessageReader, sender_of, user_of, with_sender
from aioshm.zeromq.endpoint import BoundFile, attach
from aioshm.zeromq.pump import Pump
from aioshm.zeromq.sockets import Socket, Sockets

MAX_FRAME_BYTES = 16 << 20
"""ZeroMQ hangs up on a peer that sends more, without a word; what is too much below that can be refused by name."""

_HWM = 1000
_FRAMES = 2  # of a payload, that are kept: it should be one


class HandshakeRouter:
    """A ROUTER socket whose messages are handed to a callback on the loop."""

    def __init__(
        self,
        place: str | Socket,
        on_message: Callable[[bytes, list[bytes], str], bool],
        ranks: Iterable[int] = (),
        *,
        keys: EngineKeys | None = None,
        secure: bool = True,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_message = on_message
        self._sockets: Sockets | None = None
        self._descriptor: int | None = None
        self._file: BoundFile | None = None
        self._doorkeeper: Doorkeeper | None = None
        self._guard: Guard | None = None
        self.address: str = ""
        self.trusted: bool = False
        self._protection: Protection | None = None  # where engines are recognised by their keys
        self._names: dict[bytes, bytes] = {}
        try:
            if isinstance(place, str):
                self._open(place, Protection.of_front_end([place], ranks, keys=keys, secure=secure, more=True))
            else:
                self._share(place)
            # An INIT that reaches nobody shall be an error.
            self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
            # Of two engines with one rank the second shall be heard, so that it can be refused; without this the socket
            # ignores it. But a stranger shall take nobody's place.
            self._router.setsockopt(zmq.ROUTER_HANDOVER, int(self.trusted))
            if isinstance(place, str):
                self.address = attach(self._router, place, bind=True)  # where it is bound
                self._file = BoundFile(self.address)
            self._reader = MessageReader(self._router, 1 + _FRAMES, with_sender)
            self._pump = Pump.of_messages(
                self._loop, self._router, self._take, self._receive, descriptor=self._descriptor
            )
        except BaseException:
            self._release()
            raise

    def _open(self, address: str, protection: Protection) -> None:
        self._sockets = Sockets()
        encrypts = protection.encrypts(address)
        self.trusted = encrypts or not over_tcp([address])
        if self.trusted:
            self._doorkeeper = protection.doorkeeper(self._sockets) or Doorkeeper(self._sockets)
        self._router = protection.open(self._sockets, zmq.ROUTER, address, hwm=_HWM)
        self._router.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES if self.trusted else STRANGE_BYTES // 2)
        if self._doorkeeper is not None:
            self._doorkeeper.admit_one_by_one(self._router)
        if encrypts:
            self._protection = protection
        if over_tcp([address]):
            self._guard = Guard(self._router, self._sockets, encrypted=encrypts)

    def _share(self, router: Socket) -> None:
        if router.getsockopt(zmq.TYPE) != zmq.ROUTER:
            raise ValueError(f"the handshake needs a ROUTER socket, not {router!r}")
        self._router = zmq.Socket.shadow(router)
        # The socket's owner may watch its descriptor on this loop, too, which knows one watcher for each.
        self._descriptor = os.dup(int(self._router.getsockopt(zmq.FD)))
        self.address = bytes(self._router.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()
        self.trusted = not over_tcp([self.address]) or self._router.getsockopt(zmq.MECHANISM) != zmq.NULL
        if not self.trusted:
            warn_of_strangers([self.address])

    def void_keys(self, rank: int, incarnation: int) -> None:
        """Refuse the keys of the incarnations of an engine that were before this one."""
        if self._protection is not None:
            self._protection.void(rank, incarnation)

    def resume(self) -> None:
        """Go on after a message that was not to be gone on from."""
        self._pump.resume()

    def look(self) -> None:
        """Read what has come, some of it at a time."""
        self._pump.run()

    def _receive(self) -> tuple[zmq.Frame, list[bytes]] | None:
        if self._pump.paused:  # what comes now is for the owner of the socket
            raise zmq.Again
        return self._reader.read()

    def _take(self, message: tuple[zmq.Frame, list[bytes]]) -> None:
        sender, (_, *frames) = message
        if self._guard is not None:
            self._guard.credit(sender, frames)
        if not self._on_message(self._rank_of(sender), frames, sender_of(sender)):
            self._pump.pause()

    def _rank_of(self, sender: zmq.Frame) -> bytes:
        """Return the identity of an engine as it is without keys; one that is no engine's if its keys are another's.

        The same where they are void by now: a connection outlives the keys that it was made with.
        """
        name = sender.bytes
        if self._protection is None:
            return name
        user = user_of(sender)
        rank = self._protection.ranks.get(user)
        if rank is None or name != self._protection.name_of(user):
            return name
        self._names[identity(rank)] = name
        return identity(rank)

    def answer(self, frames: list[bytes]) -> None:
        """Answer an engine's first message; the first frame is whom to."""
        self._router.send_multipart([self._names.get(frames[0], frames[0]), *frames[1:]], zmq.NOBLOCK)
        if self._doorkeeper is not None:
            self._doorkeeper.heard()

    def close(self) -> None:
        """Read no more, and close the socket unless it was given. Idempotent."""
        self._pump.pause()
        self._release()

    def _release(self) -> None:
        if self._guard is not None:
            self._guard.close()
        if self._doorkeeper is not None:
            self._doorkeeper.close()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        if self._file is not None:
            self._file.remove()
        if self._sockets is not None:
            self._sockets.close()
            self._sockets = None
