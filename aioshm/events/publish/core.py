"""The core of every publisher: it numbers and encodes batches, sends them on an event loop, and serves replays."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from contextlib import suppress

import zmq

from aioshm.errors import CodecError, PublisherClosed
from aioshm.events.config import (
    CLOSE_TIMEOUT_S,
    DEFAULT_BUFFER_STEPS,
    DEFAULT_ENDPOINT,
    DEFAULT_HWM,
    DEFAULT_MAX_QUEUE_SIZE,
    KVEventsConfig,
    passed_on,
)
from aioshm.events.protocol.encoding import BatchEncoder
from aioshm.events.protocol.messages import EventBatch
from aioshm.events.protocol.outbox import Outbox, Overflow, ReplayBuffer
from aioshm.events.protocol.wire import (
    DEFAULT_WIRE,
    MAX_SEQ,
    MAX_TOPIC_BYTES,
    Encoding,
    ReplayFormat,
    Wire,
    pack_seq,
    resolve_wire,
)
from aioshm.events.publish.replay_server import ReplayServer
from aioshm.events.publish.sockets import PublisherEnds
from aioshm.events.stats import PublisherStats
from aioshm.logs import LogLimiter
from aioshm.process.limits import detach_when_forked
from aioshm.zeromq.endpoint import CurveKeys

logger: logging.Logger = logging.getLogger("aioshm.events")

# How long the core sends before the loop runs other callbacks.
_SLICE_S = 0.001

# If batches come less than _BUSY_S apart, up to _TOGETHER of them are sent in one go, after _GATHER_S at the latest:
# waking ZeroMQ's thread and running a callback for each batch costs a third as much as encoding the batch.
_BUSY_S = 30e-6
_TOGETHER = 64
_GATHER_S = 0.001
# How often a busy core reads subscriptions: sending may consume the signal of ZeroMQ that some have arrived.
_LISTEN_S = 0.25

# How often `aclose` polls whether ZeroMQ has delivered everything.
_LOOK_S = 0.005

_MORE, _LAST = zmq.NOBLOCK | zmq.SNDMORE, zmq.NOBLOCK


class PublisherCore:
    """The queue, the encoder, the replay buffer and the sockets of a publisher; see `ZmqEventPublisher`.

    Any thread may put a batch into ``outbox``. If ``outbox.put`` returns True, that thread has to make the loop call
    `drain`. Everything else is called on the loop.
    """

    def __init__(
        self,
        data_parallel_rank: int,
        endpoint: str = DEFAULT_ENDPOINT,
        replay_endpoint: str | None = None,
        buffer_steps: int = DEFAULT_BUFFER_STEPS,
        hwm: int = DEFAULT_HWM,
        max_queue_size: int = DEFAULT_MAX_QUEUE_SIZE,
        topic: str = "",
        *,
        bind: bool | None = None,
        wire: Wire = DEFAULT_WIRE,
        encoding: Encoding | None = None,
        replay_format: ReplayFormat | None = None,
        overflow: Overflow = "drop",
        curve: CurveKeys | None = None,
    ) -> None:
        form, reply_form = resolve_wire(wire, encoding, replay_format)
        if hwm < 0:
            raise ValueError(f"hwm must not be negative, not {hwm}")
        self._topic = topic.encode()
        if len(self._topic) > MAX_TOPIC_BYTES:
            raise ValueError(f"topic must have at most {MAX_TOPIC_BYTES} bytes, not {len(self._topic)}")
        self.outbox: Outbox = Outbox(max_queue_size, overflow)
        self._encode = BatchEncoder(form).encode
        self._buffer = ReplayBuffer(buffer_steps)
        self._rank = data_parallel_rank
        self._sent = 0
        self._unencodable = 0
        self._overflowed = False
        self._limiter = LogLimiter(10.0)
        self._stopped = False
        self._abandoned_from = MAX_SEQ
        self._drained_at = 0.0
        self._listened_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._progress = asyncio.Event()  # set after each slice of sending, to wake waiting calls
        self._room_lock = asyncio.Lock()  # calls acquire it in order: one at a time waits for room
        self.ends: PublisherEnds = PublisherEnds(
            data_parallel_rank, endpoint, replay_endpoint, bind=bind, hwm=hwm, curve=curve
        )
        self._send_frame = self.ends.pub.send
        self._server: ReplayServer | None = None
        if self.ends.replay is not None:
            where = self.ends.replay_endpoint or ""
            self._server = ReplayServer(self.ends.replay, self._buffer, self._topic, reply_form, where)
        self.config: KVEventsConfig = KVEventsConfig(
            enable_kv_cache_events=True,
            publisher="zmq",
            endpoint=passed_on(endpoint, self.ends.endpoint),
            replay_endpoint=passed_on(replay_endpoint or "", self.ends.replay_endpoint or "") or None,
            buffer_steps=buffer_steps,
            hwm=hwm,
            max_queue_size=max_queue_size,
            topic=topic,
        )
        detach_when_forked(self)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Send and serve on ``loop`` from now on."""
        self._loop = loop
        self.ends.start(loop)
        if self._server is not None:
            self._server.start(loop)

    def drain(self) -> None:
        """Send for one slice of time, then let the loop run other callbacks."""
        if self._stopped:
            return
        now = time.perf_counter()
        waiting = len(self.outbox.waiting)
        if now - self._listened_at > _LISTEN_S:
            self._listened_at = now
            self.ends.read_subscriptions()
        busy = waiting <= _TOGETHER and now - self._drained_at < waiting * _BUSY_S
        self._drained_at = now
        if not self._send_until(now + _SLICE_S):
            self._loop.call_soon(self.drain)
        elif busy:
            self.outbox.gather(_TOGETHER)
            if self._timer is None:
                self._timer = self._loop.call_later(_GATHER_S, self._drain_late)
        self._progress.set()
        if self.outbox.blocked:
            self.outbox.make_room()

    def _drain_late(self) -> None:
        """Send the gathered batches, although fewer than `_TOGETHER` have come."""
        self._timer = None
        self.drain()

    def _send_until(self, deadline: float) -> bool:
        """Send until the deadline (``time.perf_counter``); True if nothing is left."""
        waiting, take, clock = self.outbox.waiting, self.outbox.take, time.perf_counter
        while (item := waiting.popleft() if waiting else take()) is not None:  # ``take`` acquires a lock
            seq, batch = item
            self._send(seq, batch)
            if clock() > deadline:
                break
        if self.outbox.first_dropped is not None and not self._overflowed:
            self._overflowed = True
            logger.warning(
                "publisher %s: too many batches waited to be sent; batch %d and maybe later ones are dropped: "
                "their numbers stay unused, so subscribers see the gap",
                self.ends.endpoint,
                self.outbox.first_dropped,
            )
        return item is None

    def _send(self, seq: int, batch: EventBatch | None) -> None:
        if batch is None:
            batch = EventBatch(time.time(), [])
        try:
            payload = self._encode(batch, self._rank)
        except CodecError as error:
            self._unencodable += 1
            self._complain("publisher %s: batch %d is lost: %s", seq, error)
            return
        # Buffer first: a subscriber that sees the live message and requests a replay must find the message there.
        if self._server is not None:
            self._buffer.append(seq, payload)
        self.outbox.last_sent = seq
        send = self._send_frame
        try:
            send(self._topic, _MORE)
            send(pack_seq(seq), _MORE)
            send(payload, _LAST)
        except zmq.ZMQError as error:  # another part of the program has terminated the context
            self.outbox.dropped += 1
            self._complain("publisher %s: batch %d cannot be sent: %s", seq, error)
        else:
            self._sent += 1

    def _complain(self, text: str, seq: int, error: Exception) -> None:
        self._limiter.warn(logger, text, self.ends.endpoint, seq, error, level=logging.ERROR)

    # Waiting

    async def put(self, batch: EventBatch, timeout: float | None) -> None:
        """Put a batch into the outbox; wait if the outbox is full, or if earlier calls wait for room."""
        waiting = len(self.outbox.waiting)
        try:
            async with asyncio.timeout(timeout), self._room_lock:
                while self.outbox.room <= 0 and not self.outbox.closed:
                    await self._next_progress()
                if self.outbox.put(batch):
                    self._loop.call_soon(self.drain)
        except TimeoutError:
            raise TimeoutError(f"{waiting} event batches still wait to be sent after {timeout} s") from None

    async def flush(self, timeout: float | None) -> None:
        """Wait until everything published so far has been handed to ZeroMQ."""
        if self.outbox.waiting:
            self._loop.call_soon(self.drain)  # the core may still be gathering batches
        target = self.outbox.published
        waiting = 0
        try:
            async with asyncio.timeout(timeout):
                while (waiting := self.outbox.waiting_before(target)) > 0:
                    await self._next_progress()
        except TimeoutError:
            raise TimeoutError(f"{waiting} event batches still wait to be sent after {timeout} s") from None
        if self._stopped and self._abandoned_from < target:
            raise PublisherClosed(f"closed before batch {self._abandoned_from} and later ones were sent")

    async def _next_progress(self) -> None:
        self._progress.clear()
        await self._progress.wait()

    # Closing

    def refuse(self) -> None:
        """Accept no more batches, and wake the calls that wait for room. Called on the loop."""
        self.outbox.close()
        self._progress.set()

    async def aclose(self, timeout: float) -> None:
        """Send queued batches, finish replays in progress, and close. If cancelled, close immediately."""
        deadline = time.monotonic() + timeout
        linger = 0.0
        try:
            self.refuse()
            with suppress(TimeoutError):  # ``stop`` logs the batches that are left
                await self.flush(timeout)
            if self._server is not None:
                await self._server.wait_idle(max(0.0, deadline - time.monotonic()))
            linger = max(0.0, deadline - time.monotonic())
        finally:
            closing = self.stop(linger)
        # Poll: after a fork, a child may have unregistered the pipe by which threads wake this loop, see epoll(7).
        while closing is not None and closing.is_alive():  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_S)

    def shutdown(self) -> None:
        """Send everything that is queued, synchronously, and close. No loop has to run."""
        self.refuse()
        self._send_until(time.perf_counter() + CLOSE_TIMEOUT_S)
        self.stop(CLOSE_TIMEOUT_S)

    def stop(self, linger: float) -> threading.Thread | None:
        """Close everything, and log which batches were not sent. Idempotent."""
        self.outbox.close()
        self._stopped = True
        left = self.outbox.abandon()
        if left is not None:
            self._abandoned_from = left[0]
            logger.warning("publisher %s closed before batches %d to %d were sent", self.ends.endpoint, *left)
        if self._server is not None:
            self._server.close()
        self._progress.set()
        return self.ends.close(linger)

    def detach_after_fork(self) -> None:
        """Stop in a forked child: the sockets belong to the parent."""
        self._stopped = True

    def stats(self) -> PublisherStats:
        """Return the counters up to now."""
        server = self._server
        return PublisherStats(
            published=self.outbox.published,
            sent=self._sent,
            queued=len(self.outbox.waiting),
            dropped=self.outbox.dropped,
            unencodable=self._unencodable,
            replay_requests=server.requests if server else 0,
            replayed=server.replayed if server else 0,
            malformed_requests=server.malformed if server else 0,
            abandoned_replays=server.abandoned if server else 0,
            handshake_failures=self.ends.handshake_failures,
            cut_off=self.ends.cut_off,
        )
