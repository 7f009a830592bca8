"""The subscriber: one stream of deliveries from many publishers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import astuple
from typing import Unpack

from aioshm.closing import AsyncClosing, warn_not_closed
from aioshm.errors import EndClosed, QueueClosed, RoleError
from aioshm.events.config import SubscriberOptions, SubscriberSettings, check_endpoint
from aioshm.events.protocol.messages import Delivery, KVEventBatch, Received
from aioshm.events.protocol.tracker import SubscriberStats
from aioshm.events.subscribe.source import EventSource, Inbox
from aioshm.process.limits import detach_when_forked
from aioshm.zeromq.sockets import shared_context

_YIELD_EVERY = 64


class EventSubscriber(AsyncClosing):
    """Receives the batches of one or many publishers, each publisher's in order, without gaps and duplicates.

    The subscriber requests batches that live delivery lost from the replay endpoint, if there is one: gaps, batches
    published before this subscriber came or while a connection was down, and the end of a stream if no later batch
    reveals the gap. Batches that replay does not have are reported as lost. A publisher that restarts is reported, too.

    There are two ways to read. ``async for seq, batch in subscriber`` raises ``EventsLost``,
    ``PublisherRestarted`` or ``PublisherDisconnected`` at its place in the stream; iterate again to
    continue. ``deliveries()`` and ``receive()`` return ``Received``, ``Lost``, ``Restarted`` and
    ``PublisherGone``, which also name the publisher.

    Cancelling a wait loses nothing. While ``max_waiting`` deliveries wait for the consumer, the subscriber decodes
    nothing. Messages that are not decoded yet wait in a backlog of ``max_backlog_bytes`` for each endpoint. When the
    backlog is full, the subscriber drops the oldest half of it: ``stats().dropped`` counts the messages, a warning
    names the endpoint, and the gap is replayed, or reported as ``Lost``, like any gap.

    After a broken connection, replay shows whether the publisher is still the same process. Without a replay endpoint,
    or without an answer, nothing does: the publisher is then reported as ``Restarted``, and the numbers before the next
    batch as ``Lost``. A publisher whose connection ended, and that stays silent for ``gone_after_s``, is reported as
    ``PublisherGone`` and forgotten.

    Args:
        endpoints: One or several addresses of publishers, each with its own numbers.
        replay_endpoints: As many replay addresses; None for publishers without replay.
        topic: Receive only topics that begin with this prefix; at most 512 bytes.
        **options: Further options by name: ``start``, ``bind``, ``curve``, ``replay_timeout``,
            ``check_interval``, ``gone_after_s``, ``max_waiting``, ``max_backlog_bytes``, ``max_payload_bytes``. See
            `SubscriberOptions`.

    Raises:
        OSError: An endpoint cannot be bound or connected to; raised by the first wait.
        OutOfDescriptors, OutOfThreads: The process has too few descriptors or threads left for ZeroMQ; raised by the
            first wait, too.
        ValueError: An argument is invalid; the text names the argument.
    """

    def __init__(
        self,
        endpoints: str | Sequence[str],
        replay_endpoints: str | Sequence[str | None] | None = None,
        topic: str = "",
        **options: Unpack[SubscriberOptions],
    ) -> None:
        self._closed = True  # until the arguments are found valid
        self._sources: list[EventSource] = []
        self._pairs = _pair_up(endpoints, replay_endpoints)
        self._settings = SubscriberSettings(topic=topic, **options)
        self._inbox = Inbox(self._settings.max_waiting)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._since_yield = 0
        self._inherited = False  # whether this is a forked child's copy
        self._closed = False
        detach_when_forked(self)

    @property
    def endpoints(self) -> list[str]:
        """The addresses in use, in the order given; bound ports are known once reading has begun."""
        return [source.port.endpoint for source in self._sources] or [pair[0] for pair in self._pairs]

    @property
    def unconnected(self) -> list[str]:
        """The addresses without a connected publisher; empty before reading has begun."""
        return [source.port.endpoint for source in self._sources if not source.port.connections]

    def open(self) -> None:
        """Bind, connect and begin to read now instead of at the first wait, on the running loop.

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
                owner = "another event loop"
                if self._inherited:
                    owner = "the process that this one was forked from"
                raise RoleError(f"this event subscriber belongs to {owner}")
            return
        # Each live socket has a monitor, which takes two more; each replay has a socket and a connection.
        count = len(self._pairs) + sum(replay is not None for _, replay in self._pairs)
        context = shared_context("a subscriber to events", sockets=2 * len(self._pairs) + count, connections=count)
        try:
            for endpoint, replay_endpoint in self._pairs:
                source = EventSource(loop, context, endpoint, replay_endpoint, self._settings, self._inbox)
                self._sources.append(source)
        except BaseException:
            self._close_sources()
            self._sources.clear()
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
        if self._since_yield >= _YIELD_EVERY:  # an endless stream must not starve other tasks
            self._since_yield = 0
            await asyncio.sleep(0)
        inbox = self._inbox
        if not inbox.waiting:
            async with asyncio.timeout(timeout):
                while not inbox.waiting and not self._closed:
                    if inbox.failure is not None:
                        raise inbox.failure
                    inbox.changed.clear()
                    await inbox.changed.wait()
        if self._closed:
            raise EndClosed("this event subscriber is closed")
        delivery = inbox.take()
        if inbox.is_half_empty:
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
        """Return the current counters, over all endpoints."""
        counters = zip(*(astuple(source.stats) for source in self._sources), strict=True)
        return SubscriberStats(*map(sum, counters))

    async def aclose(self) -> None:
        """Close the sockets. Iterations end, and undelivered batches are dropped. Idempotent."""
        self._closed = True
        self._close_sources()
        self._inbox.changed.set()

    async def __aenter__(self) -> EventSubscriber:
        self.open()
        return self

    def __repr__(self) -> str:
        return f"<EventSubscriber of {', '.join(self.endpoints)}>"

    def __del__(self) -> None:
        if not getattr(self, "_closed", True) and self._loop is not None and not self._inherited:
            warn_not_closed(self)
            self._close_sources()

    def detach_after_fork(self) -> None:
        """Become useless in a forked child: the sockets belong to the parent."""
        self._inherited = self._loop is not None

    def _close_sources(self) -> None:
        for source in self._sources:
            source.close()


def _pair_up(
    endpoints: str | Sequence[str], replay_endpoints: str | Sequence[str | None] | None
) -> list[tuple[str, str | None]]:
    """Pair every endpoint with its replay endpoint.

    Raises:
        ValueError: No endpoints, different numbers of them, or an invalid endpoint.
    """
    lives = [endpoints] if isinstance(endpoints, str) else list(endpoints)
    replays: list[str | None] = [None] * len(lives)
    if isinstance(replay_endpoints, str):
        replays = [replay_endpoints]
    elif replay_endpoints is not None:
        replays = list(replay_endpoints)
    if not lives:
        raise ValueError("endpoints must name at least one publisher")
    if len(lives) != len(replays):
        raise ValueError(f"replay_endpoints has {len(replays)} entries for {len(lives)} endpoints")
    pairs = []
    for live, replay in zip(lives, replays, strict=True):
        if replay is not None:
            check_endpoint(replay, "replay_endpoints")
        pairs.append((check_endpoint(live, "endpoints"), replay))
    return pairs
