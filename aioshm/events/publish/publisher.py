"""The interface of publishers, the publisher that does nothing, and the publisher on an event loop."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from threading import get_ident
from typing import ClassVar, Unpack

from aioshm.closing import AsyncClosing, warn_not_closed
from aioshm.errors import PublisherClosed, RoleError
from aioshm.events.config import (
    CLOSE_TIMEOUT_S,
    DEFAULT_BUFFER_STEPS,
    DEFAULT_ENDPOINT,
    KVEventsConfig,
    PublisherOptions,
    PublisherSettings,
    for_rank,
)
from aioshm.events.protocol.messages import EventBatch
from aioshm.events.protocol.outbox import Overflow, PublisherStats
from aioshm.events.protocol.wire import END_SEQ
from aioshm.events.publish.core import PublisherCore
from aioshm.zeromq.hosts import connectable


class EventPublisher(ABC):
    """Sends event batches, in order, to all subscribers.

    Every data-parallel rank has its own publisher, which writes its rank into batches without a rank.
    """

    def __init__(self, data_parallel_rank: int = 0) -> None:
        if isinstance(data_parallel_rank, bool) or not isinstance(data_parallel_rank, int):
            raise TypeError(f"data_parallel_rank must be an int, not {type(data_parallel_rank).__name__}")
        if data_parallel_rank < 0:
            raise ValueError(f"data_parallel_rank must not be negative, not {data_parallel_rank}")
        self._data_parallel_rank = data_parallel_rank

    END_SEQ: ClassVar[bytes] = END_SEQ
    """The number in the frame that ends a replay."""

    SHUTDOWN_TIMEOUT: ClassVar[float] = CLOSE_TIMEOUT_S
    """How many seconds ``shutdown`` sends queued batches."""

    @staticmethod
    def offset_endpoint_port(endpoint: str | None, data_parallel_rank: int) -> str | None:
        """Return the endpoint of one rank: the rank is added to the port, and names get a suffix; None stays None.

        Raises:
            ValueError: The endpoint is invalid, or the port would be above 65535.
        """
        if not endpoint:
            return endpoint
        return for_rank(endpoint, data_parallel_rank)

    @abstractmethod
    def publish(self, events: EventBatch) -> None:
        """Number the batch and queue it for sending; never waits for the network."""

    @abstractmethod
    def shutdown(self) -> None:
        """Send queued batches, then close. Idempotent."""

    def get_publisher_config(self) -> KVEventsConfig | None:
        """Return the configuration in effect, or None if this publisher has no configuration."""
        return None


class NullEventPublisher(EventPublisher):
    """Drops everything: the publisher for disabled events."""

    def publish(self, events: EventBatch) -> None:
        """Do nothing."""

    async def apublish(self, events: EventBatch, timeout: float | None = None) -> None:
        """Do nothing."""

    def shutdown(self) -> None:
        """Do nothing."""


class CorePublisher(EventPublisher):
    """A publisher that sends through a `PublisherCore`."""

    _core: PublisherCore
    _overflow: ClassVar[Overflow] = "drop"  # the default

    def __init__(
        self,
        data_parallel_rank: int,
        endpoint: str = DEFAULT_ENDPOINT,
        replay_endpoint: str | None = None,
        buffer_steps: int = DEFAULT_BUFFER_STEPS,
        **options: Unpack[PublisherOptions],
    ) -> None:
        super().__init__(data_parallel_rank)
        options.setdefault("overflow", self._overflow)
        settings = PublisherSettings(
            data_parallel_rank=data_parallel_rank,
            endpoint=endpoint,
            replay_endpoint=replay_endpoint,
            buffer_steps=buffer_steps,
            **options,
        )
        self._open(settings)

    @abstractmethod
    def _open(self, settings: PublisherSettings) -> None:
        """Create the core."""

    @property
    def endpoint(self) -> str:
        """The endpoint of the batches: with the rank added, and port 0 replaced by the bound port."""
        return self._core.sockets.endpoint

    @property
    def connect_endpoint(self) -> str:
        """``endpoint`` for subscribers: with this host's own address if all of its addresses are bound."""
        return connectable(self.endpoint)

    @property
    def replay_endpoint(self) -> str | None:
        """The bound endpoint for replay requests, or None."""
        return self._core.sockets.replay_endpoint

    @property
    def connect_replay_endpoint(self) -> str | None:
        """``replay_endpoint`` for subscribers, or None."""
        if self.replay_endpoint is None:
            return None
        return connectable(self.replay_endpoint)

    def get_publisher_config(self) -> KVEventsConfig:
        """Return the configuration with the endpoints in use."""
        return self._core.config

    def stats(self) -> PublisherStats:
        """Return the current counters."""
        return self._core.stats()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} at {self.endpoint}>"


class ZmqEventPublisher(AsyncClosing, CorePublisher):
    """Publishes on the running event loop; ``publish`` takes about a microsecond and never waits.

    ``await apublish(batch)`` waits while the queue is full, so nothing is dropped.

    The constructor binds the sockets, also without a running loop. Sending and replay begin on the loop that runs
    then, or else at the first call from a loop. All calls must come from that loop's thread. Without a
    loop, or with many threads, use ``ThreadedEventPublisher``.

    A batch belongs to the publisher after publishing: the publisher encodes the batch later, so the caller must not
    change it any more.

    If the queue is full (``max_queue_size``), ``publish`` drops the new batch: its number is used up, the drop is
    counted and logged once, and subscribers notice the hole. With ``overflow="raise"``, ``publish`` raises
    ``QueueFull`` instead and uses no number. A batch that cannot be encoded leaves such a hole, too.

    Args:
        data_parallel_rank: Written into batches without a rank; also added to the ports of the endpoints.
        endpoint: Endpoint of the batches.
        replay_endpoint: Endpoint for replay requests; None for no replay. Always bound.
        buffer_steps: Batches kept for replay.
        **options: Further options by name: ``hwm``, ``max_queue_size``, ``topic``, ``bind``, ``wire``,
            ``overflow``, ``curve``. See `PublisherOptions`.

    Raises:
        OSError: An endpoint cannot be bound; the text names the endpoint.
        OutOfDescriptors, OutOfThreads: The process has too few descriptors or threads left for ZeroMQ.
        ValueError: An argument is invalid; the text names the argument.
    """

    def _open(self, settings: PublisherSettings) -> None:
        if settings.overflow == "block":
            raise ValueError(
                "overflow must be 'drop' or 'raise', not 'block': it would stop the loop that makes room; "
                "await apublish instead"
            )
        self._core = PublisherCore(settings)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread_id = 0
        self._attach_to_loop(required=False)

    async def apublish(self, events: EventBatch, timeout: float | None = None) -> None:
        """Number the batch and queue it; wait while the queue is full.

        Waiting calls are served in order. A call that is cancelled or times out has sent nothing and used no number.

        Args:
            events: The batch.
            timeout: Seconds to wait for room; None waits for ever.

        Raises:
            TimeoutError: There was no room in time.
            PublisherClosed: The publisher was closed, before or during this call.
            RoleError: Called on another loop than the publisher's.
            TypeError: Not an ``EventBatch``.
        """
        if not isinstance(events, EventBatch):
            raise TypeError(f"apublish takes an EventBatch, not {type(events).__name__}")
        self._check_open()
        self._attach_to_loop(required=True)
        await self._core.put(events, timeout)

    def publish(self, events: EventBatch) -> None:
        """Number the batch and queue it; a later iteration of the loop encodes and sends it.

        Raises:
            PublisherClosed: The publisher was closed.
            QueueFull: No room, and ``overflow`` is ``"raise"``.
            RoleError: Called outside the publisher's event loop or from another thread.
            TypeError: Not an ``EventBatch``.
        """
        if self._core.outbox.closed:
            self._check_open()
        if not isinstance(events, EventBatch):
            raise TypeError(f"publish takes an EventBatch, not {type(events).__name__}")
        if self._thread_id != get_ident():
            self._attach_to_loop(required=True)
        if self._core.outbox.put(events):
            assert self._loop is not None
            self._loop.call_soon(self._core.drain)

    async def flush(self, timeout: float | None = None) -> None:
        """Wait until all batches published so far have been passed to ZeroMQ.

        Cancelling this call loses nothing. The publisher cannot know whether a subscriber received them: PUB has no
        acknowledgements.

        Args:
            timeout: Seconds to wait; None waits for ever.

        Raises:
            TimeoutError: Some batches still wait; the text says how many.
            PublisherClosed: The publisher was closed during this call, before the batches were sent.
            RoleError: Called on another loop than the publisher's.
        """
        if self._core.inherited:
            self._check_open()
        if not self._core.outbox.closed:
            self._attach_to_loop(required=True)
            await self._core.flush(timeout)

    async def aclose(self, timeout: float = CLOSE_TIMEOUT_S) -> None:
        """Send queued batches, finish replays in progress, and close.

        Batches that could not be sent within the timeout are named in a warning and counted as dropped. If cancelled,
        this call closes immediately. ``publish`` raises from the first call on. Idempotent.

        Args:
            timeout: Seconds for everything, including ZeroMQ's own delivery to connected subscribers.
        """
        if not self._core.outbox.closed:
            self._attach_to_loop(required=True)
            await self._core.aclose(timeout)

    def shutdown(self) -> None:
        """Send all queued batches synchronously, and close; for callers that cannot await.

        ZeroMQ delivers in the background for up to a second, while the process lives.
        """
        if not self._core.outbox.closed:
            self._core.shutdown()

    async def __aenter__(self) -> ZmqEventPublisher:
        self._attach_to_loop(required=True)
        return self

    def __del__(self) -> None:
        core = getattr(self, "_core", None)  # None if an argument was invalid
        if core is not None and not core.outbox.closed:
            warn_not_closed(self)
            core.stop(0.0)

    def _check_open(self) -> None:
        if self._core.inherited:
            raise RoleError(f"the event publisher {self.endpoint} belongs to the process that this one was forked from")
        if self._core.outbox.closed:
            raise PublisherClosed("this event publisher is closed")

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
            self._core.start(loop)
        elif self._loop is not loop:
            raise RoleError("this event publisher belongs to another event loop")
