"""The engine's side of the handshake."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any

import zmq

from aioshm.arguments import check_seconds
from aioshm.engine.protocol.addresses import EngineHandshakeMetadata
from aioshm.engine.protocol.handshake import MAX_INIT_BYTES, EngineHandshake
from aioshm.engine.security.keys import AnyKeys, EngineCredentials, keys_for_engine
from aioshm.process.background import give_back
from aioshm.zeromq.curve import limit_frames
from aioshm.zeromq.endpoint import attach, check_endpoint, open_socket
from aioshm.zeromq.monitor import ENDED, MISMATCH, Monitor
from aioshm.zeromq.pump import Pump, whole
from aioshm.zeromq.sockets import Sockets

INIT_TIMEOUT_S = 300.0
LINGER_MS = 5000
"""How long READY may take to leave; it takes no time unless the front end is gone."""

_HWM = 16

logger: logging.Logger = logging.getLogger("aioshm.engine")

ReadyFields = Mapping[str, Any] | None


async def shake_hands(
    handshake_address: str,
    index: int,
    *,
    local: bool = True,
    headless: bool = False,
    client_handshake_address: str | None = None,
    initialize: Callable[[EngineHandshakeMetadata], ReadyFields | Awaitable[ReadyFields]],
    timeout: float | None = INIT_TIMEOUT_S,
    keys: AnyKeys | None = None,
    secure: bool = True,
) -> EngineHandshakeMetadata:
    """Say HELLO to the front end, initialise with what it answers, and say READY.

    Cancelling this, or an error in ``initialize``, leaves the front end without a READY.

    Args:
        handshake_address: Where the front end listens, or will listen.
        index: The engine's rank.
        local: Whether it runs on the front end's host.
        headless: Whether there is no front end beside it.
        client_handshake_address: Where the engine's own front end listens, if ``handshake_address`` is that of a head
            node elsewhere (hybrid and external load balancing, at ranks above 0). The engine shakes hands with both:
            it gets requests from its own front end, and everything else is as the head node says.
        initialize: Gets what the front end says, connects the engine's data sockets, and returns the fields of READY,
            such as ``num_gpu_blocks``; may be async.
        timeout: Seconds that each front end may take to answer; None waits for ever.
        keys: See `run_engine_core`.
        secure: See `run_engine_core`.

    Returns:
        What the front end said; of two, both together.

    Raises:
        HandshakeError: What the front end said is not understood.
        TimeoutError: It did not answer; the text names its address.
        OSError: An address is malformed.
        RoleError: There are no keys for this engine.
        TypeError, ValueError: The fields of READY cannot be sent, or an engine with a front end of its own is headless
            or not local.
    """
    if timeout is not None:
        check_seconds("timeout", timeout)
    async with AsyncExitStack() as stack:

        async def greet(address: str, local: bool) -> tuple[_FrontEnd, EngineHandshakeMetadata]:
            credentials = (
                keys_for_engine(index, keys) if secure and check_endpoint(address).startswith("tcp://") else None
            )
            front_end = _FrontEnd(address, EngineHandshake(index, local=local, headless=headless), credentials)
            stack.callback(front_end.close)
            return front_end, await front_end.greet(timeout)

        if client_handshake_address is None:
            front_end, metadata = await greet(handshake_address, local)
            front_ends = [front_end]
        else:
            if headless or not local:
                raise ValueError(
                    "an engine with a client_handshake_address has a front end of its own beside it: "
                    f"it must be local and not headless, not local={local}, headless={headless}"
                )
            head, metadata = await greet(handshake_address, False)
            own, beside = await greet(client_handshake_address, True)
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
    """The engine's side of a handshake with one front end, on a DEALER socket."""

    def __init__(self, address: str, handshake: EngineHandshake, credentials: EngineCredentials | None) -> None:
        self._address, self._handshake = address, handshake
        self._flushing = False
        self._encrypts, self._refused = credentials is not None, ""
        self._sockets = Sockets()
        curve = None if credentials is None else credentials.to_front_end()
        self._dealer = self._sockets.add(
            open_socket(
                self._sockets.context,
                zmq.DEALER,
                address,
                bind=False,
                hwm=_HWM,
                curve=curve,
                heartbeats=True,  # also for proxies, which forget idle connections while the engine initialises
            )
        )
        self._monitor: Monitor | None = None
        try:
            self._monitor = Monitor(self._dealer)
            self._sockets.add(self._monitor.pair)
            name = handshake.identity if credentials is None else credentials.name
            self._dealer.setsockopt(zmq.ROUTING_ID, name)
            limit_frames(self._dealer, MAX_INIT_BYTES)
            attach(self._dealer, address, bind=False)
        except BaseException:
            self.close()
            raise

    async def greet(self, timeout: float | None) -> EngineHandshakeMetadata:
        """Say HELLO, and return what is answered."""
        self._dealer.send(self._handshake.hello(), zmq.NOBLOCK)
        try:
            async with asyncio.timeout(timeout):
                frames = await self._receive()
        except TimeoutError:
            index = int.from_bytes(self._handshake.identity, "little")
            text = f"engine {index}: no answer from {self._address} within {timeout} s"
            raise TimeoutError(f"{text}: {self._refused}" if self._refused else text) from None
        return self._handshake.receive(frames)

    def ready(self, fields: ReadyFields) -> None:
        """Say READY."""
        self._dealer.send(self._handshake.ready(fields), zmq.NOBLOCK)

    async def _receive(self) -> list[bytes]:
        loop = asyncio.get_running_loop()
        arrived: asyncio.Future[list[bytes]] = loop.create_future()

        def take(frames: list[bytes]) -> None:
            if not arrived.done():
                arrived.set_result(frames)

        assert self._monitor is not None
        pumps = [
            Pump.of_messages(loop, self._dealer, take, whole(self._dealer)),
            Pump(loop, self._monitor.pair, self._look_at_connection),
        ]
        try:
            return await arrived
        finally:
            for pump in pumps:
                pump.pause()

    def _look_at_connection(self) -> None:
        if self._monitor is None:
            return
        failed = self._monitor.read()[1]
        reason = failed[-1].reason if failed else ENDED
        # The end that finds a mismatch hangs up, so the other end may name the mismatch at a later attempt only.
        if failed and (not self._refused or reason != ENDED):
            if reason == MISMATCH and not self._encrypts:
                hint = "; leave out secure=False"
            elif reason == MISMATCH:
                hint = "; with a front end that has no keys, such as vLLM's, secure=False is needed"
            elif reason == ENDED and self._encrypts:
                hint = ", or the front end refuses these keys, which have to be of its EngineKeys"
            else:
                hint = ""
            text = f"{self._address}: {reason}{hint}"
            if text != self._refused:
                logger.warning("%s", text)
            self._refused = text

    async def flush(self) -> None:
        """Close it once everything has left; goes on in a thread when it is cancelled."""
        self._flushing = True
        self._stop_monitoring()
        await give_back(lambda: self._sockets.close(LINGER_MS))

    def close(self) -> None:
        """Close it at once, unless `flush` does. Idempotent."""
        if not self._flushing:
            self._stop_monitoring()
            self._sockets.close()

    def _stop_monitoring(self) -> None:
        if self._monitor is not None:
            self._monitor.close()
            self._monitor = None
