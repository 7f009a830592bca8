"""The subscriber: one stream of deliveries out of many publishers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import fields

import zmq

from aioshm.closing import AsyncClosing, warn_not_closed
from aioshm.errors import EndClosed, QueueClosed, RoleError
from aioshm.events.config import DEFAULT_MAX_BACKLOG_BYTES, DEFAULT_SUBSCRIBER_HWM, check_endpoint, subscriber_binds
from aioshm.events.protocol.decoding import MAX_PAYLOAD_BYTES
from aioshm.events.protocol.deliveries import Delivery, Received
from aioshm.events.protocol.messages import KVEventBatch
from aioshm.events.protocol.tracker import Start
from aioshm.events.protocol.wire import MAX_SEQ, MAX_TOPIC_BYTES
from aioshm.events.stats import SubscriberStats
from aioshm.events.subscribe.backlog import Inbox
from aioshm.events.subscribe.source import EventSource, SourceOptions
from aioshm.process.limits import detach_when_forked
from aioshm.zeromq.endpoint import CurveKeys
from aioshm.zeromq.hosts import is_loopback
from aioshm.zeromq.sockets import shared_context

logger: logging.Logger = logging.getLogger("aioshm.events")

# How long a replay may be silent before it is asked for again.
REPLAY_TIMEOUT_S = 5.0
# How long a publisher may be silent before it is asked whether its last messages were lost on the way.
CHECK_INTERVAL_S = 1.0
# How long nothing may be heard of a publisher whose connection has ended.
GONE_AFTER_S = 60.0
# Deliveries that may wait for the consumer; beyond that the sockets are not read.
DEFAULT_MAX_WAITING = 1024
# A hundred times what a step's batch has, a quarter of a million tokens: what a stranger may make an open port decode.
OPEN_MAX_PAYLOAD_BYTES = 1 << 21

_YIELD_EVERY = 64


class EventSubscriber(AsyncClosing):
    """Receives the batches of one or many publishers, each publisher's in order, without holes and copies.

    What live delivery lost is fetched from the replay endpoint, where one is given: a gap, what was published
    before this subscriber came, what was published while a connection was down, and the end of a stream after
    which nothing else came. What cannot be fetched is reported, as is a publisher whose numbers go back.

    There are two ways to read. ``async for seq, batch in subscriber`` raises ``EventsLost``,
    ``PublisherRestarted`` or ``PublisherDisconnected`` in its place in the stream, and continues behind it when it is
    entered again. ``deliveries()`` and ``receive()`` return ``Received``, ``Lost``, ``Restarted`` and
    ``PublisherGone`` and also name the publisher.

    Cancelling a wait loses nothing. While ``max_waiting`` deliveries wait for the consumer, the subscriber decodes
    nothing. Messages that are not decoded yet wait in a backlog of ``max_backlog_bytes`` for each endpoint. When the
    backlog is full, the subscriber drops the oldest half of it: ``stats().dropped`` counts the messages, a warning
    names the endpoint, and the gap is replayed, or reported as ``Lost``, like any gap.

    A publisher is recognised by replay after its connection broke. Without a replay endpoint, or where it does not
    answer, nothing shows that the next batch is of the same process: the publisher is then reported as ``Restarted``,
    and the numbers before that batch as ``Lost``. A publisher whose connection ended, and of which nothing was heard
    for ``gone_after_s``, is reported as ``PublisherGone`` and forgotten.

    Args:
        endpoints: One or several addresses of publishers, each with its own numbers.
        replay_endpoints: As many replay addresses; None for those without.
        topic: Only topics that begin with it; at most 512 bytes.
        start: The first number wanted of every publisher. None is 0: what was published before is replayed,
            or reported as lost. ``"live"`` begins with whatever comes first.
        bind: Bind the endpoints, for publishers that connect. None binds ``tcp://*:port`` only.
        hwm: Messages that ZeroMQ holds for each connection while the loop is blocked; at most 16 where any process may
            connect, see ``max_payload_bytes``. Further messages wait in the kernel and at the publisher.
        curve: Keys for encrypted connections.
        replay_timeout: Seconds that a replay may be silent. After three such silences a gap counts as lost.
        check_interval: Seconds of silence after which a publisher's replay endpoint is asked whether
            something was missed; doubled up to 30 s as long as it stays silent. None never asks.
        gone_after_s: Seconds without a sign of a publisher after its connection ended, or its replay endpoint answered
            without any of its batches, until it is reported as gone and forgotten. None never forgets.
        max_waiting: Deliveries that may wait for the consumer, as long as their payloads have 1 MiB together.
        max_backlog_bytes: Memory for messages of each endpoint that are not decoded yet; at least one message is kept.
        max_payload_bytes: The largest payload that is taken; ZeroMQ hangs up on a publisher that connects and sends a
            larger one. None is 2 MiB where this subscriber binds without keys, so that any process may connect, else
            16 MiB. A batch takes up to 34 times its size in memory.

    Raises:
        OSError: An endpoint cannot be bound or connected to; raised by the first wait.
        OutOfDescriptors, OutOfThreads: This process cannot have what ZeroMQ needs; raised by the first wait, too.
        ValueError: An argument makes no sense; the text names it.
    """

    def __init__(
        self,
        endpoints: str | Sequence[str],
        replay_endpoints: str | Sequence[str | None] | None = None,
        topic: str = "",
        *,
        start: Start = None,
        bind: bool | None = None,
        hwm: int = DEFAULT_SUBSCRIBER_HWM,
        curve: CurveKeys | None = None,
        replay_timeout: float = REPLAY_TIMEOUT_S,
        check_interval: float | None = CHECK_INTERVAL_S,
        gone_after_s: float | None = GONE_AFTER_S,
        max_waiting: int = DEFAULT_MAX_WAITING,
        max_payload_bytes: int | None = None,
        max_backlog_bytes: int = DEFAULT_MAX_BACKLOG_BYTES,
    ) -> None:
        self._sources: list[EventSource] = []
        self._final: SubscriberStats | None = None
        self._closed = False
        self._pairs = _pair_up(endpoints, replay_endpoints)
        if not (start is None or start == "live" or (isinstance(start, int) and 0 <= start <= MAX_SEQ)):
            raise ValueError(f"start must be a number from 0 to {MAX_SEQ}, 'live' or None, not {start!r}")
        if len(topic.encode()) > MAX_TOPIC_BYTES:
            raise ValueError(f"topic must have at most {MAX_TOPIC_BYTES} bytes, not {len(topic.encode())}")
        if replay_timeout <= 0 or (check_interval is not None and check_interval <= 0):
            raise ValueError(
                f"replay_timeout ({replay_timeout}) and check_interval ({check_interval}) must be positive"
            )
        if gone_after_s is not None and gone_after_s <= 0:
            raise ValueError(f"gone_after_s must be positive, not {gone_after_s}")
        if max_waiting < 1:
            raise ValueError(f"max_waiting must be at least 1, not {max_waiting}")
        if max_payload_bytes is not None and max_payload_bytes < 1:
            raise ValueError(f"max_payload_bytes must be at least 1, not {max_payload_bytes}")
        if max_backlog_bytes < 1:
            raise ValueError(f"max_backlog_bytes must be at least 1, not {max_backlog_bytes}")
        if hwm < 1:
            raise ValueError(f"hwm must be at least 1, not {hwm}")
        self._options = SourceOptions(
            topic=topic,
            start=start,
            hwm=hwm,
            curve=curve,
            replay_timeout=replay_timeout,
            check_interval=check_interval,
            gone_after_s=gone_after_s,
            max_backlog_bytes=max_backlog_bytes,
        )
        self._bind = bind
        self._max_payload_bytes = max_payload_bytes
        self._inbox = Inbox(max_waiting)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._since_yield = 0
        self._inherited = False  # whether this is a forked child's copy
        detach_when_forked(self)

    @property
    def endpoints(self) -> list[str]:
        """The addresses in use, in the order given; bound ports are known once reading has begun."""
        return [source.endpoint for source in self._sources] or [pair[0] for pair in self._pairs]

    @property
    def unconnected(self) -> list[str]:
        """The addresses at which nobody speaks now; none, before reading has begun."""
        return [source.endpoint for source in self._sources if not source.is_connected]

    def open(self) -> None:
        """Bind, connect and begin to read now instead of at the first wait; needs the running loop.

        Raises:
            OSError: An endpoint cannot be bound or connected to.
            QueueClosed: The subscriber was closed.
            RoleError: Another loop has begun to read.
        """
        loop = asyncio.get_running_loop()
        if self._closed:
            raise EndClosed("this event subscriber is closed")
        if self._loop is not None:
            if self._loop is not loop or self._inherited:
                where = "the process that this one was forked from" if self._inherited else "another event loop"
                raise RoleError(f"this event subscriber belongs to {where}")
            return
        # Each has a monitor, which takes two more; for a replay there is another one with a connection.
        count = len(self._pairs) + sum(replay is not None for _, replay in self._pairs)
        context = shared_context("a subscriber to events", sockets=2 * len(self._pairs) + count, connections=count)
        try:
            for endpoint, replay_endpoint in self._pairs:
                self._sources.append(self._make_source(loop, context, endpoint, replay_endpoint))
        except BaseException:
            self._close_sources()
            raise
        self._loop = loop

    async def receive(self, timeout: float | None = None) -> Delivery:
        """Return the next delivery. Cancelling this call loses nothing.

        Args:
            timeout: Seconds to wait; None waits for ever.

        Raises:
            TimeoutError: Nothing came in time.
            QueueClosed: The subscriber was closed.
            OSError: An endpoint cannot be bound or connected to.
        """
        self.open()
        self._since_yield += 1
        if self._since_yield >= _YIELD_EVERY:  # a stream that never runs dry must not starve other tasks
            self._since_yield = 0
            await asyncio.sleep(0)
        inbox = self._inbox
        if not inbox.waiting:
            async with asyncio.timeout(timeout):
                while not inbox.waiting and not self._closed:
                    inbox.raise_failure()
                    await inbox.arrival()
        if self._closed:
            raise EndClosed("this event subscriber is closed")
        delivery = inbox.take()
        if inbox.has_room_again():
            for source in self._sources:
                source.resume()
        return delivery

    async def deliveries(self) -> AsyncIterator[Delivery]:
        """Iterate over batches, losses, restarts and departures; ends when the subscriber is closed."""
        while not self._closed:
            try:
                delivery = await self.receive()
            except QueueClosed:
                return
            yield delivery

    def __aiter__(self) -> EventSubscriber:
        return self

    async def __anext__(self) -> tuple[int, KVEventBatch]:
        """Return the next batch and its number.

        Raises:
            EventsLost: Batches before the next one are lost; iterate again to continue behind them.
            PublisherRestarted: The next batch of that publisher is from a new one; iterate again to continue.
            PublisherDisconnected: A publisher is gone and forgotten; iterate again to continue.
        """
        try:
            delivery = await self.receive()
        except QueueClosed:
            raise StopAsyncIteration from None
        if isinstance(delivery, Received):
            return delivery.seq, delivery.batch
        raise delivery.error()

    def stats(self) -> SubscriberStats:
        """Return what was seen so far, over all endpoints."""
        if self._final is not None:
            return self._final
        all_stats = [source.stats() for source in self._sources]
        return SubscriberStats(*(sum(getattr(one, f.name) for one in all_stats) for f in fields(SubscriberStats)))

    async def aclose(self) -> None:
        """Close the sockets; iterations end, what was not read is dropped; idempotent."""
        self._closed = True
        self._close_sources()
        self._inbox.wake()

    async def __aenter__(self) -> EventSubscriber:
        self.open()
        return self

    def __repr__(self) -> str:
        return f"<EventSubscriber of {', '.join(self.endpoints)}>"

    def __del__(self) -> None:
        if getattr(self, "_sources", None):  # not if the arguments were refused
            warn_not_closed(self)
            self._close_sources()

    def detach_after_fork(self) -> None:
        """Be of no use."""
        self._inherited = self._loop is not None
        self._sources.clear()

    def _make_source(
        self,
        loop: asyncio.AbstractEventLoop,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        replay_endpoint: str | None,
    ) -> EventSource:
        binds = subscriber_binds(endpoint) if self._bind is None else self._bind
        open_to_all = binds and endpoint.startswith("tcp://") and self._options.curve is None
        if open_to_all and not is_loopback(endpoint):
            logger.warning(
                "events are taken from anybody who reaches %s, unencrypted: pass curve=, or bind a loopback address",
                endpoint,
            )
        return EventSource(
            loop,
            context,
            endpoint,
            replay_endpoint,
            self._options,
            bind=binds,
            max_payload_bytes=self._max_payload_bytes or (OPEN_MAX_PAYLOAD_BYTES if open_to_all else MAX_PAYLOAD_BYTES),
            inbox=self._inbox,
        )

    def _close_sources(self) -> None:
        if self._sources:
            self._final = self.stats()
        for source in self._sources:
            source.close()
        self._sources.clear()


def _pair_up(
    endpoints: str | Sequence[str], replay_endpoints: str | Sequence[str | None] | None
) -> list[tuple[str, str | None]]:
    """Put every endpoint together with its replay endpoint.

    Raises:
        ValueError: No endpoints, other numbers of them, or one that cannot be an endpoint.
    """
    lives = [endpoints] if isinstance(endpoints, str) else list(endpoints)
    if replay_endpoints is None:
        replays: list[str | None] = [None] * len(lives)
    else:
        replays = [replay_endpoints] if isinstance(replay_endpoints, str) else list(replay_endpoints)
    if not lives:
        raise ValueError("endpoints must name at least one publisher")
    if len(lives) != len(replays):
        raise ValueError(f"replay_endpoints has {len(replays)} entries for {len(lives)} endpoints")
    for replay in replays:
        if replay is not None:
            check_endpoint(replay, "replay_endpoints")
    return [(check_endpoint(live, "endpoints"), replay) for live, replay in zip(lives, replays, strict=True)]
