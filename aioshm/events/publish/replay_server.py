"""Sends subscribers the batches that they missed, from the replay buffer, in between publishing.

Who asks in the wrong form is counted, named in a rate-limited warning, and answered with just the end marker
where there is an identity to answer to. Each client is served at the speed at which it reads, a few batches
at a time, so neither publishing nor the other clients wait for it; it keeps alive only what it still has to
get. At most ``MAX_CLIENTS`` are served at once, later requests wait in the socket; one that reads nothing for
``STALLED_S`` is given up, so those who wait get their turn.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from contextlib import suppress

import zmq

from aioshm.errors import CodecError
from aioshm.events.protocol import wire
from aioshm.events.protocol.outbox import Entry, ReplayBuffer
from aioshm.logs import LogLimiter
from aioshm.zeromq.pump import Pump, receive_frames

logger: logging.Logger = logging.getLogger("aioshm.events")

MAX_CLIENTS = 64
STALLED_S = 30.0
# Batches in ZeroMQ's queue for one client; what bounds a slow client's memory in this process.
CLIENT_HWM = 64
# The kernel's buffer for one client. Left alone it grows to megabytes, and filling it for a few slow clients at once
# would delay live batches for tens of milliseconds.
CLIENT_BUFFER_BYTES = 1 << 17
# A client's own requests are a few bytes; ZeroMQ hangs up on a peer that sends more.
MAX_REQUEST_BYTES = 1024
_MAX_FRAMES = 4  # a request has three, with the client's identity

_MORE = zmq.NOBLOCK | zmq.SNDMORE
_SLICE_S = 0.0001
_TURN = 8
_RETRY_S = 0.05


class _Client:
    """One answer in progress."""

    def __init__(self, identity: bytes, entries: deque[Entry], now: float) -> None:
        self.identity = identity
        self.moved = now
        self.entries = entries  # not sent yet


class ReplayServer:
    """Serves one ROUTER socket on one loop."""

    def __init__(
        self, socket: zmq.Socket[bytes], buffer: ReplayBuffer, topic: bytes, form: wire.ReplayFormat, where: str
    ) -> None:
        self.requests: int = 0  # well-formed requests
        self.replayed: int = 0  # batches sent in answers
        self.malformed: int = 0  # requests that were none
        self.abandoned: int = 0  # clients that left or stalled before they had everything
        self._socket = socket
        self._buffer = buffer
        self._topic = topic
        self._form = form
        self._where = where
        self._served: deque[_Client] = deque()  # in turn
        self._blocked: list[_Client] = []
        self._limiter = LogLimiter(10.0)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pump: Pump | None = None
        self._retry: asyncio.TimerHandle | None = None
        self._idle = asyncio.Event()

    @property
    def busy(self) -> bool:
        """Whether a client still waits for the rest of an answer."""
        return bool(self._served or self._blocked)

    async def wait_idle(self, timeout: float) -> None:
        """Wait until everybody has been answered, or ``timeout`` seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while self.busy:
                    self._idle.clear()
                    await self._idle.wait()

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Serve on ``loop`` from now on."""
        self._loop = loop
        self._pump = Pump(loop, self._socket, self._run)

    def close(self) -> None:
        """Stop serving; the socket stays open."""
        if self._pump is not None:
            self._pump.pause()
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        self.abandoned += len(self._served) + len(self._blocked)
        self._served.clear()
        self._blocked.clear()

    def _run(self) -> bool:
        """Take requests and send for one slice of time; return whether to go on in the loop's next turn."""
        assert self._loop is not None
        assert self._pump is not None
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        self._served.extend(self._blocked)  # any change of state may have made room for any of them
        self._blocked.clear()
        deadline = time.perf_counter() + _SLICE_S
        more_requests = self._accept(deadline)
        while self._served and time.perf_counter() < deadline:
            self._serve(self._served.popleft())
        if self._served or more_requests:
            return True
        if not self._blocked:
            self._idle.set()
        else:
            # Room for one client can be noticed while another is served, and then the descriptor stays
            # silent.
            self._retry = self._loop.call_later(_RETRY_S, self._pump.run)
        return False

    def _accept(self, deadline: float) -> bool:
        """Read requests; True if there may be more that could be taken now."""
        while len(self._served) + len(self._blocked) < MAX_CLIENTS:
            if time.perf_counter() > deadline:
                return True
            try:
                frames = receive_frames(self._socket, _MAX_FRAMES)
            except zmq.Again:
                return False
            self._take(frames)
        return False

    def _take(self, frames: list[zmq.Frame]) -> None:
        identity = frames[0].bytes
        now = time.monotonic()
        try:
            start = wire.parse_request([frame.bytes for frame in frames[1:]])
        except CodecError as error:
            self._complain(frames[0], error)
            self._served.append(_Client(identity, deque(), now))
            return
        self.requests += 1
        self._served.append(_Client(identity, self._buffer.since(start), now))

    def _complain(self, frame: zmq.Frame, error: CodecError) -> None:
        self.malformed += 1
        try:
            address = frame.get("Peer-Address")
        except (zmq.ZMQError, KeyError):
            address = "an unknown address"
        text = "replay %s: malformed request from %s, identity %s: %s"
        self._limiter.warn(logger, text, self._where, address, frame.bytes.hex(), error)

    def _serve(self, client: _Client) -> None:
        """Send one turn's worth; afterwards the client is ready, blocked or done."""
        send = self._socket.send
        for _ in range(_TURN):
            if client.entries:
                *first, last = wire.reply(self._topic, *client.entries[0], self._form)
            else:
                *first, last = wire.end_reply(self._form)
            try:
                send(client.identity, _MORE)
                for frame in first:  # there is room for all of them, or for none
                    send(frame, _MORE)
                send(last, zmq.NOBLOCK)
            except zmq.Again:
                self._block(client)
                return
            except zmq.ZMQError as error:  # EHOSTUNREACH: it is gone
                self.abandoned += 1
                logger.debug("replay %s: client %s left: %s", self._where, client.identity.hex(), error)
                return
            if not client.entries:
                return
            client.entries.popleft()
            client.moved = time.monotonic()
            self.replayed += 1
        self._served.append(client)

    def _block(self, client: _Client) -> None:
        waited = time.monotonic() - client.moved
        if waited < STALLED_S:
            self._blocked.append(client)
            return
        self.abandoned += 1
        text = "replay %s: client %s has read nothing for %.0f s; giving it up"
        logger.warning(text, self._where, client.identity.hex(), waited)
