"""The publisher on an event loop: PUB for what happens now, ROUTER for batches that were missed."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from threading import get_ident

from aioshm.closing import AsyncClosing, warn_not_closed
from aioshm.errors import PublisherClosed, RoleError
from aioshm.events.config import (
    CLOSE_TIMEOUT_S,
    DEFAULT_BUFFER_STEPS,
    DEFAULT_ENDPOINT,
    DEFAULT_HWM,
    DEFAULT_MAX_QUEUE_SIZE,
    KVEventsConfig,
)
from aioshm.events.endpoints import passed_on
from aioshm.events.protocol.encoding import BatchEncoder
from aioshm.events.protocol.messages import EventBatch
from aioshm.events.protocol.outbox import Outbox, Overflow
from aioshm.events.protocol.replay_buffer import ReplayBuffer
from aioshm.events.protocol.wire import (
    DEFAULT_WIRE,
    MAX_SEQ,
    MAX_TOPIC_BYTES,
    Encoding,
    ReplayFormat,
    Wire,
    resolve_wire,
)
from aioshm.events.publish.base import EventPublisher
from aioshm.events.publish.replay_server import ReplayServer
from aioshm.events.publish.sender import Sender
from aioshm.events.publish.sockets import PublisherEnds
from aioshm.events.publish.waits import SenderWaits
from aioshm.events.stats import PublisherStats
from aioshm.lifeline.address import connectable
from aioshm.process.limits import abandon_when_forked
from aioshm.zeromq.curve import CurveKeys

logger: logging.Logger = logging.getLogger("aioshm.events")

# How long the sender works before it lets the loop do something else.
_SLICE_S = 0.001

# Batches that come faster than one in so many seconds go out some at a time, or after so many seconds at most: waking
# ZeroMQ's thread for each of them, and the loop's own work for a callback, cost a third of what encoding one does.
_BUSY_S = 30e-6
_TOGETHER = 64
_GATHER_S = 0.001
# How often a sender that never rests looks what is subscribed to: ZeroMQ may have noticed while it sent.
_LISTEN_S = 0.25


class ZmqEventPublisher(AsyncClosing, EventPublisher):
    """Publishes on the running event loop; ``publish`` costs about a microsecond and never waits.

    ``await apublish(batch)`` waits while the queue is full, so nothing is dropped.

    Sockets are bound when it is made, also outside a loop; sending and replay begin on the loop that runs
    then, or else at the first call from one. All calls must come from that loop's thread; callers without a
    loop, or in many threads, take ``ThreadedEventPublisher``.

    Batches that follow each other within microseconds go out together, a millisecond later at most.

    A batch belongs to the publisher once it is published: it is encoded later, when the caller's step is
    over, so changing it afterwards changes what is sent.

    Where the queue is full (``max_queue_size``), ``publish`` drops the new batch: its number is used up, the drop is
    counted and logged once, and subscribers see the hole. With ``overflow="raise"`` it raises ``QueueFull`` instead and
    gives no number. A batch that cannot be encoded leaves such a hole, too.

    Args:
        data_parallel_rank: Written into batches that name no rank; also moves the endpoints (``for_rank``).
        endpoint: Where batches go out.
        replay_endpoint: Where missed batches can be asked for; None for no replay. Always bound.
        buffer_steps: Batches kept for replay.
        hwm: Batches that ZeroMQ queues for one slow subscriber; beyond that it misses some, and can replay
            them.
        max_queue_size: Batches that may wait to be sent.
        topic: The first frame of every message; at most 512 bytes.
        bind: Bind the endpoint, or connect to it; None is vLLM's rule: wildcards, ``::``, ipc and inproc
            bind. By that rule ``tcp://127.0.0.1:5557`` connects; of this host's own addresses a warning says that.
        wire: Which releases of vLLM to write like, for consumers that were made for them: ``"vllm-0.24+"`` (maps, and
            the topic in replies), ``"vllm-0.24"`` (maps, no topic) or ``"vllm-0.9"`` to 0.23 (arrays, no topic).
        encoding: ``"array"`` or ``"map"``, where it is not that of ``wire``.
        replay_format: ``"topic"`` or ``"legacy"`` (no topic frame in replies), where it is not that of ``wire``.
        overflow: ``"drop"`` or ``"raise"``: what ``publish`` does where the queue is full.
        curve: Keys for an encrypted connection.

    Raises:
        OSError: An endpoint cannot be bound; the text names it.
        OutOfDescriptors, OutOfThreads: This process cannot have what ZeroMQ needs.
        ValueError: An argument makes no sense; the text names it.
    """

    _overflows: tuple[str, ...] = ("drop", "raise")

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
        self._closed = self._stopped = True  # until everything below has worked
        self._inherited = False
        super().__init__(data_parallel_rank)
        form, reply_form = resolve_wire(wire, encoding, replay_format)
        if hwm < 0:
            raise ValueError(f"hwm must not be negative, not {hwm}")
        topic_frame = topic.encode()
        if len(topic_frame) > MAX_TOPIC_BYTES:
            raise ValueError(f"topic must have at most {MAX_TOPIC_BYTES} bytes, not {len(topic_frame)}")
        if overflow not in self._overflows:
            hint = ": it would stop the loop that makes room; await apublish instead" if overflow == "block" else ""
            raise ValueError(f"overflow must be one of {self._overflows}, not {overflow!r}{hint}")
        encoder = BatchEncoder(form)
        self._outbox = Outbox(max_queue_size, overflow)
        buffer = ReplayBuffer(buffer_steps)
        self._abandoned_from = MAX_SEQ
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread_id = 0
        self._waits = SenderWaits(self._outbox)
        self._drained_at = 0.0
        self._listened_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._ends = PublisherEnds(data_parallel_rank, endpoint, replay_endpoint, bind=bind, hwm=hwm, curve=curve)
        self._server: ReplayServer | None = None
        if self._ends.replay is not None:
            where = self._ends.replay_endpoint or ""
            self._server = ReplayServer(self._ends.replay, buffer, topic_frame, reply_form, where)
        # Without a server nobody can ask for what the buffer would hold.
        kept = buffer if self._server is not None else None
        self._sender = Sender(self._outbox, encoder, kept, self._ends, topic_frame, data_parallel_rank)
        self._config = KVEventsConfig(
            enable_kv_cache_events=True,
            publisher="zmq",
            endpoint=passed_on(endpoint, self.endpoint),
            replay_endpoint=passed_on(replay_endpoint or "", self.replay_endpoint) if self.replay_endpoint else None,
            buffer_steps=buffer_steps,
            hwm=hwm,
            max_queue_size=max_queue_size,
            topic=topic,
        )
        self._closed = self._stopped = False
        abandon_when_forked(self)
        self._attach_to_loop(required=False)

    @property
    def endpoint(self) -> str:
        """Where batches really go out: rank added, port 0 replaced by the port that was bound."""
        return self._ends.endpoint

    @property
    def connect_endpoint(self) -> str:
        """What to pass on to subscribers: ``endpoint``, with this host's own address where all of them are bound."""
        return connectable(self._ends.endpoint)

    @property
    def replay_endpoint(self) -> str | None:
        """Where replay requests are really served, or None."""
        return self._ends.replay_endpoint

    @property
    def connect_replay_endpoint(self) -> str | None:
        """What to pass on to those who replay, or None."""
        return None if self._ends.replay_endpoint is None else connectable(self._ends.replay_endpoint)

    def get_publisher_config(self) -> KVEventsConfig:
        """Return the configuration with the endpoints that are really in use."""
        return self._config

    async def apublish(self, events: EventBatch, timeout: float | None = None) -> None:
        """Number the batch and queue it; wait while the queue is full.

        Those who wait are served in turn. Cancelled, or out of time, a call has sent nothing and used no number.

        Args:
            events: The batch.
            timeout: Seconds to wait for room; None waits as long as it takes.

        Raises:
            TimeoutError: There was no room in time.
            PublisherClosed: The publisher was closed, before or meanwhile.
            RoleError: Called in another loop than the publisher's.
            TypeError: Not an ``EventBatch``.
        """
        if not isinstance(events, EventBatch):
            raise TypeError(f"apublish takes an EventBatch, not {type(events).__name__}")
        if not self._closed:
            self._attach_to_loop(required=True)
            if self._waits.for_room or self._outbox.room <= 0:
                await self._waits.room(timeout)
        self.publish(events)

    def publish(self, events: EventBatch) -> None:
        """Number the batch and queue it; it is encoded and sent on a later turn of the loop.

        Raises:
            PublisherClosed: The publisher was closed.
            QueueFull: No room, and ``overflow`` is ``"raise"``.
            RoleError: Called outside the publisher's event loop or from another thread.
            TypeError: Not an ``EventBatch``.
        """
        if self._closed:
            self._refuse_inherited()
            raise PublisherClosed("this event publisher is closed")
        if not isinstance(events, EventBatch):
            raise TypeError(f"publish takes an EventBatch, not {type(events).__name__}")
        if self._thread_id != get_ident():
            self._attach_to_loop(required=True)
        if self._outbox.put(events):
            self._wake()

    async def flush(self, timeout: float | None = None) -> None:
        """Wait until everything published so far has been handed to ZeroMQ.

        Cancelling this loses nothing. Whether a subscriber has it cannot be known: PUB has no answers.

        Args:
            timeout: Seconds to wait; None waits as long as it takes.

        Raises:
            TimeoutError: Some batches still wait; the text says how many.
            PublisherClosed: The publisher was closed meanwhile, before they were sent.
            RoleError: Called in another loop than the publisher's.
        """
        if self._closed:
            self._refuse_inherited()
            return
        self._attach_to_loop(required=True)
        await self._wait_sent(timeout)

    async def aclose(self, timeout: float = CLOSE_TIMEOUT_S) -> None:
        """Send what is queued, finish replays in progress, and close.

        What could not be sent within the timeout is named in a warning and counted as dropped. Cancelled, it
        closes at once. ``publish`` raises from the first call on; calling it again does nothing.

        Args:
            timeout: Seconds for all of it, ZeroMQ's own delivery to connected subscribers included.
        """
        if self._closed:
            return
        deadline = time.monotonic() + timeout
        linger = 0.0
        try:
            self._attach_to_loop(required=True)
            self._close_outbox()
            with suppress(TimeoutError):  # ``_stop`` says what is left
                await self._wait_sent(timeout)
            if self._server is not None:
                await self._server.wait_idle(max(0.0, deadline - time.monotonic()))
            linger = max(0.0, deadline - time.monotonic())
        finally:
            released = self._stop(linger)
        if released is not None:
            await released

    def shutdown(self) -> None:
        """Send everything that is queued now, here and at once, and close; for callers that cannot await.

        ZeroMQ delivers what it holds in the background, up to a second, as long as the process lives.
        """
        if self._closed:
            return
        self._close_outbox()
        self._sender.send_until(time.perf_counter() + CLOSE_TIMEOUT_S)
        self._stop(CLOSE_TIMEOUT_S)

    def stats(self) -> PublisherStats:
        """Return what was done so far."""
        server = self._server
        return PublisherStats(
            published=self._outbox.published,
            sent=self._sender.sent,
            queued=len(self._outbox.waiting),
            dropped=self._outbox.dropped,
            unencodable=self._sender.unencodable,
            replay_requests=server.requests if server else 0,
            replayed=server.replayed if server else 0,
            malformed_requests=server.malformed if server else 0,
            abandoned_replays=server.abandoned if server else 0,
            handshake_failures=self._ends.handshake_failures,
            cut_off=self._ends.cut_off,
        )

    async def __aenter__(self) -> ZmqEventPublisher:
        self._attach_to_loop(required=True)
        return self

    def __repr__(self) -> str:
        return f"<{type(self).__name__} at {self.endpoint}>"

    def __del__(self) -> None:
        if not self._closed:
            warn_not_closed(self)
            self._closed = True
            self._stop(0.0)

    # Sending

    def _wake(self) -> None:
        assert self._loop is not None
        self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        """Send for one slice of time, then let the loop do something else."""
        if self._stopped:
            return
        assert self._loop is not None
        now, waiting = time.perf_counter(), len(self._outbox.waiting)
        if now - self._listened_at > _LISTEN_S:
            self._listened_at = now
            self._ends.read_subscriptions()
        busy = waiting <= _TOGETHER and now - self._drained_at < waiting * _BUSY_S
        self._drained_at = now
        if not self._sender.send_until(now + _SLICE_S):
            self._loop.call_soon(self._drain)
        elif busy:
            self._outbox.gather(_TOGETHER)
            if self._timer is None:
                self._timer = self._loop.call_later(_GATHER_S, self._drain_late)
        if self._waits.pending:
            self._waits.turn()
        if self._outbox.blocked:
            self._outbox.make_room()

    def _drain_late(self) -> None:
        """Send what was gathered, if there are not enough to be sent together."""
        self._timer = None
        self._drain()

    async def _wait_sent(self, timeout: float | None) -> None:
        assert self._loop is not None
        if self._outbox.waiting:
            self._loop.call_soon(self._drain)  # it may be gathering
        target = self._outbox.published
        await self._waits.sent(target, timeout)
        if self._stopped and self._abandoned_from < target:
            raise PublisherClosed(f"closed before batch {self._abandoned_from} and later ones were sent")

    # Beginning and end

    def abandon_in_child(self) -> None:
        """Be closed, without touching what is the parent's."""
        self._inherited = not self._closed
        self._closed = self._stopped = True
        if self._server is not None:
            self._server.abandon_in_child()

    def _refuse_inherited(self) -> None:
        if self._inherited:
            raise RoleError(f"the event publisher {self.endpoint} belongs to the process that this one was forked from")

    def _attach_to_loop(self, *, required: bool) -> None:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            if not required:
                return
            raise RoleError(
                "ZmqEventPublisher publishes on its event loop; without a loop, or from other threads, "
                "use ThreadedEventPublisher"
            ) from None
        if self._loop is None:
            self._loop = loop
            self._thread_id = get_ident()
            self._ends.start(loop)
            if self._server is not None:
                self._server.start(loop)
        elif self._loop is not loop:
            raise RoleError("this event publisher belongs to another event loop")

    def _close_outbox(self) -> None:
        """Take no more batches; those who wait for room hear of it."""
        self._closed = True
        self._outbox.close()
        self._waits.close()

    def _stop(self, linger: float) -> asyncio.Future[None] | None:
        """Close everything and say what was not sent."""
        self._close_outbox()
        self._stopped = True
        left = self._outbox.abandon()
        if left is not None:
            self._abandoned_from = left[0]
            logger.warning("publisher %s closed before batches %d to %d were sent", self.endpoint, *left)
        if self._server is not None:
            self._server.close()
        self._waits.turn()
        return self._ends.close(linger)
