"""An engine's sockets: a DEALER and a PUSH to each front end, an XSUB and a PUSH to the coordinator."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from contextlib import ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING

import zmq

from aioshm.engine.protocol.addresses import EngineZmqAddresses, identity
from aioshm.engine.protocol.messages import COORDINATOR_READY, ENGINE_CORE_DEAD, SUBSCRIBE_TO_ALL, Heartbeat, encode
from aioshm.engine.protocol.payloads import Frame
from aioshm.engine.security.binding import over_tcp
from aioshm.engine.security.bound_sockets import with_views
from aioshm.engine.security.keys import EngineCredentials, keys_for_engine
from aioshm.errors import AioshmError
from aioshm.process import progress
from aioshm.process.background import give_back
from aioshm.zeromq.endpoint import CurveKeys, attach, limit_frames, open_socket
from aioshm.zeromq.monitor import Monitor
from aioshm.zeromq.pump import Pump
from aioshm.zeromq.sockets import Socket, Sockets, send_message

if TYPE_CHECKING:
    from aioshm.engine.core.core import EngineCore

LINGER_MS = 2000
"""How long the last messages may take to leave; no time at all unless a front end is gone or stuck."""

RECONNECT_S = 0.05
RECONNECT_WITHOUT_KEYS_S = 1.0
"""Over TCP a front end without keys ignores a connection that begins before the former one has ended."""

COORDINATOR = -1
"""The coordinator, in place of a client's index."""

logger: logging.Logger = logging.getLogger("aioshm.engine")

_UNBOUNDED = 0
_HEARTBEATS_HWM = 1000  # of a front end of this host that is stopped
_LOCAL_HWM = 8  # messages of any size that ZeroMQ holds for a front end of this host; bytes bound the remainder


class FrontEnd:
    """The connection to one client: a DEALER for requests, a PUSH for outputs, and the outputs that have to wait.

    A client is gone when a connection ends: ZeroMQ would connect again, and has lost the messages on their way. Then
    both sockets are closed, and replaced once the engine has dropped the requests of the client.
    """

    def __init__(self, sockets: CoreSockets, client: int, input_address: str, output_address: str) -> None:
        self.client: int = client
        self.pending: deque[tuple[int, list[bytes]]] = deque()  # outputs without room in ZeroMQ, each with its size
        self._sockets = sockets
        self._core = sockets.core
        self._input_address = input_address
        self._output_address = output_address
        self._has_keys = sockets.has_keys_at(input_address)
        self._gone = False
        self._connect()

    def _connect(self) -> None:
        self.is_aioshm: bool = self._has_keys  # whether the client takes generations, notices and heartbeats
        self._pending_bytes = 0
        self._monitors: list[Monitor] = []
        with ExitStack() as undo:
            self._dealer = self._sockets.open(zmq.DEALER, self._input_address)
            undo.callback(self._dealer.close, linger=0)
            self.output: Socket = self._sockets.open(zmq.PUSH, self._output_address)
            undo.callback(self.output.close, linger=0)
            for socket in (self._dealer, self.output):
                self._monitors.append(self._sockets.monitor(socket))
                undo.callback(self._monitors[-1].close)
            attach(self._dealer, self._input_address, bind=False)
            attach(self.output, self._output_address, bind=False)
            undo.pop_all()
        loop = asyncio.get_running_loop()
        self._waiting = Pump(loop, self.output, self.send_pending)
        self._pumps = [self._waiting, *(Pump(loop, monitor.pair, self.look) for monitor in self._monitors)]

    def register(self) -> None:
        """Send the registration, and read from now on."""
        self._dealer.send(self._sockets.registration, zmq.NOBLOCK)
        receive = partial(with_views, self._dealer)
        take = partial(self._core.receive, self.client)
        self._requests = Pump.of_messages(asyncio.get_running_loop(), self._dealer, take, receive)
        self._pumps.append(self._requests)

    def stop(self) -> None:
        """Read no more, and send waiting outputs no more."""
        for pump in self._pumps:
            pump.pause()
        for monitor in self._monitors:
            monitor.close()

    # Outputs

    def send(self, frames: list[Frame], counts: bool) -> None:
        """Send a message, or keep a copy until ZeroMQ has room; drop a message to a client that is gone."""
        if self._gone:
            return
        if not self.pending:
            with suppress(zmq.Again):
                send_message(self.output, frames)
                return
        copies = [bytes(frame) for frame in frames]  # the engine may change its arrays in the next step
        size = 0
        if counts:
            size = sum(map(len, copies))
        self.pending.append((size, copies))
        self._pending_bytes += size
        self._waiting.resume()
        if self._pending_bytes > self._core.max_pending_bytes and len(self.pending) > 1:
            logger.warning(
                "engine %d dropped front end %d (%s), which has stopped reading: %d bytes of outputs wait for it, and"
                " max_pending_bytes is %d; its requests are aborted",
                self._core.index,
                self.client,
                self._output_address,
                self._pending_bytes,
                self._core.max_pending_bytes,
            )
            self._lose()  # the client notices the end of the connection later

    def send_pending(self) -> None:
        """Send as many of the kept messages as ZeroMQ has room for."""
        while self.pending and int(self.output.getsockopt(zmq.EVENTS)) & zmq.POLLOUT:
            size, frames = self.pending.popleft()
            self._pending_bytes -= size
            send_message(self.output, frames)
        if not self.pending:
            self._waiting.pause()

    # Heartbeats

    def accept(self) -> None:
        """Note that the client is aioshm's."""
        if not self.is_aioshm and not self._gone:
            self.is_aioshm = True
            self.beat()

    def beat(self) -> None:
        """Send a heartbeat to a client of aioshm's."""
        connected = not self._gone and self._monitors[0].connections
        if connected and self._sockets.beating and self.is_aioshm:
            sample = progress.own().read()
            beat = Heartbeat(sample.phase, sample.steps, sample.turned_ns, sample.expected_s, sample.requests)
            with suppress(zmq.Again):
                self._dealer.send(encode(beat), zmq.NOBLOCK)
            self._requests.run_soon()  # a send may clear the event of a waiting message

    # Connections

    def look(self) -> None:
        """Read the monitors: the client may be gone, or back."""
        for monitor in self._monitors:
            monitor.read()
        if any(monitor.handshakes > monitor.connections for monitor in self._monitors):
            self._lose()
        elif self._gone and self._monitors[0].connections:
            self._gone = False
            self.register()  # not before: a message that waits for an absent client would delay the end of the engine
        self.beat()

    def _lose(self) -> None:
        """Close the connections, and drop the pending outputs."""
        self._gone = True
        self.stop()
        self.pending.clear()
        self._dealer.close(linger=0)
        self.output.close(linger=0)
        self._core.receive(self.client, [])

    def connect_again(self, aborted: int) -> None:
        """Connect to a client that is gone, and whose requests were aborted."""
        delay_s = RECONNECT_S
        if over_tcp([self._input_address]):
            if aborted:  # `send` logs the loss of a front end on this host
                logger.warning(
                    "engine %d lost front end %d (%s): its connection ended or was silent; its %d requests are aborted",
                    self._core.index,
                    self.client,
                    self._output_address,
                    aborted,
                )
            if not self._has_keys:
                delay_s = RECONNECT_WITHOUT_KEYS_S
        asyncio.get_running_loop().call_later(delay_s, self._connect_again)

    def _connect_again(self) -> None:
        if self._sockets.closed:
            return
        try:
            self._connect()
        except (AioshmError, OSError, zmq.ZMQError) as error:  # other files of this process may be closed soon
            text = "engine %d cannot connect to front end %d (%s) again, and tries later: %s"
            logger.warning(text, self._core.index, self.client, self._output_address, error)
            asyncio.get_running_loop().call_later(RECONNECT_WITHOUT_KEYS_S, self._connect_again)


class CoreSockets:
    """The sockets to all clients, and to the coordinator if there is one.

    ``core.receive`` gets the index of a client, or `COORDINATOR`, and the frames of a message; no frames: the client is
    gone, or the coordinator is back.
    """

    def __init__(self, addresses: EngineZmqAddresses, core: EngineCore) -> None:
        if len(addresses.inputs) != len(addresses.outputs):
            raise ValueError(f"addresses must have as many inputs as outputs, and have {addresses}")
        self.core: EngineCore = core
        self.closed: bool = False
        self.registration: bytes = b""
        self.beating: bool = False
        self._credentials: EngineCredentials | None = None
        everywhere = [*addresses.inputs, *addresses.outputs, addresses.coordinator_input, addresses.coordinator_output]
        if core.keys is not False and over_tcp(everywhere):
            self._credentials = keys_for_engine(core.index, core.keys)
        self._sockets = Sockets()
        self.front_ends: list[FrontEnd] = []
        self.coordinated: bool = addresses.coordinator_input is not None and addresses.coordinator_output is not None
        self._listening = ExitStack()  # to the coordinator
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
                front_end.stop()
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
            front_end.register()
        if self.coordinated:
            receive = partial(with_views, self._subscription)
            loop = asyncio.get_running_loop()
            monitor = self.monitor(self._subscription)
            self._listening.callback(monitor.close)
            self._listening.callback(Pump(loop, monitor.pair, partial(self._look, monitor)).pause)
            orders = Pump.of_messages(loop, self._subscription, self._take_from_coordinator, receive)
            self._listening.callback(orders.pause)
            await self._coordinator_ready

    def send(self, client: int, frames: list[Frame], *, counts: bool = True) -> None:
        """Send a message to a client, or to the coordinator; ``counts``: towards ``max_pending_bytes``."""
        if self.closed:  # a thread sends what waits; clients know of the end
            return
        if client == COORDINATOR:
            send_message(self._reports, frames)
        else:
            self.front_ends[client].send(frames, counts)

    def beat(self) -> None:
        """Send a heartbeat to each front end that is known to be aioshm's."""
        self.beating = True
        if not self.closed:
            for front_end in self.front_ends:
                front_end.beat()

    async def aclose(self) -> None:
        """Report the end of this engine, and close the sockets once all messages have left.

        Idempotent; continues in a thread when cancelled.
        """
        if self.closed:
            return
        self.closed = True
        for front_end in self.front_ends:
            front_end.send([ENGINE_CORE_DEAD], counts=True)
            front_end.stop()
        self._listening.close()
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
        curve: CurveKeys | None = None
        name = identity(self.core.index)
        if self._credentials is not None and over_tcp([address]):
            name = self._credentials.name
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
                silence_s=self.core.options.remote_timeout,
                heartbeats=kind == zmq.DEALER,  # a client is gone when the connection of its DEALER ends
            )
        )
        limit_frames(socket, self.core.options.max_message_bytes)
        if kind == zmq.DEALER:
            socket.setsockopt(zmq.ROUTING_ID, name)
            socket.setsockopt(zmq.SNDHWM, _HEARTBEATS_HWM)
        return socket

    def monitor(self, socket: Socket) -> Monitor:
        """Monitor a socket that is not connected yet."""
        monitor = Monitor(socket)
        self._sockets.add(monitor.pair)
        return monitor

    def _look(self, monitor: Monitor) -> None:
        if monitor.read()[0]:  # the coordinator is back, or another one is there
            self.core.receive(COORDINATOR, [])

    def _take_from_coordinator(self, frames: list[Frame]) -> None:
        if frames != [COORDINATOR_READY]:
            self.core.receive(COORDINATOR, frames)
        elif not self._coordinator_ready.done():  # READY comes again whenever an engine has come
            self._coordinator_ready.set_result(None)
