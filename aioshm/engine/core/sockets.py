"""An engine's sockets: a DEALER and a PUSH to each front end, an XSUB and a PUSH to the coordinator."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Literal

import zmq

from aioshm.engine.protocol.addresses import EngineZmqAddresses, identity
from aioshm.engine.protocol.messages import (
    COORDINATOR_READY,
    ENGINE_CORE_DEAD,
    SUBSCRIBE_TO_ALL,
    Heartbeat,
    encode_heartbeat,
)
from aioshm.engine.protocol.payloads import Frame
from aioshm.engine.security.binding import over_tcp
from aioshm.engine.security.bound_sockets import with_views
from aioshm.engine.security.keys import AnyKeys, EngineCredentials, keys_for_engine
from aioshm.process import progress
from aioshm.process.background import give_back
from aioshm.zeromq.endpoint import CurveKeys, attach, limit_frames, open_socket
from aioshm.zeromq.monitor import Monitor
from aioshm.zeromq.pump import Pump
from aioshm.zeromq.sockets import Socket, Sockets

LINGER_MS = 2000
"""How long the last messages may take to leave; no time at all unless a front end is gone or stuck."""

RECONNECT_S = 1.0
"""Delay before a front end without keys gets a new connection: it ignores one that begins before the former ended."""

COORDINATOR = -1
"""The coordinator, in place of a client's index."""

MAX_PENDING_BYTES = 128 << 20
"""The limit of waiting outputs for each front end on this host."""

logger: logging.Logger = logging.getLogger("aioshm.engine")

_UNBOUNDED = 0
_HEARTBEATS_HWM = 1000  # of a front end of this host that is stopped
_LOCAL_HWM = 8  # messages of any size that ZeroMQ holds for a front end of this host; bytes bound the remainder


@dataclass(frozen=True, slots=True, kw_only=True)
class SocketSettings:
    """The rank, the keys and the limits of an engine's sockets."""

    index: int
    keys: AnyKeys | Literal[False] | None  # False: nothing is encrypted
    max_bytes: int
    silence_s: float
    max_pending_bytes: int


class FrontEnd:
    """The connection to one client: a DEALER for requests, a PUSH for outputs, and the outputs that have to wait.

    A client is gone when the connection of its DEALER ends. Over TCP also the PUSH has a monitor: ZeroMQ connects again
    after a lost connection, and has lost the messages on their way.
    """

    def __init__(self, sockets: CoreSockets, client: int, input_address: str, output_address: str) -> None:
        self.client: int = client
        self.pending: deque[tuple[int, list[bytes]]] = deque()  # outputs without room in ZeroMQ, each with its size
        self._has_keys = sockets.has_keys_at(input_address)
        # Whether the client is aioshm's: it gets generations and notices.
        self.is_aioshm: bool = self._has_keys
        self._takes_heartbeats = self._has_keys
        self._sockets = sockets
        self._input_address = input_address
        self._output_address = output_address
        self._pending_bytes = 0
        self._gone = False
        self._dropped = 0  # messages since the client is gone
        self._pumps: list[Pump] = []
        self._requests: Pump | None = None
        self._dealer = sockets.open(zmq.DEALER, input_address)
        self._monitor = sockets.monitor(self._dealer)
        attach(self._dealer, input_address, bind=False)
        self._open_output()

    def register(self, payload: bytes) -> None:
        """Send the registration, and read from now on."""
        loop = asyncio.get_running_loop()
        self._dealer.send(payload, zmq.NOBLOCK)
        self._requests = Pump.of_messages(loop, self._dealer, self._take, partial(with_views, self._dealer))
        self._pumps = [self._requests, Pump(loop, self._monitor.pair, self.look)]

    def pause(self) -> None:
        """Read no more, and send waiting outputs no more."""
        for pump in (*self._pumps, *self._output_pumps):
            pump.pause()

    # Outputs

    def send(self, frames: list[Frame], counts: bool) -> None:
        """Send a message, or keep a copy until ZeroMQ has room; drop a message to a client that is gone."""
        if self._gone:
            self._dropped += 1
            return
        if not self.pending:
            try:
                if len(frames) == 1:
                    self.output.send(frames[0], zmq.NOBLOCK)
                else:
                    self.output.send_multipart(frames, zmq.NOBLOCK)
                return
            except zmq.Again:
                pass
        copies = [bytes(frame) for frame in frames]  # the engine may change its arrays in the next step
        size = 0
        if counts:
            size = sum(map(len, copies))
        self.pending.append((size, copies))
        self._pending_bytes += size
        self._waiting.resume()
        if self._pending_bytes > self._sockets.settings.max_pending_bytes and len(self.pending) > 1:
            self._drop()

    def send_pending(self) -> None:
        """Send as many of the kept messages as ZeroMQ has room for."""
        while self.pending and int(self.output.getsockopt(zmq.EVENTS)) & zmq.POLLOUT:
            size, frames = self.pending.popleft()
            self._pending_bytes -= size
            self.output.send_multipart(frames, zmq.NOBLOCK)
        if not self.pending:
            self._waiting.pause()

    def _open_output(self) -> None:
        self.output = self._sockets.open(zmq.PUSH, self._output_address)
        self._output_monitor: Monitor | None = None
        if over_tcp([self._output_address]):
            self._output_monitor = self._sockets.monitor(self.output)
        attach(self.output, self._output_address, bind=False)
        loop = asyncio.get_running_loop()
        self._waiting = Pump(loop, self.output, self.send_pending)
        self._output_pumps = [self._waiting]
        if self._output_monitor is not None:
            watch = partial(self._read_output_monitor, self._output_monitor)
            self._output_pumps.append(Pump(loop, self._output_monitor.pair, watch))

    def _close_output(self) -> None:
        for pump in self._output_pumps:
            pump.pause()
        self.pending.clear()
        self._pending_bytes = 0
        if self._output_monitor is not None:
            self._output_monitor.close()
        self.output.close(linger=0)

    def _read_output_monitor(self, monitor: Monitor) -> None:
        monitor.read()
        if monitor.handshakes > monitor.connections:
            self._disconnect()

    # Heartbeats

    def accept(self) -> None:
        """Note that the client is aioshm's."""
        self.is_aioshm = True
        if not self._takes_heartbeats and not self._gone:
            self._takes_heartbeats = True
            self.beat()

    def forget(self) -> None:
        """Note that no request of the connection that has ended is open any more: another client may be there."""
        self.is_aioshm = self._has_keys

    def beat(self) -> None:
        """Send a heartbeat to a client of aioshm's."""
        if self._sockets.beating and self._takes_heartbeats and not self._gone:
            sample = progress.own().read()
            beat = Heartbeat(sample.phase, sample.steps, sample.turned_ns, sample.expected_s, sample.requests)
            with suppress(zmq.Again):
                self._dealer.send(encode_heartbeat(beat), zmq.NOBLOCK)
            self._look_for_requests()

    # Connections

    def _take(self, frames: list[Frame]) -> None:
        if not self._gone:  # else sent before the connection ended, and read afterwards
            self._sockets.on_message(self.client, frames)

    def look(self) -> None:
        """Read the monitor: the client may be gone, or back."""
        full = False  # whether the DEALER may be full of heartbeats for a front end that was stopped
        for kind, *_ in self._monitor.events():
            if kind == zmq.EVENT_DISCONNECTED and not self._gone:
                full = self._takes_heartbeats and not self._has_keys
                self._lose()
            elif kind == zmq.EVENT_HANDSHAKE_SUCCEEDED and self._gone and not full:
                self._gone = False
                logger.info("client %d is back; %d messages found it gone", self.client, self._dropped)
                self._open_output()
                self._dealer.send(self._sockets.registration, zmq.NOBLOCK)
                self._look_for_requests()
                self.beat()
        if full:
            self._connect_anew()

    def _look_for_requests(self) -> None:
        if self._requests is not None:
            self._requests.run_soon()  # a send may clear the event of a waiting message

    def _lose(self) -> None:
        """Drop the pending outputs, and abort the requests."""
        self._gone = True
        self._takes_heartbeats = self._has_keys
        self._close_output()
        self._sockets.on_message(self.client, [])

    def log_loss(self, requests: int) -> None:
        """Log that a front end on another host is gone; `_drop` logs one on this host."""
        if requests and over_tcp([self._input_address]):
            logger.warning(
                "engine %d lost front end %d (%s): its connection ended or was silent; its %d requests are aborted",
                self._sockets.settings.index,
                self.client,
                self._output_address,
                requests,
            )

    def _drop(self) -> None:
        """Disconnect a client that has stopped reading; the client notices when it runs again, and can come back."""
        logger.warning(
            "engine %d dropped front end %d (%s), which has stopped reading: %d bytes of outputs wait for it, and"
            " max_pending_bytes is %d; its requests are aborted",
            self._sockets.settings.index,
            self.client,
            self._output_address,
            self._pending_bytes,
            self._sockets.settings.max_pending_bytes,
        )
        self._disconnect()

    def _disconnect(self) -> None:
        """Give up a client whose outputs are lost: the end of its connection is how the client notices."""
        self._lose()
        self._connect_anew()

    def _connect_anew(self) -> None:
        """Connect again to a client that is gone, without unsent messages."""
        self._dealer.disconnect(self._input_address)
        if over_tcp([self._input_address]) and not self._has_keys:
            asyncio.get_running_loop().call_later(RECONNECT_S, self._connect_again)
        else:
            self._connect_again()

    def _connect_again(self) -> None:
        if not self._sockets.closed:
            attach(self._dealer, self._input_address, bind=False)


class CoreSockets:
    """The sockets to all clients, and to the coordinator if there is one.

    ``on_message`` gets the index of a client, or `COORDINATOR`, and the frames of a message; no frames: the client is
    gone.
    """

    def __init__(
        self,
        addresses: EngineZmqAddresses,
        on_message: Callable[[int, list[Frame]], None],
        settings: SocketSettings,
    ) -> None:
        if len(addresses.inputs) != len(addresses.outputs):
            raise ValueError(f"addresses must have as many inputs as outputs, and have {addresses}")
        self.on_message = on_message
        self.settings: SocketSettings = settings
        self.closed: bool = False
        self.registration: bytes = b""
        self.beating: bool = False
        self._credentials: EngineCredentials | None = None
        everywhere = [*addresses.inputs, *addresses.outputs, addresses.coordinator_input, addresses.coordinator_output]
        if settings.keys is not False and over_tcp(everywhere):
            self._credentials = keys_for_engine(settings.index, settings.keys)
        self._sockets = Sockets()
        self.front_ends: list[FrontEnd] = []
        self.coordinated: bool = addresses.coordinator_input is not None and addresses.coordinator_output is not None
        self._orders: Pump | None = None  # of the coordinator
        self._coordinator_ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        try:
            for client, both in enumerate(zip(addresses.inputs, addresses.outputs, strict=True)):
                self.front_ends.append(FrontEnd(self, client, *both))
            if addresses.coordinator_input is not None and addresses.coordinator_output is not None:
                self._subscription = self.open(zmq.XSUB, addresses.coordinator_input)
                self._reports = self.open(zmq.PUSH, addresses.coordinator_output, to_coordinator=True)
                attach(self._subscription, addresses.coordinator_input, bind=False)
                attach(self._reports, addresses.coordinator_output, bind=False)
        except BaseException:
            for front_end in self.front_ends:
                front_end.pause()
            self._sockets.close()
            raise

    async def register(self, payload: bytes) -> None:
        """Register at every front end, and read from now on; later again at a front end that comes back.

        Returns when the coordinator, if there is one, knows all engines: before that, waves would start without some.
        """
        self.registration = payload
        if self.coordinated:
            self._subscription.send(SUBSCRIBE_TO_ALL, zmq.NOBLOCK)
        for front_end in self.front_ends:
            front_end.register(payload)
        if self.coordinated:
            receive = partial(with_views, self._subscription)
            loop = asyncio.get_running_loop()
            self._orders = Pump.of_messages(loop, self._subscription, self._take_from_coordinator, receive)
            await self._coordinator_ready

    def send(self, client: int, frames: list[Frame], *, counts: bool = True) -> None:
        """Send a message to a client, or to the coordinator; a message to a client that is gone is dropped."""
        if client == COORDINATOR:
            self._reports.send_multipart(frames, zmq.NOBLOCK)
        else:
            self.front_ends[client].send(frames, counts)

    def beat(self) -> None:
        """Send a heartbeat to each front end that is known to be aioshm's."""
        self.beating = True
        if not self.closed:
            for front_end in self.front_ends:
                front_end.look()
                front_end.beat()

    def send_dead(self) -> None:
        """Report to every client that this engine ends."""
        for front_end in self.front_ends:
            front_end.send([ENGINE_CORE_DEAD], counts=True)

    async def aclose(self) -> None:
        """Close the sockets once all messages have left. Idempotent; continues in a thread when cancelled."""
        if self.closed:
            return
        self.closed = True
        for front_end in self.front_ends:
            front_end.pause()
        if self._orders is not None:
            self._orders.pause()
        self._coordinator_ready.cancel()
        await give_back(self._flush)

    def _flush(self) -> None:
        """Send the remaining messages, within `LINGER_MS`, and close the sockets."""
        deadline = time.monotonic() + LINGER_MS / 1000
        poller = zmq.Poller()
        while waiting := [each for each in self.front_ends if each.pending]:
            for each in self.front_ends:
                poller.register(each.output, zmq.POLLOUT * (each in waiting))
            if not poller.poll(max(0, int((deadline - time.monotonic()) * 1000))):
                break
            for each in waiting:
                each.send_pending()
        self._sockets.close(max(0, int((deadline - time.monotonic()) * 1000)))

    # Opening

    def has_keys_at(self, address: str) -> bool:
        """Return whether the peer at an address has keys, and so is certainly aioshm's."""
        return self._credentials is not None and over_tcp([address])

    def open(self, kind: int, address: str, *, to_coordinator: bool = False) -> Socket:
        """Open a socket, to be connected later."""
        settings = self.settings
        curve: CurveKeys | None = None
        if self._credentials is not None and over_tcp([address]):
            curve = self._credentials.to_front_end()
            if kind == zmq.XSUB or to_coordinator:
                curve = self._credentials.to_coordinator()
        hwm = _UNBOUNDED
        # Over TCP heartbeats detect a stopped front end, and a slow network is no reason to drop a front end.
        if kind == zmq.PUSH and not to_coordinator and not over_tcp([address]):
            hwm = _LOCAL_HWM
        socket = self._sockets.add(
            open_socket(
                self._sockets.context,
                kind,
                address,
                bind=False,
                hwm=hwm,
                curve=curve,
                silence_s=settings.silence_s,
                heartbeats=kind == zmq.DEALER,  # a client is gone when the connection of its DEALER ends
            )
        )
        limit_frames(socket, settings.max_bytes)
        if kind == zmq.DEALER:
            name = identity(settings.index)
            if curve is not None and self._credentials is not None:
                name = self._credentials.name
            socket.setsockopt(zmq.ROUTING_ID, name)
            socket.setsockopt(zmq.SNDHWM, _HEARTBEATS_HWM)
        return socket

    def monitor(self, socket: Socket) -> Monitor:
        """Monitor a socket that is not connected yet."""
        monitor = Monitor(socket)
        self._sockets.close_first(monitor.close)
        self._sockets.add(monitor.pair)
        return monitor

    def _take_from_coordinator(self, frames: list[Frame]) -> None:
        if frames != [COORDINATOR_READY]:
            self.on_message(COORDINATOR, frames)
        elif not self._coordinator_ready.done():  # READY comes again whenever an engine has come
            self._coordinator_ready.set_result(None)
