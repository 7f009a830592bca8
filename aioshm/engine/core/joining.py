"""The engine's side of the handshake."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import Any

import zmq

from aioshm.arguments import check_seconds
from aioshm.config import ENGINE_READY_TIMEOUT_S
from aioshm.engine.protocol.addresses import EngineHandshakeMetadata
from aioshm.engine.protocol.handshake import MAX_INIT_BYTES, EngineHandshake
from aioshm.engine.security.binding import over_tcp
from aioshm.engine.security.keys import AnyKeys, EngineCredentials, keys_for_engine
from aioshm.errors import OutOfThreads
from aioshm.process.background import give_back
from aioshm.process.limits import start_thread
from aioshm.zeromq.endpoint import attach, check_endpoint, limit_frames, open_socket
from aioshm.zeromq.monitor import ENDED, MISMATCH, Monitor
from aioshm.zeromq.pump import Pump, whole
from aioshm.zeromq.sockets import Sockets

INIT_TIMEOUT_S = 300.0
LINGER_MS = 5000
"""How long READY may take to leave; it takes no time unless the front end is gone."""

MAX_REPEATS = 10
"""How often READY is sent again: two engines of one rank take the connection from each other for ever."""

_HWM = 16

logger: logging.Logger = logging.getLogger("aioshm.engine")

ReadyFields = Mapping[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class HandshakeOptions:
    """The options of an engine's handshake.

    Attributes:
        local: Whether the engine runs on the front end's host.
        headless: Whether the engine's host has no front end.
        client_handshake_address: Where the engine's own front end listens, if ``handshake_address`` is the address of a
            head node elsewhere (hybrid and external load balancing, at ranks above 0). The engine shakes hands with
            both: requests come from its own front end, and the head node decides everything else.
        keys: The keys of this engine for TCP, see `EngineKeys`; None: the keys that its process was started with.
        secure: Whether TCP connections are encrypted; the front end needs the same setting. False for front ends
            without keys, such as vLLM's.
    """

    local: bool = True
    headless: bool = False
    client_handshake_address: str | None = None
    # Security
    keys: AnyKeys | None = None
    secure: bool = True


async def shake_hands(
    handshake_address: str,
    index: int,
    *,
    initialize: Callable[[EngineHandshakeMetadata], ReadyFields | Awaitable[ReadyFields]],
    timeout: float | None = INIT_TIMEOUT_S,
    handshake: HandshakeOptions | None = None,
) -> EngineHandshakeMetadata:
    """Say HELLO to the front end, initialise with its answer, and say READY.

    Cancelling this, or an error in ``initialize``, leaves the front end without a READY.

    Over TCP a message whose connection breaks is sent again over the next one. For READY this continues after the
    return, until a connection has lasted for 9 s, or the calling task ends: run the engine in that task.

    Args:
        handshake_address: Where the front end listens, or will listen.
        index: The engine's rank.
        initialize: Gets the front end's answer, connects the engine's data sockets, and returns the fields of READY,
            such as ``num_gpu_blocks``; may be async.
        timeout: Seconds that each front end may take to answer; None waits for ever.
        handshake: See `HandshakeOptions`; None: the defaults.

    Returns:
        The front end's answer; with two front ends, both answers combined.

    Raises:
        HandshakeError: The front end's answer is invalid.
        TimeoutError: The front end did not answer; the text names its address.
        OSError: An address is malformed.
        RoleError: There are no keys for this engine.
        TypeError, ValueError: The fields of READY cannot be sent, or an engine with a front end of its own is headless
            or not local.
    """
    chosen = handshake or HandshakeOptions()
    local = chosen.local
    headless = chosen.headless
    if timeout is not None:
        check_seconds("timeout", timeout)
    async with AsyncExitStack() as stack:

        async def greet(address: str, local: bool) -> tuple[_FrontEnd, EngineHandshakeMetadata]:
            credentials = (
                keys_for_engine(index, chosen.keys)
                if chosen.secure and check_endpoint(address).startswith("tcp://")
                else None
            )
            # Only aioshm's front ends have keys: vLLM's would get bytes that vLLM does not send.
            state = EngineHandshake(index, local=local, headless=headless, named=credentials is not None)
            front_end = _FrontEnd(address, state, credentials)
            stack.callback(front_end.close)
            return front_end, await front_end.greet(timeout)

        if chosen.client_handshake_address is None:
            front_end, metadata = await greet(handshake_address, local)
            front_ends = [front_end]
        else:
            if headless or not local:
                raise ValueError(
                    "an engine with a client_handshake_address has a front end of its own beside it: "
                    f"it must be local and not headless, not local={local}, headless={headless}"
                )
            head, metadata = await greet(handshake_address, False)
            own, beside = await greet(chosen.client_handshake_address, True)
            metadata.addresses.inputs = beside.addresses.inputs
            metadata.addresses.outputs = beside.addresses.outputs
            front_ends = [own, head]
        fields = initialize(metadata)
        if inspect.isawaitable(fields):
            fields = await fields
        for front_end in front_ends:
            front_end.ready(fields)
        for front_end in front_ends:
            await front_end.flush()
    return metadata


class _FrontEnd:
    """The engine's side of a handshake with one front end: a DEALER, its monitor, and the last message.

    A message whose connection breaks is sent again over the next one. Over TCP that goes on after READY, until a
    connection has lasted for as long as heartbeats take to find out that it does not live.
    """

    def __init__(self, address: str, handshake: EngineHandshake, credentials: EngineCredentials | None) -> None:
        self._address = address
        self._handshake = handshake
        self._encrypts = credentials is not None
        self._refused = ""  # why the last attempt to connect has failed
        loop = asyncio.get_running_loop()
        self._init: asyncio.Future[list[bytes]] = loop.create_future()
        self._unconfirmed = False  # whether the last message is sent again after a reconnect
        self._carrier = 0  # which connection carries the last message, by Monitor.handshakes
        self._repeats = 0
        self._connection_changed = asyncio.Event()
        self._flushing = False
        self._sockets = Sockets()
        self._dealer = self._sockets.add(
            open_socket(
                self._sockets.context,
                zmq.DEALER,
                address,
                bind=False,
                hwm=_HWM,
                curve=None if credentials is None else credentials.to_front_end(),
                heartbeats=True,  # also for proxies, which forget idle connections while the engine initialises
            )
        )
        try:
            self._monitor = Monitor(self._dealer)
            self._sockets.add(self._monitor.pair)
            self._dealer.setsockopt(zmq.ROUTING_ID, handshake.identity if credentials is None else credentials.name)
            limit_frames(self._dealer, MAX_INIT_BYTES)
            self._proven_s = 0.0  # over TCP: after how long a connection that still lives has delivered READY
            if over_tcp([address]):
                # The front end drops a silent connection, too: where it knows no keys, it ignores the new one while
                # the old one seems to live.
                timeout_ms = int(self._dealer.getsockopt(zmq.HEARTBEAT_TIMEOUT))
                self._dealer.setsockopt(zmq.HEARTBEAT_TTL, timeout_ms)
                # A heartbeat that was sent after READY is answered by then, or the connection is given up.
                self._proven_s = (2 * int(self._dealer.getsockopt(zmq.HEARTBEAT_IVL)) + timeout_ms) / 1000
            attach(self._dealer, address, bind=False)
        except BaseException:
            self._sockets.close()
            raise
        self._messages = Pump.of_messages(loop, self._dealer, self._take, whole(self._dealer))
        self._events = Pump(loop, self._monitor.pair, self._look)

    async def greet(self, timeout: float | None) -> EngineHandshakeMetadata:
        """Say HELLO, and return the answer."""
        self._send(self._handshake.hello())
        try:
            async with asyncio.timeout(timeout):
                frames = await self._init
        except TimeoutError:
            index = int.from_bytes(self._handshake.identity, "little")
            text = f"engine {index}: no answer from {self._address} within {timeout} s"
            raise TimeoutError(f"{text}: {self._refused}" if self._refused else text) from None
        return self._handshake.receive(frames)

    def ready(self, fields: ReadyFields) -> None:
        """Say READY."""
        self._monitor.read()  # what became of the connection while the engine initialised
        self._repeats = 0
        self._send(self._handshake.ready(fields))

    async def flush(self) -> None:
        """Close the socket once READY has left, over TCP in the background; continues in a thread when cancelled."""
        self._flushing = True
        if self._proven_s:
            confirming = asyncio.create_task(self._confirm())
            engine = asyncio.current_task()
            assert engine is not None
            engine.add_done_callback(lambda _: confirming.cancel())
        else:
            self._stop()
            await give_back(lambda: self._sockets.close(LINGER_MS))

    def close(self) -> None:
        """Close the socket, unless `flush` does. Idempotent."""
        if not self._flushing:
            self._stop()
            self._sockets.close()

    async def _confirm(self) -> None:
        """Wait until READY has arrived, the front end has given up, or the engine ends; then close the socket."""
        linger_ms = LINGER_MS
        try:
            async with asyncio.timeout(ENGINE_READY_TIMEOUT_S) as limit:
                while self._repeats < MAX_REPEATS and linger_ms:
                    self._connection_changed.clear()
                    try:
                        async with asyncio.timeout(self._proven_s):
                            await self._connection_changed.wait()
                    except TimeoutError:
                        self._monitor.read()
                        if self._monitor.connections and self._monitor.handshakes == self._carrier:
                            linger_ms = 0
                        self._look()
        except TimeoutError:
            if not limit.expired():
                raise
            linger_ms = 0
        finally:
            self._stop()
            self._close_later(linger_ms)

    def _close_later(self, linger_ms: int) -> None:
        if not linger_ms:
            self._sockets.close()
            return
        try:  # no daemon: Python's end waits until READY has left
            start_thread(self._sockets.close, linger_ms, name="aioshm-handshake", what="saying READY", daemon=False)
        except OutOfThreads:
            self._sockets.close(linger_ms)

    def _stop(self) -> None:
        self._messages.pause()
        self._events.pause()
        self._monitor.close()

    def _send(self, message: bytes) -> None:
        with suppress(zmq.Again):  # no connection has taken the ones before
            self._dealer.send(message, zmq.NOBLOCK)
        self._unconfirmed = True
        self._carrier = self._monitor.handshakes + (not self._monitor.connections)
        self._messages.run_soon()  # sending may clear the sign that there is something to read

    def _take(self, frames: list[bytes]) -> None:
        if not self._init.done():
            self._init.set_result(frames)
            self._unconfirmed = False
            self._messages.pause()

    def _look(self) -> None:
        """Send the last message again if the connection that carried it is gone, and there is another one."""
        failed = self._monitor.read()[1]
        if failed and not self._init.done():
            self._note_failure(failed[-1].reason)
        if self._unconfirmed and self._monitor.handshakes > self._carrier:
            self._repeats += 1
            self._send(self._handshake.again)
        self._connection_changed.set()

    def _note_failure(self, reason: str) -> None:
        """Log why the connection failed, with a hint."""
        # The end that finds a mismatch hangs up, so the other end may name the mismatch at a later attempt only.
        if self._refused and reason == ENDED:
            return
        hint = ""
        if reason == MISMATCH and not self._encrypts:
            hint = "; leave out secure=False"
        elif reason == MISMATCH:
            hint = "; with a front end that has no keys, such as vLLM's, secure=False is needed"
        elif reason == ENDED and self._encrypts:
            hint = ", or the front end refuses these keys, which have to be of its EngineKeys"
        text = f"{self._address}: {reason}{hint}"
        if text != self._refused:
            logger.warning("%s", text)
        self._refused = text
