"""An engine's sockets to its front ends and to the coordinator."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from functools import partial

import zmq

from aioshm.engine.protocol.addresses import EngineZmqAddresses, identity
from aioshm.engine.protocol.messages import COORDINATOR_READY, ENGINE_CORE_DEAD, SUBSCRIBE_TO_ALL
from aioshm.engine.protocol.payloads import Frame
from aioshm.engine.security.binding import over_tcp
from aioshm.engine.security.bound_sockets import with_views
from aioshm.engine.security.keys import EngineCredentials
from aioshm.process.background import give_back
from aioshm.zeromq.curve import limit_frames
from aioshm.zeromq.endpoint import attach, open_socket
from aioshm.zeromq.monitor import Monitor
from aioshm.zeromq.pump import Pump
from aioshm.zeromq.sockets import Socket, Sockets

LINGER_MS = 2000
"""How long the last messages may take to leave; it takes no time unless a front end is gone or stuck."""

COORDINATOR = -1
"""What stands for the coordinator where messages have a client's index."""

logger: logging.Logger = logging.getLogger("aioshm.engine")

MAX_PENDING_BYTES = 128 << 20
"""Bytes of outputs that may wait for one front end of this host."""

_UNBOUNDED = 0
_LOCAL_HWM = 8  # messages of any size that ZeroMQ holds for a front end of this host; the rest is counted in bytes


class _Output:
    """The PUSH socket to one front end, and the messages that ZeroMQ has no room for."""

    def __init__(self, loop: asyncio.AbstractEventLoop, socket: Socket) -> None:
        self._loop = loop
        self.socket = socket
        self.pending: deque[tuple[int, list[bytes]]] = deque()  # the size that counts, and the frames, of each message
        self.pending_bytes = 0
        self._pump: Pump | None = None

    def send(self, frames: list[Frame], counts: bool) -> None:
        """Send a message, or keep a copy until ZeroMQ has room."""
        if not self.pending:
            try:
                if len(frames) == 1:
                    self.socket.send(frames[0], zmq.NOBLOCK)
                else:
                    self.socket.send_multipart(frames, zmq.NOBLOCK)
                return
            except zmq.Again:
                pass
        copies = [bytes(frame) for frame in frames]  # the engine may change its arrays in the next step
        size = sum(map(len, copies)) if counts else 0
        self.pending.append((size, copies))
        self.pending_bytes += size
        if self._pump is None:
            self._pump = Pump(self._loop, self.socket, self.send_pending)
        self._pump.resume()

    def send_pending(self) -> None:
        """Send as many of the kept messages as ZeroMQ has room for."""
        while self.pending and int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLOUT:
            size, frames = self.pending.popleft()
            self.pending_bytes -= size
            self.socket.send_multipart(frames, zmq.NOBLOCK)
        if not self.pending:
            self.pause()

    def pause(self) -> None:
        """Stop watching the socket."""
        if self._pump is not None:
            self._pump.pause()

    def close(self) -> None:
        """Forget every message, and close the socket."""
        self.pause()
        self.pending.clear()
        self.socket.close(linger=0)


class CoreSockets:
    """A DEALER and a PUSH for each client; an XSUB and a PUSH for the coordinator."""

    def __init__(
        self,
        index: int,
        addresses: EngineZmqAddresses,
        on_message: Callable[[int, list[Frame]], None],
        *,
        max_bytes: int,
        silence_s: float,
        max_pending_bytes: int = MAX_PENDING_BYTES,
        credentials: EngineCredentials | None = None,
    ) -> None:
        if len(addresses.inputs) != len(addresses.outputs):
            raise ValueError(f"addresses must have as many inputs as outputs, and have {addresses}")
        self._loop = asyncio.get_running_loop()
        self._on_message = on_message
        self._max_bytes, self._silence_s = max_bytes, silence_s
        self._max_pending_bytes = max_pending_bytes
        self._sockets = Sockets()
        self._pumps: list[Pump] = []  # of the inputs first, by client
        self._closed = False
        self._index = index
        self._identity = identity(index)
        self._credentials = credentials
        self._addresses = addresses
        self._gone: set[int] = set()
        self.dropped: Counter[int] = Counter()
        self._registration = b""
        self._monitors: list[Monitor] = []
        self._coordinator_ready = self._loop.create_future()
        self.coordinated: bool = addresses.coordinator_input is not None and addresses.coordinator_output is not None
        try:
            self._inputs = [self._open(zmq.DEALER, address) for address in addresses.inputs]
            self._outputs = [self._open_output(client) for client in range(len(addresses.outputs))]
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
            await self._coordinator_ready

    def send(self, client: int, frames: list[Frame], *, counts: bool = True) -> None:
        """Send something to a client, or to the coordinator; to a client that is gone nothing is sent."""
        if client in self._gone:
            self.dropped[client] += 1
        elif client == COORDINATOR:
            self._reports.send_multipart(frames, zmq.NOBLOCK)
        else:
            output = self._outputs[client]
            output.send(frames, counts)
            if output.pending_bytes > self._max_pending_bytes and len(output.pending) > 1:
                self._drop(client)

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
            for output in self._outputs:
                output.pause()
            if not self._coordinator_ready.done():
                self._coordinator_ready.cancel()
            await give_back(self._flush)

    def _flush(self) -> None:
        """Send what is left, within `LINGER_MS`, and close the sockets."""
        deadline = time.monotonic() + LINGER_MS / 1000
        poller = zmq.Poller()
        while waiting := [output for output in self._outputs if output.pending]:
            for output in self._outputs:
                poller.register(output.socket, zmq.POLLOUT if output in waiting else 0)
            if not poller.poll(max(0, int((deadline - time.monotonic()) * 1000))):
                break
            for output in waiting:
                output.send_pending()
        self._close(max(0, int((deadline - time.monotonic()) * 1000)))

    def _close(self, linger_ms: int) -> None:
        for monitor in self._monitors:
            monitor.close()
        self._sockets.close(linger_ms)

    def _open(self, kind: int, address: str, *, to_coordinator: bool = False) -> Socket:
        mine = self._credentials if address.startswith("tcp://") else None
        curve = None
        if mine is not None:
            curve = mine.to_coordinator() if to_coordinator else mine.to_front_end()
        # Over TCP heartbeats find out that a front end is stopped, and a slow network is no reason to drop one.
        hwm = _LOCAL_HWM if kind == zmq.PUSH and not to_coordinator and not over_tcp([address]) else _UNBOUNDED
        socket = self._sockets.add(
            open_socket(
                self._sockets.context,
                kind,
                address,
                bind=False,
                hwm=hwm,
                curve=curve,
                silence_s=self._silence_s,
                heartbeats=kind == zmq.DEALER,  # the end of its connection is the end of the client
            )
        )
        limit_frames(socket, self._max_bytes)
        if kind == zmq.DEALER:
            socket.setsockopt(zmq.ROUTING_ID, self._identity if mine is None else mine.name)
            self._monitors.append(Monitor(socket))
            self._sockets.add(self._monitors[-1].pair)
        attach(socket, address, bind=False)
        return socket

    def _open_output(self, client: int) -> _Output:
        return _Output(self._loop, self._open(zmq.PUSH, self._addresses.outputs[client]))

    def _pump(self, socket: Socket, client: int) -> None:
        receive = partial(with_views, socket)
        self._pumps.append(Pump.of_messages(self._loop, socket, partial(self._take, client), receive))

    def _read_monitor(self, client: int) -> None:
        for kind, *_ in self._monitors[client].events():
            if kind == zmq.EVENT_DISCONNECTED and client not in self._gone:
                self._lose(client)
            elif kind == zmq.EVENT_HANDSHAKE_SUCCEEDED and client in self._gone:
                self._gone.discard(client)
                logger.info("client %d is back; %d messages found it gone", client, self.dropped[client])
                self._outputs[client] = self._open_output(client)
                self._inputs[client].send(self._registration, zmq.NOBLOCK)
                self._pumps[client].run_soon()  # sending may swallow the sign that there is something to read

    def _lose(self, client: int) -> None:
        """Drop the pending outputs of a front end, and abort its requests."""
        self._gone.add(client)
        self._outputs[client].close()
        self._on_message(client, [])

    def _drop(self, client: int) -> None:
        """Disconnect a client that takes nothing; it learns of that when it runs again, and can come back."""
        output = self._outputs[client]
        logger.warning(
            "engine %d dropped front end %d (%s), which has stopped reading: %d bytes of outputs wait for it, and"
            " max_pending_bytes is %d; its requests are aborted",
            self._index,
            client,
            self._addresses.outputs[client],
            output.pending_bytes,
            self._max_pending_bytes,
        )
        self._lose(client)
        address = self._addresses.inputs[client]
        self._inputs[client].disconnect(address)
        attach(self._inputs[client], address, bind=False)

    def _take(self, client: int, frames: list[Frame]) -> None:
        if client == COORDINATOR and frames == [COORDINATOR_READY]:  # again whenever an engine has come
            if not self._coordinator_ready.done():
                self._coordinator_ready.set_result(None)
        elif client not in self._gone:  # sent before the connection ended, and read after that
            self._on_message(client, frames)
