"""An engine's sockets to its front ends and to the coordinator."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from functools import partial

import zmq

from aioshm.engine.protocol.addresses import EngineZmqAddresses, identity
from aioshm.engine.protocol.messages import COORDINATOR_READY, ENGINE_CORE_DEAD, SUBSCRIBE_TO_ALL
from aioshm.engine.protocol.payloads import MAX_FRAMES, Frame
from aioshm.engine.security.keys import EngineCredentials
from aioshm.engine.security.reading import MessageReader, plain
from aioshm.process.background import give_back
from aioshm.zeromq.endpoint import attach, open_socket
from aioshm.zeromq.monitor import Monitor
from aioshm.zeromq.pump import Pump
from aioshm.zeromq.sockets import Socket, Sockets, watched_by_heartbeats

LINGER_MS = 2000
"""How long the last messages may take to leave; it takes no time unless a front end is gone or stuck."""

COORDINATOR = -1
"""What stands for the coordinator where messages have a client's index."""

logger: logging.Logger = logging.getLogger("aioshm.engine")

_UNBOUNDED = 0  # what is in flight is bounded by the requests that are open, not by ZeroMQ


class CoreSockets:
    """For each client a DEALER for what it sends and a PUSH for what it gets; for the coordinator an XSUB and a PUSH.

    Args:
        index: The engine's rank.
        addresses: Where to connect.
        on_message: Gets the index of the client and the frames of what has come, on the loop; no frames when the client
            is gone.
        max_bytes: Of a frame: a peer that sends a larger one is disconnected.
        silence_s: Seconds after which a connection over TCP that says nothing is given up.
        credentials: The engine's keys for connections over TCP; None: these are not encrypted.

    Attributes:
        coordinated: Whether there is a coordinator.
        dropped: How many messages there were for clients that were gone, by client.

    Raises:
        OSError: An address is malformed.
        ValueError: There are not as many inputs as outputs.
    """

    def __init__(
        self,
        index: int,
        addresses: EngineZmqAddresses,
        on_message: Callable[[int, list[Frame]], None],
        *,
        max_bytes: int,
        silence_s: float,
        credentials: EngineCredentials | None = None,
    ) -> None:
        if len(addresses.inputs) != len(addresses.outputs):
            raise ValueError(f"addresses must have as many inputs as outputs, and have {addresses}")
        self._loop = asyncio.get_running_loop()
        self._on_message = on_message
        self._max_bytes, self._silence_ms = max_bytes, int(silence_s * 1000)
        self._sockets = Sockets()
        self._pumps: list[Pump] = []  # of the inputs first, by client
        self._closed = False
        self._identity = identity(index)
        self._credentials = credentials
        self._addresses = addresses
        self._gone: set[int] = set()
        self.dropped: Counter[int] = Counter()
        self._registration = b""
        self._monitors: list[Monitor] = []
        self._ready = self._loop.create_future()
        self.coordinated: bool = addresses.coordinator_input is not None and addresses.coordinator_output is not None
        try:
            self._inputs = [self._open(zmq.DEALER, address) for address in addresses.inputs]
            self._outputs = [self._open(zmq.PUSH, address) for address in addresses.outputs]
            if self.coordinated:
                self._subscription = self._open(zmq.XSUB, addresses.coordinator_input or "", to_coordinator=True)
                self._reports = self._open(zmq.PUSH, addresses.coordinator_output or "", to_coordinator=True)
        except BaseException:
            self._close(0)
            raise

    async def register(self, payload: bytes) -> None:
        """Tell every front end that the engine is there, and read what they send from now on.

        One that comes back, or whose successor does, is told again. Returns when the coordinator, if there is one, has
        heard of all engines: before that, waves would start without some of them.

        Args:
            payload: What front ends are told.
        """
        self._registration = payload
        if self.coordinated:
            self._subscription.send(SUBSCRIBE_TO_ALL, zmq.NOBLOCK)
        for client, socket in enumerate(self._inputs):
            socket.send(payload, zmq.NOBLOCK)
            self._pump(socket, client)
        for client, monitor in enumerate(self._monitors):
            self._pumps.append(Pump(self._loop, monitor.pair, partial(self._read_monitor, client)))
        if self.coordinated:
            self._pump(self._subscription, COORDINATOR)
            await self._ready

    def send(self, client: int, frames: list[Frame]) -> None:
        """Send something to a client, or to the coordinator; to a client that is gone nothing is sent."""
        if client in self._gone:
            self.dropped[client] += 1
            return
        socket = self._reports if client == COORDINATOR else self._outputs[client]
        if len(frames) == 1:
            socket.send(frames[0], zmq.NOBLOCK)
        else:
            socket.send_multipart(frames, zmq.NOBLOCK)

    def send_dead(self) -> None:
        """Tell every client that this engine is no more."""
        for client in range(len(self._outputs)):
            self.send(client, [ENGINE_CORE_DEAD])

    async def aclose(self) -> None:
        """Close them once what was sent has left. Idempotent; goes on in a thread when it is cancelled."""
        if not self._closed:
            self._closed = True
            for pump in self._pumps:
                pump.pause()
            if not self._ready.done():
                self._ready.cancel()
            await give_back(lambda: self._close(LINGER_MS))

    def _close(self, linger_ms: int) -> None:
        for monitor in self._monitors:
            monitor.close()
        self._sockets.close(linger_ms)

    def _open(self, kind: int, address: str, *, to_coordinator: bool = False) -> Socket:
        mine = self._credentials if address.startswith("tcp://") else None
        curve = None
        if mine is not None:
            curve = mine.to_coordinator() if to_coordinator else mine.to_front_end()
        socket = self._sockets.add(
            open_socket(self._sockets.context, kind, address, bind=False, hwm=_UNBOUNDED, curve=curve)
        )
        socket.setsockopt(zmq.MAXMSGSIZE, self._max_bytes)
        if kind == zmq.DEALER:
            socket.setsockopt(zmq.ROUTING_ID, self._identity if mine is None else mine.name)
            self._monitors.append(Monitor(socket))
            self._sockets.add(self._monitors[-1].pair)
            if address.startswith("tcp://"):
                watched_by_heartbeats(socket, self._silence_ms)
        attach(socket, address, bind=False)
        return socket

    def _pump(self, socket: Socket, client: int) -> None:
        read = MessageReader(socket, 1 + MAX_FRAMES, plain, views=True).read
        self._pumps.append(Pump.of_messages(self._loop, socket, partial(self._take, client), read))

    def _read_monitor(self, client: int) -> None:
        for kind, _ in self._monitors[client].events():
            if kind == zmq.EVENT_DISCONNECTED and client not in self._gone:
                self._gone.add(client)
                self._outputs[client].close(linger=0)  # with what it has not got
                self._on_message(client, [])
            elif kind == zmq.EVENT_HANDSHAKE_SUCCEEDED and client in self._gone:
                self._gone.discard(client)
                logger.info("client %d is back; %d messages found it gone", client, self.dropped[client])
                self._outputs[client] = self._open(zmq.PUSH, self._addresses.outputs[client])
                self._inputs[client].send(self._registration, zmq.NOBLOCK)
                self._pumps[client].run_soon()  # sending may swallow the sign that there is something to read

    def _take(self, client: int, message: tuple[str, list[Frame]]) -> None:
        frames = message[1]
        if client == COORDINATOR and frames == [COORDINATOR_READY]:  # again whenever an engine has come
            if not self._ready.done():
                self._ready.set_result(None)
        else:
            self._on_message(client, frames)
