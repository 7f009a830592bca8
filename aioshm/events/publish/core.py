"""The core of every publisher: numbers and encodes batches, sends them on an event loop, and serves replays."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from contextlib import suppress
from dataclasses import replace

import zmq

from aioshm.arguments import check_int
from aioshm.errors import CodecError, PublisherClosed, QueueFull
from aioshm.events.config import CLOSE_TIMEOUT_S, KVEventsConfig, PublisherSettings, encoded_topic, passed_on
from aioshm.events.protocol.encoding import BatchEncoder
from aioshm.events.protocol.messages import EventBatch
from aioshm.events.protocol.outbox import Outbox, PublisherStats, ReplayBuffer
from aioshm.events.protocol.wire import MAX_SEQ, formats_of, pack_seq
from aioshm.events.publish.replay_server import ReplayServer
from aioshm.events.publish.sockets import PublisherSockets
from aioshm.logs import LogLimiter
from aioshm.process.limits import detach_when_forked
from aioshm.zeromq.sockets import send_message

logger: logging.Logger = logging.getLogger("aioshm.events")

# How long the core sends before the loop runs other callbacks.
_SLICE_S = 0.001
# How often subscriptions are read while batches are sent.
_LISTEN_S = 0.01
# How often `aclose` polls whether ZeroMQ has delivered everything.
_POLL_S = 0.005


class PublisherCore:
    """The queue, the encoder and the sockets of a publisher.

    Any thread may put a batch into ``outbox``. If ``outbox.put`` returns True, that thread has to make the loop call
    `drain`. All further methods are called on the loop.
    """

    def __init__(self, settings: PublisherSettings) -> None:
        encoding, replay_format = formats_of(settings.wire)
        check_int("hwm", settings.hwm, minimum=0, maximum=2**31 - 1)  # a C int
        self._topic = encoded_topic(settings.topic)
        buffer = ReplayBuffer(settings.buffer_steps)
        self._stats = PublisherStats()  # ``stats`` adds the outbox's numbers
        self.outbox: Outbox = Outbox(settings.max_queue_size, settings.overflow)
        self.inherited: bool = False  # whether this is a forked child's copy of an open publisher
        self._encode = BatchEncoder(encoding).encode
        self._rank = settings.data_parallel_rank
        self._overflowed = False
        self._listened_at = 0.0
        self._limiter = LogLimiter(10.0)
        self._stopped = False
        self._next: asyncio.Handle | None = None  # the scheduled call of `drain`
        self._abandoned_from = MAX_SEQ
        self._progress = asyncio.Event()  # set after each slice of sending, to wake waiting calls
        self._room_lock = asyncio.Lock()  # calls acquire it in order: one at a time waits for room
        self.sockets: PublisherSockets = PublisherSockets(settings, self._stats)
        self._server: ReplayServer | None = None
        if self.sockets.replay is not None:
            where = self.sockets.replay_endpoint or ""
            self._server = ReplayServer(self.sockets.replay, where, buffer, self._topic, replay_format, self._stats)
        self.config: KVEventsConfig = KVEventsConfig(
            enable_kv_cache_events=True,
            publisher="zmq",
            endpoint=passed_on(settings.endpoint, self.sockets.endpoint),
            replay_endpoint=passed_on(settings.replay_endpoint or "", self.sockets.replay_endpoint or "") or None,
            buffer_steps=settings.buffer_steps,
            hwm=settings.hwm,
            max_queue_size=settings.max_queue_size,
            topic=settings.topic,
        )
        detach_when_forked(self)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Send and serve on ``loop`` from now on."""
        self._loop = loop
        self.sockets.start(loop)
        if self._server is not None:
            self._server.start(loop)

    def drain(self) -> None:
        """Send for one slice of time, then let the loop run other callbacks."""
        if self._next is not None:
            self._next.cancel()
            self._next = None
        if self._stopped:
            return
        now = time.perf_counter()
        if now - self._listened_at > _LISTEN_S:
            self._listened_at = now
            self.sockets.read_subscriptions()
        done = False
        try:
            done = self._send_until(now + _SLICE_S)
        finally:  # a signal handler may raise; without a next call, later batches would never be sent
            if not done:
                self._drain_soon()
            self._progress.set()

    def _drain_soon(self) -> None:
        if self._next is None:
            self._next = self._loop.call_soon(self.drain)

    def _send_until(self, deadline: float) -> bool:
        """Send until the deadline (``time.perf_counter``); True if nothing is left."""
        waiting = self.outbox.waiting
        while (item := waiting.popleft() if waiting else self.outbox.take()) is not None:  # ``take`` acquires a lock
            seq, batch = item
            self._send(seq, batch)
            if time.perf_counter() > deadline:
                break
        if self.outbox.dropped and not self._overflowed:
            self._overflowed = True
            logger.warning(
                "publisher %s: too many batches waited to be sent; %d batches so far are dropped: "
                "their numbers stay unused, so subscribers see the gap",
                self.sockets.endpoint,
                self.outbox.dropped,
            )
        return item is None

    def _send(self, seq: int, batch: EventBatch | None) -> None:
        if batch is None:
            batch = EventBatch(time.time(), [])
        try:
            payload = self._encode(batch, self._rank)
        except CodecError as error:
            self._stats.unencodable += 1
            self._complain("publisher %s: batch %d is lost: %s", seq, error)
            return
        # Buffer first: a subscriber that sees the live message and requests a replay must find the message there.
        if self._server is not None:
            self._server.buffer.append(seq, payload)
        self.outbox.last_sent = seq
        try:
            send_message(self.sockets.pub, (self._topic, pack_seq(seq), payload))
        except zmq.ZMQError as error:  # another part of the program has terminated the context
            self._stats.dropped += 1
            self._complain("publisher %s: batch %d cannot be sent: %s", seq, error)
        else:
            self._stats.sent += 1

    def _complain(self, text: str, seq: int, error: Exception) -> None:
        self._limiter.warn(logger, text, self.sockets.endpoint, seq, error, level=logging.ERROR)

    # Waiting

    async def put(self, batch: EventBatch, timeout: float | None) -> None:
        """Put a batch into the outbox; wait if the outbox is full, or if earlier calls wait for room."""
        waiting = len(self.outbox.waiting)
        try:
            async with asyncio.timeout(timeout), self._room_lock:
                while not self._try_put(batch):
                    self._drain_soon()  # a `publish` that was interrupted may not have woken the core
                    await self._next_progress()
        except TimeoutError:
            raise TimeoutError(f"{waiting} event batches still wait to be sent after {timeout} s") from None

    def _try_put(self, batch: EventBatch) -> bool:
        try:
            if self.outbox.put(batch, may_drop=False):
                self._drain_soon()
        except QueueFull:
            return False
        return True

    async def flush(self, timeout: float | None) -> None:
        """Wait until all batches published so far have been passed to ZeroMQ."""
        if self.outbox.waiting:
            self._drain_soon()  # as in `put`
        target = self.outbox.published
        waiting = self.outbox.waiting
        try:
            async with asyncio.timeout(timeout):
                while waiting and waiting[0][0] < target:
                    await self._next_progress()
        except TimeoutError:
            raise TimeoutError(f"{len(waiting)} event batches still wait to be sent after {timeout} s") from None
        if self._stopped and self._abandoned_from < target:
            raise PublisherClosed(f"closed before batch {self._abandoned_from} and later ones were sent")

    async def _next_progress(self) -> None:
        self._progress.clear()
        await self._progress.wait()

    # Closing

    async def aclose(self, timeout: float) -> None:
        """Send queued batches, finish replays in progress, and close. If cancelled, close immediately."""
        deadline = time.monotonic() + timeout
        linger = 0.0
        try:
            self.outbox.close()
            self._progress.set()
            with suppress(TimeoutError):  # ``stop`` logs the batches that are left
                await self.flush(timeout)
            if self._server is not None:
                await self._server.wait_idle(max(0.0, deadline - time.monotonic()))
            linger = max(0.0, deadline - time.monotonic())
        finally:
            closing = self.stop(linger)
        # Poll: after a fork, a child may have unregistered the pipe by which threads wake this loop, see epoll(7).
        while closing is not None and closing.is_alive():  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)

    def shutdown(self) -> None:
        """Send all queued batches synchronously, and close. No loop has to run."""
        self.outbox.close()
        self._send_until(time.perf_counter() + CLOSE_TIMEOUT_S)
        self.stop(CLOSE_TIMEOUT_S)

    def stop(self, linger: float) -> threading.Thread | None:
        """Close everything, and log the batches that were not sent; else as `PublisherSockets.close`. Idempotent."""
        self.outbox.close()
        self._stopped = True
        left = self.outbox.abandon()
        if left is not None:
            self._abandoned_from = left[0]
            logger.warning("publisher %s closed before batches %d to %d were sent", self.sockets.endpoint, *left)
        if self._server is not None:
            self._server.close()
        self._progress.set()
        return self.sockets.close(linger)

    def detach_after_fork(self) -> None:
        """Close in a forked child: the sockets belong to the parent."""
        self.inherited = not self.outbox.closed
        self.outbox.closed = True
        self._stopped = True

    def stats(self) -> PublisherStats:
        """Return the current counters."""
        return replace(
            self._stats,
            published=self.outbox.published,
            queued=len(self.outbox.waiting),
            dropped=self.outbox.dropped + self._stats.dropped,
        )
