"""The front end's sockets to its engines, and to the coordinator's counts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

import zmq

from aioshm.engine.protocol.messages import SUBSCRIBE_TO_ALL
from aioshm.engine.protocol.payloads import MAX_FRAMES, MAX_STRANGE_FRAMES, Frame
from aioshm.engine.security.binding import Protection, over_tcp
from aioshm.engine.security.connections import Connections
from aioshm.engine.security.doorkeeper import Doorkeeper
from aioshm.engine.security.guard import STRANGE_BYTES, Guard, heartbeat_rate
from aioshm.engine.security.reading import First, MessageReader, plain, sender_of, user_of, with_property, with_sender
from aioshm.process.background import give_back
from aioshm.zeromq.curve import CurveKeys, limit_frames
from aioshm.zeromq.endpoint import BoundFile, attach, open_socket
from aioshm.zeromq.pump import Pump, T, whole
from aioshm.zeromq.sockets import Socket, Sockets

LINGER_MS = 500
"""How long the last aborts may take to leave; it takes no time unless an engine is stuck."""

_UNBOUNDED = 0  # what is in flight is bounded by the requests that are open, not by ZeroMQ
_REGISTRATION_FRAMES = 2  # that are kept: it should be one
_OF_STRANGERS = 1000  # where strangers can connect


class Listener(Protocol):
    """Who is told what comes; on the loop."""

    def registered(self, identity: bytes, frames: list[bytes], connection: int, sender: str, user: str) -> None:
        """An engine has connected."""

    def disconnected(self, connection: int) -> None:
        """A connection has ended."""

    def output(self, frames: list[Frame], origin: str) -> None:
        """An engine has sent something."""

    def counts(self, payload: bytes) -> None:
        """The coordinator has published something."""


class ClientSockets:
    """ROUTER for what engines are sent, PULL for what they send, XSUB for counts."""

    def __init__(
        self,
        input_address: str,
        output_address: str,
        listener: Listener,
        protection: Protection,
        *,
        max_bytes: int,
        silence_s: float,
        patience_s: float = 0.0,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._sockets = Sockets()
        self._pumps: list[Pump] = []
        self._files: list[BoundFile] = []
        self._closed = False
        self._coordinator: Socket | None = None
        self._protection = protection
        self._doorkeeper: Doorkeeper | None = None
        open_to_all = over_tcp([output_address]) and not protection.encrypts(output_address)
        first: First[str] = plain
        if over_tcp([output_address]):
            first = with_property("Peer-Address" if open_to_all else "User-Id")
        self._guard: Guard | None = None  # of the PULL, over TCP
        self._connections: Connections | None = None
        try:
            self._doorkeeper = protection.doorkeeper(self._sockets, patience_s=patience_s)
            self._router = self._open(zmq.ROUTER, input_address, max_bytes, silence_s)
            self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # what reaches nobody shall be an error
            if protection.encrypts(input_address) or not over_tcp([input_address]):
                # An engine that had dropped this front end comes back, maybe before its old connection has ended. But
                # a stranger takes nobody's place.
                self._router.setsockopt(zmq.ROUTER_HANDOVER, 1)
            self._connections = Connections(
                self._router,
                self._sockets,
                input_address,
                protection,
                lambda connection: listener.disconnected(connection),  # it may be a weak reference
                heartbeat_rate(silence_s),
            )
            self.input_address: str = self._bind(self._router, input_address)  # where the ROUTER is bound
            self._pull = self._open(zmq.PULL, output_address, max_bytes)
            if protection.encrypts(output_address):  # of others' outputs nobody knows how much they may be
                self._guard = Guard(self._pull, self._sockets, encrypted=True)
            self.output_address: str = self._bind(self._pull, output_address)  # where the PULL is bound
            registrations = MessageReader(self._router, 1 + _REGISTRATION_FRAMES, with_sender)
            self._registrations = self._pump(self._router, self._registered, registrations.read)
            # One frame more than may be, which is refused.
            kept = 1 + (MAX_STRANGE_FRAMES if open_to_all else MAX_FRAMES)
            self._outputs = self._pump(
                self._pull, self._has_output, MessageReader(self._pull, kept, first, views=True).read
            )
        except BaseException:
            self._release()
            self._sockets.close()
            raise

    def send(self, identity: bytes, kind: bytes, frames: list[Frame]) -> None:
        """Send a message to an engine."""
        self._router.send_multipart([identity, kind, *frames], zmq.NOBLOCK)

    def subscribe(self, address: str, curve: CurveKeys | None) -> None:
        """Receive what the coordinator publishes there, with these keys."""
        sub = self._sockets.add(
            open_socket(self._sockets.context, zmq.XSUB, address, bind=False, hwm=_UNBOUNDED, curve=curve)
        )
        attach(sub, address, bind=False)
        sub.send(SUBSCRIBE_TO_ALL, zmq.NOBLOCK)
        self._coordinator = sub
        self._counts = self._pump(sub, lambda frames: self._listener.counts(frames[0]), whole(sub))

    def tell_coordinator(self, payload: bytes) -> None:
        """Send the coordinator something, if there is one."""
        if self._coordinator is not None:
            self._coordinator.send(payload, zmq.NOBLOCK)
            self._counts.run_soon()  # sending may swallow the sign that there is something to read

    def reconsider(self) -> None:
        """Let in who was unknown: there are more engines, or newer ones."""
        if self._doorkeeper is not None:
            self._doorkeeper.reconsider()

    def look_for_registrations(self) -> None:
        """Look soon whether an engine has registered: sending may have swallowed the sign of it."""
        self._registrations.run_soon()

    def read_outputs(self) -> None:
        """Read what engines have sent, some of it at a time."""
        self._outputs.run()

    async def aclose(self) -> None:
        """Close them once what was sent has left. Idempotent."""
        if not self._closed:
            self._release()
            await give_back(lambda: self._sockets.close(LINGER_MS))

    def close(self) -> None:
        """Close them at once, and forget what was sent. Idempotent."""
        self._release()
        self._sockets.close()

    def _release(self) -> None:
        self._closed = True
        for pump in self._pumps:
            pump.pause()
        for file in self._files:
            file.remove()
        if self._connections is not None:
            self._connections.close()
        if self._guard is not None:
            self._guard.close()
        if self._doorkeeper is not None:
            self._doorkeeper.close()

    def _open(self, kind: int, address: str, max_bytes: int, silence_s: float | None = None) -> Socket:
        open_to_all = over_tcp([address]) and not self._protection.encrypts(address)
        hwm = _OF_STRANGERS if kind == zmq.PULL and open_to_all else _UNBOUNDED
        socket = self._protection.open(self._sockets, kind, address, hwm=hwm, silence_s=silence_s)
        limit_frames(socket, STRANGE_BYTES // 2 if kind == zmq.ROUTER and open_to_all else max_bytes)
        return socket

    def _bind(self, socket: Socket, address: str) -> str:
        actual = attach(socket, address, bind=True)
        self._files.append(BoundFile(actual))
        return actual

    def _pump(self, socket: Socket, handle: Callable[[T], None], receive: Callable[[], T | None]) -> Pump:
        self._pumps.append(Pump.of_messages(self._loop, socket, handle, receive))
        return self._pumps[-1]

    def _has_output(self, message: tuple[str, list[Frame]]) -> None:
        origin, frames = message
        self._listener.output(frames, origin)

    def _registered(self, message: tuple[zmq.Frame, list[bytes]]) -> None:
        sender, (name, *frames) = message
        assert self._connections is not None
        connection = self._connections.of(sender, frames)
        if connection is None:
            return
        user = user_of(sender) if self._protection.encrypts(self.input_address) else ""
        self._listener.registered(name, frames, connection, sender_of(sender), user)
        if not self._connections.is_open(connection):  # it ended before this was read: nobody tells of that again
            self._listener.disconnected(connection)
