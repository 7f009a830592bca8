"""The front end's socket of the handshake."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

import zmq

from aioshm.engine.protocol.addresses import identity
from aioshm.engine.security.binding import Protection, over_tcp, warn_of_strangers
from aioshm.engine.security.bound_sockets import BoundSockets, sender_of, user_of, with_sender
from aioshm.engine.security.keys import EngineKeys
from aioshm.zeromq.pump import Pump
from aioshm.zeromq.sockets import Socket

MAX_FRAME_BYTES = 16 << 20
"""ZeroMQ closes the connection of a peer that sends more, without a log line; smaller messages are refused by name."""

_HWM = 1000


class HandshakeRouter:
    """A ROUTER bound to ``place``, or a given one, which stays open; ``on_message`` returns whether to read more."""

    def __init__(
        self,
        place: str | Socket,
        on_message: Callable[[bytes, list[bytes], str], bool],
        ranks: Iterable[int] = (),
        *,
        keys: EngineKeys | None = None,
        secure: bool = True,
    ) -> None:
        self._on_message = on_message
        self._descriptor: int | None = None
        if isinstance(place, str):
            self.address: str = place
            self.protection: Protection = Protection.of_front_end([place], ranks, keys=keys, secure=secure, more=True)
        else:
            if place.getsockopt(zmq.TYPE) != zmq.ROUTER:
                raise ValueError(f"the handshake needs a ROUTER socket, not {place!r}")
            self.address = bytes(place.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()
            self.protection = Protection(None, None, (), secure=False)
            if place.getsockopt(zmq.MECHANISM) == zmq.NULL:
                warn_of_strangers([self.address])
        self._bound = BoundSockets(self.protection)
        try:
            if isinstance(place, str):
                self._router = self._bound.open(zmq.ROUTER, place, hwm=_HWM, max_bytes=MAX_FRAME_BYTES)
                if over_tcp([place]):
                    self._bound.watch(self._router)
                self.address = self._bound.bind(self._router, place)
            else:
                self._router = zmq.Socket.shadow(place)
                # The loop has one watcher per descriptor, and the owner of the socket may be one.
                self._descriptor = os.dup(int(self._router.getsockopt(zmq.FD)))
            # Sending INIT to a disconnected engine is an error.
            self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
            # A second engine with the same rank must reach the handshake, which refuses the engine. Without handover
            # the socket would ignore the second engine.
            self._router.setsockopt(zmq.ROUTER_HANDOVER, 1)
            self.pump: Pump = self._bound.read(self._router, self._take, self._receive, self._descriptor)
        except BaseException:
            self.close()
            raise

    def _receive(self) -> tuple[zmq.Frame, list[bytes]]:
        if self.pump.paused:  # further messages are for the owner of the socket
            raise zmq.Again
        return with_sender(self._router)

    def _take(self, message: tuple[zmq.Frame, list[bytes]]) -> None:
        sender, (_, *frames) = message
        if not self._on_message(self._identity_of(sender), frames, sender_of(sender)):
            self.pump.pause()

    def _identity_of(self, sender: zmq.Frame) -> bytes:
        """Return the identity that the engine has without keys; an invalid one if its keys are void or foreign.

        A connection outlives the keys of its handshake.
        """
        name = sender.bytes
        if self.protection.encrypts(self.address):
            user = user_of(sender)
            rank = self.protection.rank_of(user)
            if rank is not None and name == self.protection.name_of(user):
                return identity(rank)
        return name

    def answer(self, frames: list[bytes]) -> None:
        """Answer an engine; the first frame is its identity. `zmq.ZMQError`: the engine is not connected."""
        name = self.protection.name(int.from_bytes(frames[0], "little"), self.address)
        self._router.send_multipart([name, *frames[1:]], zmq.NOBLOCK)

    def close(self) -> None:
        """Stop reading, and close the socket unless it was given. Idempotent."""
        self._bound.close()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
