"""The engine's side of the handshake."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import zmq

from aioshm.config import check_seconds
from aioshm.engine.addresses import EngineHandshakeMetadata
from aioshm.engine.handshake import MAX_INIT_BYTES, EngineHandshake
from aioshm.queue.sockets import Sockets
from aioshm.wait.background import in_thread
from aioshm.zeromq import Watch, attach, open_socket

INIT_TIMEOUT_S = 300.0
LINGER_MS = 5000
"""How long READY may take to leave; it takes no time unless the front end is gone."""

_HWM = 16

ReadyFields = Mapping[str, Any] | None


async def shake_hands(
    handshake_address: str,
    index: int,
    *,
    local: bool = True,
    headless: bool = False,
    initialize: Callable[[EngineHandshakeMetadata], ReadyFields | Awaitable[ReadyFields]],
    timeout: float | None = INIT_TIMEOUT_S,
) -> EngineHandshakeMetadata:
    """Say HELLO to the front end, initialise with what it answers, and say READY.

    Cancelling this, or an error in ``initialize``, leaves the front end without a READY.

    Args:
        handshake_address: Where the front end listens, or will listen.
        index: The engine's rank.
        local: Whether it runs on the front end's host.
        headless: Whether there is no front end beside it.
        initialize: Gets what the front end says, connects the engine's data sockets, and returns the fields of READY,
            such as ``num_gpu_blocks``; may be async.
        timeout: Seconds that the front end may take to answer; None waits for ever.

    Returns:
        What the front end said.

    Raises:
        HandshakeError: What the front end said is not understood.
        TimeoutError: It did not answer.
        OSError: The address is malformed.
        TypeError, ValueError: The fields of READY cannot be sent.
    """
    if timeout is not None:
        check_seconds("timeout", timeout)
    handshake = EngineHandshake(index, local=local, headless=headless)
    dealer = _Dealer(handshake_address, handshake.identity)
    try:
        dealer.send(handshake.hello())
        try:
            async with asyncio.timeout(timeout):
                frames = await dealer.receive()
        except TimeoutError:
            raise TimeoutError(f"engine {index}: no answer from {handshake_address} within {timeout} s") from None
        metadata = handshake.receive(frames)
        fields = initialize(metadata)
        if inspect.isawaitable(fields):
            fields = await fields
        dealer.send(handshake.ready(fields))
    except BaseException:
        dealer.close()
        raise
    await dealer.flush()
    return metadata


class _Dealer:
    """A DEALER socket for a few messages."""

    def __init__(self, address: str, identity: bytes) -> None:
        self._sockets = Sockets()
        self._dealer = self._sockets.add(
            open_socket(self._sockets.context, zmq.DEALER, address, bind=False, hwm=_HWM, curve=None)
        )
        try:
            self._dealer.setsockopt(zmq.ROUTING_ID, identity)
            self._dealer.setsockopt(zmq.MAXMSGSIZE, MAX_INIT_BYTES)
            attach(self._dealer, address, bind=False)
        except BaseException:
            self.close()
            raise

    def send(self, payload: bytes) -> None:
        self._dealer.send(payload, zmq.NOBLOCK)

    async def receive(self) -> list[bytes]:
        loop = asyncio.get_running_loop()
        arrived: asyncio.Future[list[bytes]] = loop.create_future()

        def look() -> None:
            if not arrived.done():
                try:
                    arrived.set_result(self._dealer.recv_multipart(zmq.NOBLOCK))
                except zmq.ZMQError:
                    return

        watch = Watch(loop, self._dealer, look)
        try:
            return await arrived
        finally:
            watch.pause()

    async def flush(self) -> None:
        """Close it once everything has left."""
        await in_thread(lambda: self._sockets.close(LINGER_MS))

    def close(self) -> None:
        self._sockets.close()
