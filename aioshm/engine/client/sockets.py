"""The sockets of a client: to its engines, to the coordinator, and to the process that publishes the engines."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import zmq

from aioshm.engine.protocol.messages import (
    MAX_MEMBERSHIP_BYTES,
    SUBSCRIBE_TO_ALL,
    Death,
    Membership,
    PauseOrder,
    Progress,
    decode_membership,
    encode,
    is_heartbeat,
)
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
from aioshm.errors import CodecError, EngineDead
from aioshm.logs import LogLimiter
from aioshm.process.background import give_back
from aioshm.zeromq.endpoint import CurveKeys, attach, limit_frames, open_socket
from aioshm.zeromq.monitor import Monitor
from aioshm.zeromq.pump import Pump, whole
from aioshm.zeromq.sockets import Socket, Sockets, send_message

if TYPE_CHECKING:
    from aioshm.config import Options
    from aioshm.engine.client.link import EngineLink

LINGER_MS = 500
"""How long the last aborts may take to leave; no time at all unless an engine is stuck."""

_LOG_INTERVAL_S = 10.0
_UNBOUNDED = 0  # open requests bound what is in flight, not ZeroMQ
_HWM_OF_STRANGERS = 1000

logger: logging.Logger = logging.getLogger("aioshm.engine")


class Registration(NamedTuple):
    """An engine's first message."""

    name: bytes  # the ZeroMQ identity
    frames: list[bytes]
    connection: int
    sender: str  # describes the connection
    user: str  # names the engine's keys; empty without keys


class ClientSockets:
    """ROUTER for requests, PULL for outputs, XSUB for counts; with ``retry`` engines with unknown keys may retry."""

    def __init__(
        self,
        input_address: str,
        output_address: str,
        link: EngineLink,
        protection: Protection,
        options: Options,
        *,
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
        max_bytes = options.max_message_bytes
        registration_bytes = max_bytes
        strangers_register = over_tcp([input_address]) and not self.register_by_keys
        if strangers_register:
            registration_bytes = MAX_STRANGE_BYTES
        try:
            self._router = self._bound.open(
                zmq.ROUTER,
                input_address,
                hwm=_UNBOUNDED,
                max_bytes=registration_bytes,
                silence_s=options.remote_timeout,
            )
            self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a message to an absent engine is an error
            if not strangers_register:
                # An engine that had dropped this front end comes back, maybe before its old connection has ended. But
                # a stranger must not take an engine's identity.
                self._router.setsockopt(zmq.ROUTER_HANDOVER, 1)
            # A lambda, because a bound method would hold the link, which may be a weak reference.
            self._connections = self._bound.watch(self._router, lambda number: link.disconnected(number))
            self.input_address: str = self._bound.bind(self._router, input_address)
            hwm = _HWM_OF_STRANGERS if self._open_to_all else _UNBOUNDED
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
        send_message(self._router, [identity, kind, *frames])

    def subscribe(self, address: str, curve: CurveKeys | None) -> None:
        sockets = self._bound.sockets
        sub = sockets.add(open_socket(sockets.context, zmq.XSUB, address, bind=False, hwm=_UNBOUNDED, curve=curve))
        attach(sub, address, bind=False)
        sub.send(SUBSCRIBE_TO_ALL, zmq.NOBLOCK)
        self._coordinator = sub
        self._counts = self._bound.read(sub, lambda frames: self._link.counts(frames[0]), whole(sub))

    def send_to_coordinator(self, payload: bytes) -> None:
        """Send a message to the coordinator, if there is one."""
        if self._coordinator is not None:
            self._coordinator.send(payload, zmq.NOBLOCK)
            self._counts.run_soon()  # a send may clear the event of a waiting message

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
        if is_heartbeat(frames):
            self._link.heartbeat(connection, frames)
            return
        user = user_of(sender) if self.register_by_keys else ""
        self._link.registered(Registration(name, frames, connection, sender_of(sender), user))
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


class MembershipListener:
    """A DEALER to the launching process: receives the present engines, and reports how far this front end is."""

    def __init__(self, address: str, link: EngineLink, curve: CurveKeys | None) -> None:
        self._link = link
        self.version: int = 0  # the applied version; 0: none yet
        self.early: dict[bytes, Registration] = {}  # by name: of engines that are not in the membership yet
        self._unwell: set[int] = set()  # the ranks of engines that make no progress, by the membership
        self._progress = Progress()
        self._limiter = LogLimiter(_LOG_INTERVAL_S)
        self._sockets = Sockets()
        try:
            context = self._sockets.context
            self._dealer = self._sockets.add(
                open_socket(context, zmq.DEALER, address, bind=False, hwm=_UNBOUNDED, curve=curve, heartbeats=True)
            )
            limit_frames(self._dealer, MAX_MEMBERSHIP_BYTES)
            self._monitor = Monitor(self._dealer)
            self._sockets.add(self._monitor.pair)
            attach(self._dealer, address, bind=False)
            self._dealer.send(encode(self._progress), zmq.NOBLOCK)
            loop = asyncio.get_running_loop()
            self._pump = Pump.of_messages(loop, self._dealer, self._take, whole(self._dealer))
            self._connection = Pump(loop, self._monitor.pair, self._read_monitor)
        except BaseException:
            self._sockets.close()
            raise

    def forget_early(self, connection: int) -> None:
        """Drop early registrations of a connection that has ended."""
        for name in [name for name, each in self.early.items() if each.connection == connection]:
            del self.early[name]

    def report(self, missing: list[int], busy: list[int], order: PauseOrder, unpaused: list[int]) -> None:
        """Report a changed progress of this front end."""
        progress = Progress(self.version, missing, busy, order, unpaused)
        if progress != self._progress:
            self._progress = progress
            self._send()

    def close(self) -> None:
        self._pump.pause()
        self._connection.pause()
        self._monitor.close()
        self._sockets.close()

    def _send(self) -> None:
        self._dealer.send(encode(self._progress), zmq.NOBLOCK)
        self._pump.run_soon()  # a send may clear the event of a waiting message

    def _read_monitor(self) -> None:
        came_back, _ = self._monitor.read()
        if came_back:  # the peer has forgotten this front end
            self._send()

    def _take(self, frames: list[bytes]) -> None:
        try:
            membership = decode_membership(frames)
        except ValueError as error:
            self._limiter.warn(logger, "a membership of engines is ignored: %s", error)
            return
        if self._link.dead is None and not self._link.closed:
            self._apply(membership)

    def _apply(self, membership: Membership) -> None:
        link = self._link
        engines = link.engines
        link.pause.obey(membership.order)
        for rank in sorted(membership.engines.keys() - set(engines.ranks)):
            link.add(rank)
        while engines.ranks[-1] not in membership.engines and len(engines) > 1:
            link.remove_last()
        for rank, incarnation in membership.engines.items():
            link.void_keys(rank, incarnation)
        for engine in engines:
            engine.leaving = engine.rank in membership.leaving
        for rank, death in membership.deaths.items():
            link.liveness.explain(rank, death.incarnation, _error_of(death))
        for rank in self._unwell - membership.health.keys():
            engines.note_health(rank, "running", "")
        for rank, (health, where) in membership.health.items():
            engines.note_health(rank, health, where)
        self._unwell = set(membership.health)
        self.version = membership.version
        for name in self.early.keys() & {engine.name for engine in engines}:
            link.registered(self.early.pop(name))
        if membership.failure is not None:
            link.give_up(_error_of(membership.failure))
        link.settle()


def _error_of(death: Death) -> EngineDead:
    return EngineDead(death.text, engine=death.engine, pid=death.pid)
