"""An engine's sockets to its front ends and to the coordinator."""

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


class _Output:
    """The PUSH socket to one front end, and the messages that ZeroMQ has no room for.

    With a monitor, a lost connection is reported: ZeroMQ connects again, and has lost the messages on their way.
    """

    def __init__(self, address: str, socket: Socket, monitor: Monitor | None, on_lost: Callable[[], None]) -> None:
        self.address = address
        self._monitor = monitor
        self._on_lost = on_lost
        self._connected = False
        self._watch: Pump | None = None
        if monitor is not None:
            self._watch = Pump(asyncio.get_running_loop(), monitor.pair, partial(self._read_monitor, monitor))
        self.socket = socket
        self.pending: deque[tuple[int, list[bytes]]] = deque()  # counted size and frames of each message
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
        size = 0
        if counts:
            size = sum(map(len, copies))
        self.pending.append((size, copies))
        self.pending_bytes += size
        if self._pump is None:
            self._pump = Pump(asyncio.get_running_loop(), self.socket, self.send_pending)
        self._pump.resume()

    def send_pending(self) -> None:
        """Send as many of the kept messages as ZeroMQ has room for."""
        while self.pending and int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLOUT:
            size, frames = self.pending.popleft()
            self.pending_bytes -= size
            self.socket.send_multipart(frames, zmq.NOBLOCK)
        if not self.pending and self._pump is not None:
            self._pump.pause()

    def _read_monitor(self, monitor: Monitor) -> None:
        for kind, *_ in monitor.events():
            if kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._connected = True
            elif kind == zmq.EVENT_DISCONNECTED and self._connected:
                self._on_lost()
                return

    def pause(self) -> None:
        for pump in (self._pump, self._watch):
            if pump is not None:
                pump.pause()

    def close(self) -> None:
        """Drop every message, and close the socket."""
        self.pause()
        self.pending.clear()
        self.close_monitor()
        self.socket.close(linger=0)

    def close_monitor(self) -> None:
        if self._monitor is not None:
            self._monitor.close()


class _FrontEnd:
    """The connection to one client: a DEALER with its monitor, and an output."""

    def __init__(
        self, client: int, address: str, dealer: Socket, monitor: Monitor, output: _Output, *, has_keys: bool
    ) -> None:
        self.client = client
        self.address = address
        self.dealer = dealer
        self.monitor = monitor
        self.output = output
        self.gone = False
        self.dropped = 0  # messages since the client is gone
        self.requests: Pump | None = None
        self.has_keys = has_keys
        self.takes_heartbeats = has_keys  # clients with keys are certainly aioshm's


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
        self._on_message = on_message
        self._settings = settings
        self._credentials: EngineCredentials | None = None
        everywhere = [*addresses.inputs, *addresses.outputs, addresses.coordinator_input, addresses.coordinator_output]
        if settings.keys is not False and over_tcp(everywhere):
            self._credentials = keys_for_engine(settings.index, settings.keys)
        self._sockets = Sockets()
        self._pumps: list[Pump] = []
        self._closed = False
        self.registration: bytes = b""
        self._front_ends: list[_FrontEnd] = []
        self._beating = False
        self.coordinated: bool = addresses.coordinator_input is not None and addresses.coordinator_output is not None
        self._coordinator_ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        try:
            for client, both in enumerate(zip(addresses.inputs, addresses.outputs, strict=True)):
                self._front_ends.append(self._open_front_end(client, *both))
            if addresses.coordinator_input is not None and addresses.coordinator_output is not None:
                self._subscription = self._open(zmq.XSUB, addresses.coordinator_input, to_coordinator=True)
                self._reports = self._open(zmq.PUSH, addresses.coordinator_output, to_coordinator=True)
        except BaseException:
            self._close(0)
            raise

    async def register(self, payload: bytes) -> None:
        """Register at every front end, and read from now on; later again at a front end that comes back.

        Returns when the coordinator, if there is one, knows all engines: before that, waves would start without some.
        """
        self.registration = payload
        if self.coordinated:
            self._subscription.send(SUBSCRIBE_TO_ALL, zmq.NOBLOCK)
        for front_end in self._front_ends:
            front_end.dealer.send(payload, zmq.NOBLOCK)
            front_end.requests = self._pump(front_end.dealer, partial(self._take, front_end))
        loop = asyncio.get_running_loop()
        for front_end in self._front_ends:
            self._pumps.append(Pump(loop, front_end.monitor.pair, partial(self._read_monitor, front_end)))
        if self.coordinated:
            self._pump(self._subscription, self._take_from_coordinator)
            await self._coordinator_ready

    def send(self, client: int, frames: list[Frame], *, counts: bool = True) -> None:
        """Send a message to a client, or to the coordinator; a message to a client that is gone is dropped."""
        if client == COORDINATOR:
            self._reports.send_multipart(frames, zmq.NOBLOCK)
            return
        front_end = self._front_ends[client]
        if front_end.gone:
            front_end.dropped += 1
            return
        output = front_end.output
        output.send(frames, counts)
        if output.pending_bytes > self._settings.max_pending_bytes and len(output.pending) > 1:
            self._drop(front_end)

    def log_loss(self, client: int, requests: int) -> None:
        """Log that a front end on another host is gone; `_drop` logs one on this host."""
        front_end = self._front_ends[client]
        if requests and over_tcp([front_end.address]):
            logger.warning(
                "engine %d lost front end %d (%s): its connection ended or was silent; its %d requests are aborted",
                self._settings.index,
                client,
                front_end.output.address,
                requests,
            )

    def beat(self) -> None:
        """Send a heartbeat to each front end that is known to be aioshm's."""
        self._beating = True
        if not self._closed:
            for front_end in self._front_ends:
                self._read_monitor(front_end)
                self._beat(front_end)

    def accept_heartbeats(self, client: int) -> None:
        """Note that a client is aioshm's."""
        front_end = self._front_ends[client]
        if not front_end.takes_heartbeats and not front_end.gone:
            front_end.takes_heartbeats = True
            self._beat(front_end)

    def _beat(self, front_end: _FrontEnd) -> None:
        if self._beating and front_end.takes_heartbeats and not front_end.gone:
            sample = progress.own().read()
            beat = Heartbeat(sample.phase, sample.steps, sample.turned_ns, sample.expected_s, sample.requests)
            with suppress(zmq.Again):
                front_end.dealer.send(encode_heartbeat(beat), zmq.NOBLOCK)
            self._look_for_requests(front_end)

    def send_dead(self) -> None:
        """Report to every client that this engine ends."""
        for front_end in self._front_ends:
            self.send(front_end.client, [ENGINE_CORE_DEAD])

    async def aclose(self) -> None:
        """Close the sockets once all messages have left. Idempotent; continues in a thread when cancelled."""
        if self._closed:
            return
        self._closed = True
        for pump in self._pumps:
            pump.pause()
        for front_end in self._front_ends:
            front_end.output.pause()
        self._coordinator_ready.cancel()
        await give_back(self._flush)

    def _flush(self) -> None:
        """Send the remaining messages, within `LINGER_MS`, and close the sockets."""
        deadline = time.monotonic() + LINGER_MS / 1000
        outputs = [front_end.output for front_end in self._front_ends]
        poller = zmq.Poller()
        while waiting := [output for output in outputs if output.pending]:
            for output in outputs:
                poller.register(output.socket, zmq.POLLOUT * (output in waiting))
            if not poller.poll(max(0, int((deadline - time.monotonic()) * 1000))):
                break
            for output in waiting:
                output.send_pending()
        self._close(max(0, int((deadline - time.monotonic()) * 1000)))

    def _close(self, linger_ms: int) -> None:
        for front_end in self._front_ends:
            front_end.monitor.close()
            front_end.output.close_monitor()
        self._sockets.close(linger_ms)

    # Opening

    def _open_front_end(self, client: int, input_address: str, output_address: str) -> _FrontEnd:
        dealer = self._open(zmq.DEALER, input_address)
        monitor = Monitor(dealer)
        try:
            self._sockets.add(monitor.pair)
            attach(dealer, input_address, bind=False)
            output = self._open_output(client, output_address)
            has_keys = self._credentials is not None and over_tcp([input_address])
            return _FrontEnd(client, input_address, dealer, monitor, output, has_keys=has_keys)
        except BaseException:
            monitor.close()
            raise

    def _open_output(self, client: int, address: str) -> _Output:
        socket = self._open(zmq.PUSH, address)
        monitor: Monitor | None = None
        if over_tcp([address]):
            monitor = Monitor(socket)
            self._sockets.add(monitor.pair)
        return _Output(address, socket, monitor, lambda: self._disconnect(self._front_ends[client]))

    def _open(self, kind: int, address: str, *, to_coordinator: bool = False) -> Socket:
        """Open a socket; a DEALER is not connected yet, so that a monitor can be attached before."""
        settings = self._settings
        credentials = self._credentials if over_tcp([address]) else None
        curve: CurveKeys | None = None
        if credentials is not None:
            curve = credentials.to_coordinator() if to_coordinator else credentials.to_front_end()
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
            name = identity(settings.index) if credentials is None else credentials.name
            socket.setsockopt(zmq.ROUTING_ID, name)
            socket.setsockopt(zmq.SNDHWM, _HEARTBEATS_HWM)
        else:
            attach(socket, address, bind=False)
        return socket

    # Events

    def _pump(self, socket: Socket, handle: Callable[[list[Frame]], None]) -> Pump:
        pump = Pump.of_messages(asyncio.get_running_loop(), socket, handle, partial(with_views, socket))
        self._pumps.append(pump)
        return pump

    def _read_monitor(self, front_end: _FrontEnd) -> None:
        full = False  # whether the DEALER may be full of heartbeats for a front end that was stopped
        for kind, *_ in front_end.monitor.events():
            if kind == zmq.EVENT_DISCONNECTED and not front_end.gone:
                full = front_end.takes_heartbeats and not front_end.has_keys
                self._lose(front_end)
            elif kind == zmq.EVENT_HANDSHAKE_SUCCEEDED and front_end.gone and not full:
                front_end.gone = False
                logger.info("client %d is back; %d messages found it gone", front_end.client, front_end.dropped)
                front_end.output = self._open_output(front_end.client, front_end.output.address)
                front_end.dealer.send(self.registration, zmq.NOBLOCK)
                self._look_for_requests(front_end)
                self._beat(front_end)
        if full:
            self._connect_anew(front_end)

    def _look_for_requests(self, front_end: _FrontEnd) -> None:
        if front_end.requests is not None:
            front_end.requests.run_soon()  # a send may clear the event of a waiting message

    def _lose(self, front_end: _FrontEnd) -> None:
        """Drop the pending outputs of a front end, and abort its requests."""
        front_end.gone = True
        front_end.takes_heartbeats = front_end.has_keys
        front_end.output.close()
        self._on_message(front_end.client, [])

    def _drop(self, front_end: _FrontEnd) -> None:
        """Disconnect a client that has stopped reading; the client notices when it runs again, and can come back."""
        logger.warning(
            "engine %d dropped front end %d (%s), which has stopped reading: %d bytes of outputs wait for it, and"
            " max_pending_bytes is %d; its requests are aborted",
            self._settings.index,
            front_end.client,
            front_end.output.address,
            front_end.output.pending_bytes,
            self._settings.max_pending_bytes,
        )
        self._disconnect(front_end)

    def _disconnect(self, front_end: _FrontEnd) -> None:
        """Give up a client whose outputs are lost: the end of its connection is how the client notices."""
        self._lose(front_end)
        self._connect_anew(front_end)

    def _connect_anew(self, front_end: _FrontEnd) -> None:
        """Connect again to a front end that is gone, without unsent messages."""
        front_end.dealer.disconnect(front_end.address)
        if over_tcp([front_end.address]) and self._credentials is None:
            asyncio.get_running_loop().call_later(RECONNECT_S, self._connect_again, front_end)
        else:
            self._connect_again(front_end)

    def _connect_again(self, front_end: _FrontEnd) -> None:
        if not self._closed:
            attach(front_end.dealer, front_end.address, bind=False)

    def _take_from_coordinator(self, frames: list[Frame]) -> None:
        if frames != [COORDINATOR_READY]:
            self._on_message(COORDINATOR, frames)
        elif not self._coordinator_ready.done():  # READY comes again whenever an engine has come
            self._coordinator_ready.set_result(None)

    def _take(self, front_end: _FrontEnd, frames: list[Frame]) -> None:
        if not front_end.gone:  # else sent before the connection ended, and read afterwards
            self._on_message(front_end.client, frames)
