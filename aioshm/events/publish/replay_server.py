"""Serves replay requests from the replay buffer, in between publishing.

A malformed request is counted, logged in a rate-limited warning, and answered with only the end marker. The server
sends each client a few batches at a time, at the client's speed, so slow clients delay neither publishing nor other
clients. A client keeps only the batches alive that are still to be sent. The server answers at most ``MAX_CLIENTS`` at
a time; further requests wait in the socket. A client that reads nothing for ``STALLED_S`` is given up, so the next
one gets its place.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass

import zmq

from aioshm.errors import CodecError
from aioshm.events.protocol import wire
from aioshm.events.protocol.outbox import Entry, ReplayBuffer
from aioshm.logs import LogLimiter
from aioshm.zeromq.pump import Pump, receive_frames

logger: logging.Logger = logging.getLogger("aioshm.events")

MAX_CLIENTS = 64
STALLED_S = 30.0
_MAX_FRAMES = 4  # a request has three, with the client's identity

_MORE = zmq.NOBLOCK | zmq.SNDMORE
_SLICE_S = 0.0001
_BATCHES_AT_A_TIME = 8
_RETRY_S = 0.05


@dataclass(eq=False, slots=True)
class _Client:
    """An answer in progress."""

    identity: bytes
    entries: deque[Entry]  # not sent yet
    moved: float  # when the client last took a batch


class ReplayServer:
    """Serves one ROUTER socket on one loop."""

    def __init__(
        self, socket: zmq.Socket[bytes], buffer: ReplayBuffer, topic: bytes, form: wire.ReplayFormat, endpoint: str
    ) -> None:
        self.buffer: ReplayBuffer = buffer
        self.requests: int = 0  # well-formed requests
        self.replayed: int = 0  # batches sent in answers
        self.malformed: int = 0  # malformed requests
        self.abandoned: int = 0  # clients that left or stalled before the end of their answer
        self._socket = socket
        self._topic = topic
        self._form = form
        self._endpoint = endpoint
        self._served: deque[_Client] = deque()  # in order
        self._blocked: list[_Client] = []
        self._limiter = LogLimiter(10.0)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pump: Pump | None = None
        self._retry: asyncio.TimerHandle | None = None
        self._idle = asyncio.Event()

    async def wait_idle(self, timeout: float) -> None:
        """Wait until all answers are complete, or ``timeout`` seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while self._served or self._blocked:
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
        """Take requests and send for one slice of time; return whether the loop must call again."""
        assert self._loop is not None
        assert self._pump is not None
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        self._served.extend(self._blocked)  # any change of state may have made room for any client
        self._blocked.clear()
        deadline = time.perf_counter() + _SLICE_S
        more_requests = self._accept(deadline)
        while self._served and time.perf_counter() < deadline:
            self._serve(self._served.popleft())
        if self._served or more_requests:
            return True
        if self._blocked:
            # ZeroMQ may report room for one client while another one is served; the descriptor is silent then.
            self._retry = self._loop.call_later(_RETRY_S, self._pump.run)
        else:
            self._idle.set()
        return False

    def _accept(self, deadline: float) -> bool:
        """Read requests; True if there may be more, and clients to spare."""
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
        entries: deque[Entry] = deque()
        try:
            start = wire.parse_request([frame.bytes for frame in frames[1:]])
        except CodecError as error:
            self._complain(frames[0], error)
        else:
            self.requests += 1
            entries = self.buffer.since(start)
        self._served.append(_Client(frames[0].bytes, entries, time.monotonic()))

    def _complain(self, frame: zmq.Frame, error: CodecError) -> None:
        self.malformed += 1
        try:
            address = frame.get("Peer-Address")
        except (zmq.ZMQError, KeyError):
            address = "an unknown address"
        text = "replay %s: malformed request from %s, identity %s: %s"
        self._limiter.warn(logger, text, self._endpoint, address, frame.bytes.hex(), error)

    def _serve(self, client: _Client) -> None:
        """Send a few batches; afterwards the client is ready, blocked or done."""
        send = self._socket.send
        for _ in range(_BATCHES_AT_A_TIME):
            if client.entries:
                *first, last = wire.reply(self._topic, *client.entries[0], self._form)
            else:
                *first, last = wire.end_reply(self._form)
            try:
                send(client.identity, _MORE)
                for frame in first:  # ZeroMQ has room for all frames, or for none
                    send(frame, _MORE)
                send(last, zmq.NOBLOCK)
            except zmq.Again:
                self._block(client)
                return
            except zmq.ZMQError as error:  # EHOSTUNREACH: the client is gone
                self.abandoned += 1
                logger.debug("replay %s: client %s left: %s", self._endpoint, client.identity.hex(), error)
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
        logger.warning(text, self._endpoint, client.identity.hex(), waited)
