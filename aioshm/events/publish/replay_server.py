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
from aioshm.events.protocol.outbox import Entry, PublisherStats, ReplayBuffer
from aioshm.logs import LogLimiter
from aioshm.zeromq.pump import Pump, drain, receive_frames
from aioshm.zeromq.sockets import send_message

logger: logging.Logger = logging.getLogger("aioshm.events")

MAX_CLIENTS = 64
STALLED_S = 30.0
_MAX_FRAMES = 4  # a request has three, with the client's identity

_SLICE_S = 0.0001
_REQUESTS_AT_A_TIME = 4
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
        self,
        socket: zmq.Socket[bytes],
        endpoint: str,
        buffer: ReplayBuffer,
        topic: bytes,
        form: wire.ReplayFormat,
        stats: PublisherStats,
    ) -> None:
        self.buffer: ReplayBuffer = buffer
        self._socket = socket
        self._endpoint = endpoint
        self._topic = topic
        self._form = form
        self._stats = stats
        self._clients: deque[_Client] = deque()  # in the order in which they are served
        self._limiter = LogLimiter(10.0)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pump: Pump | None = None
        self._retry: asyncio.TimerHandle | None = None
        self._idle = asyncio.Event()

    async def wait_idle(self, timeout: float) -> None:
        """Wait until all answers are complete, or ``timeout`` seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while self._clients:
                    self._idle.clear()
                    await self._idle.wait()

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Serve on ``loop`` from now on."""
        self._loop = loop
        self._pump = Pump(loop, self._socket, self._run)

    def close(self) -> None:
        """Stop serving; the caller closes the socket."""
        if self._pump is not None:
            self._pump.pause()
        self._cancel_retry()
        self._stats.abandoned_replays += len(self._clients)
        self._clients.clear()

    def _run(self) -> bool:
        """Take requests and send for one slice of time; return whether the loop must call again."""
        assert self._loop is not None
        assert self._pump is not None
        self._cancel_retry()
        burst = min(_REQUESTS_AT_A_TIME, MAX_CLIENTS - len(self._clients))
        has_more = burst > 0 and drain(self._socket, self._receive, self._take, burst)
        has_sent = False
        deadline = time.perf_counter() + _SLICE_S
        for _ in range(len(self._clients)):
            if self._serve(self._clients.popleft()):
                has_sent = True
                if time.perf_counter() > deadline:
                    break
        if not self._clients:
            self._idle.set()
        if has_sent:  # sending may swallow the notification of a request
            return True
        if self._clients and not has_more:
            # ZeroMQ may report room for one client while another one is served; the descriptor is silent then.
            self._retry = self._loop.call_later(_RETRY_S, self._pump.run)
        return has_more

    def _cancel_retry(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None

    def _receive(self) -> list[zmq.Frame]:
        return receive_frames(self._socket, _MAX_FRAMES)

    def _take(self, frames: list[zmq.Frame]) -> None:
        entries: deque[Entry] = deque()
        try:
            start = wire.parse_request([frame.bytes for frame in frames[1:]])
        except CodecError as error:
            self._complain(frames[0], error)
        else:
            self._stats.replay_requests += 1
            entries = self.buffer.since(start)
        self._clients.append(_Client(frames[0].bytes, entries, time.monotonic()))

    def _complain(self, frame: zmq.Frame, error: CodecError) -> None:
        self._stats.malformed_requests += 1
        try:
            address = frame.get("Peer-Address")
        except (zmq.ZMQError, KeyError):
            address = "an unknown address"
        text = "replay %s: malformed request from %s, identity %s: %s"
        self._limiter.warn(logger, text, self._endpoint, address, frame.bytes.hex(), error)

    def _serve(self, client: _Client) -> bool:
        """Send a few batches, and queue the client again unless its answer is over; True unless it has no room."""
        for count in range(_BATCHES_AT_A_TIME):
            if client.entries:
                frames = wire.reply(self._topic, *client.entries[0], self._form)
            else:
                frames = wire.end_reply(self._form)
            try:
                send_message(self._socket, [client.identity, *frames])  # ZeroMQ has room for all frames, or for none
            except zmq.Again:
                return self._give_up(client) or count > 0
            except zmq.ZMQError as error:  # EHOSTUNREACH: the client is gone
                self._stats.abandoned_replays += 1
                logger.debug("replay %s: client %s left: %s", self._endpoint, client.identity.hex(), error)
                return True
            if not client.entries:
                return True
            client.entries.popleft()
            client.moved = time.monotonic()
            self._stats.replayed += 1
        self._clients.append(client)
        return True

    def _give_up(self, client: _Client) -> bool:
        """Give up a client that has read nothing for too long, or queue it again; True if it is given up."""
        waited = time.monotonic() - client.moved
        if waited < STALLED_S:
            self._clients.append(client)
            return False
        self._stats.abandoned_replays += 1
        text = "replay %s: client %s has read nothing for %.0f s; giving it up"
        logger.warning(text, self._endpoint, client.identity.hex(), waited)
        return True
