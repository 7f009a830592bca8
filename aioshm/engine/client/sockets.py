"""The front end's sockets to its engines, and to the coordinator's publications."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import zmq

from aioshm.engine.protocol.messages import SUBSCRIBE_TO_ALL
from aioshm.engine.protocol.payloads import Frame, check_stranger
from aioshm.engine.security.binding import Protection, over_tcp
from aioshm.engine.security.bound_sockets import (
    MAX_STRANGE_BYTES,
    BoundSockets,
    sender_of,
    user_of,
    with_property,
    with_sender,
    with_views,
)
from aioshm.errors import CodecError
from aioshm.process.background import give_back
from aioshm.zeromq.endpoint import CurveKeys, attach, open_socket
from aioshm.zeromq.pump import Pump, whole
from aioshm.zeromq.sockets import Socket

if TYPE_CHECKING:
    from aioshm.engine.client.link import EngineLink

LINGER_MS = 500
"""How long the last aborts may take to leave; it takes no time unless an engine is stuck."""

_UNBOUNDED = 0  # what is in flight is bounded by the requests that are open, not by ZeroMQ
_OF_STRANGERS = 1000  # where strangers can connect


class ClientSockets:
    """ROUTER for requests, PULL for outputs, XSUB for counts; with ``retry`` engines with unknown keys may retry."""

    def __init__(
        self,
        input_address: str,
        output_address: str,
        link: EngineLink,
        protection: Protection,
        *,
        max_bytes: int,
        silence_s: float,
        retry: bool = False,
    ) -> None:
        self._link = link
        self._protection = protection
        self._closed = False
        self._coordinator: Socket | None = None
        self.register_by_keys: bool = protection.encrypts(input_address)
        self._send_by_keys = protection.encrypts(output_address)
        self._open_to_all = over_tcp([output_address]) and not self._send_by_keys
        self._bound = BoundSockets(protection, retry=retry)
        try:
            strange = over_tcp([input_address]) and not self.register_by_keys
            self._router = self._bound.open(
                zmq.ROUTER,
                input_address,
                hwm=_UNBOUNDED,
                max_bytes=MAX_STRANGE_BYTES if strange else max_bytes,
                silence_s=silence_s,
            )
            self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # what reaches nobody shall be an error
            if not strange:
                # An engine that had dropped this front end comes back, maybe before its old connection has ended. But
                # a stranger takes nobody's place.
                self._router.setsockopt(zmq.ROUTER_HANDOVER, 1)
            # The link may be a weak reference.
            self._connections = self._bound.watch(self._router, lambda number: link.disconnected(number))
            self.input_address: str = self._bound.bind(self._router, input_address)
            hwm = _OF_STRANGERS if self._open_to_all else _UNBOUNDED
            self._pull = self._bound.open(zmq.PULL, output_address, hwm=hwm, max_bytes=max_bytes)
            self.output_address: str = self._bound.bind(self._pull, output_address)
            self.registrations: Pump = self._bound.read(
                self._router, self._registered, partial(with_sender, self._router)
            )
            self.outputs: Pump = self._bound.read(self._pull, self._output, self._receive)
        except BaseException:
            self._bound.close()
            raise

    def send(self, identity: bytes, kind: bytes, frames: list[Frame]) -> None:
        """Send a message to an engine; raises `zmq.ZMQError` if the engine is not connected."""
        self._router.send_multipart([identity, kind, *frames], zmq.NOBLOCK)

    def subscribe(self, address: str, curve: CurveKeys | None) -> None:
        """Subscribe to the coordinator's publications, with these keys."""
        sockets = self._bound.sockets
        sub = sockets.add(open_socket(sockets.context, zmq.XSUB, address, bind=False, hwm=_UNBOUNDED, curve=curve))
        attach(sub, address, bind=False)
        sub.send(SUBSCRIBE_TO_ALL, zmq.NOBLOCK)
        self._coordinator = sub
        self._counts = self._bound.read(sub, lambda frames: self._link.counts(frames[0]), whole(sub))

    def tell_coordinator(self, payload: bytes) -> None:
        """Send a message to the coordinator, if there is one."""
        if self._coordinator is not None:
            self._coordinator.send(payload, zmq.NOBLOCK)
            self._counts.run_soon()  # sending may clear the sign that there is something to read

    async def aclose(self) -> None:
        """Close the sockets once all messages have left. Idempotent."""
        if not self._closed:
            self._closed = True
            self._bound.stop()
            await give_back(lambda: self._bound.sockets.close(LINGER_MS))

    def close(self) -> None:
        """Close the sockets immediately, and drop unsent messages. Idempotent."""
        self._closed = True
        self._bound.close()

    # Receiving

    def _receive(self) -> tuple[str, list[Any]]:
        if self._send_by_keys or self._open_to_all:
            return with_property(self._pull, "User-Id")
        return "", with_views(self._pull)

    def _output(self, message: tuple[str, list[Frame]]) -> None:
        user, frames = message
        self._link.output(frames, user)

    def _registered(self, message: tuple[zmq.Frame, list[bytes]]) -> None:
        sender, (name, *frames) = message
        connection = self._connections.of(sender)
        if connection is None:
            return
        user = user_of(sender) if self.register_by_keys else ""
        self._link.registered(name, frames, connection, sender_of(sender), user)
        if not self._connections.is_open(connection):  # it ended before this was read, and its end was reported already
            self._link.disconnected(connection)

    def rank_of(self, frames: list[Frame], user: str) -> int | None:
        """Return the rank of an output's engine, if keys are in use; raises `CodecError` if it is refused."""
        if self._open_to_all:
            check_stranger(frames)
        if not self._send_by_keys:
            return None
        sender = self._protection.rank_of(user)
        if sender is None:
            raise CodecError(f"the keys of engine {user.partition('.')[0]} are void: that incarnation is dead")
        return sender
