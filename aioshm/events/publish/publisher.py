"""The publisher on an event loop: PUB for what happens now, ROUTER for batches that were missed."""

from __future__ import annotations

import asyncio
from threading import get_ident

from aioshm.closing import AsyncClosing, warn_not_closed
from aioshm.errors import PublisherClosed, RoleError
from aioshm.events.config import (
    CLOSE_TIMEOUT_S,
    DEFAULT_BUFFER_STEPS,
    DEFAULT_ENDPOINT,
    DEFAULT_HWM,
    DEFAULT_MAX_QUEUE_SIZE,
)
from aioshm.events.protocol.messages import EventBatch
from aioshm.events.protocol.outbox import Overflow
from aioshm.events.protocol.wire import DEFAULT_WIRE, Encoding, ReplayFormat, Wire
from aioshm.events.publish.base import CorePublisher
from aioshm.events.publish.core import PublisherCore
from aioshm.process.limits import detach_when_forked
from aioshm.zeromq.endpoint import CurveKeys


class ZmqEventPublisher(AsyncClosing, CorePublisher):
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
        self._closed = True  # until everything below has worked
        self._inherited = False
        super().__init__(data_parallel_rank)
        if overflow == "block":
            raise ValueError(
                "overflow must be 'drop' or 'raise', not 'block': it would stop the loop that makes room; "
                "await apublish instead"
            )
        self._core = PublisherCore(
            data_parallel_rank,
            endpoint,
            replay_endpoint,
            buffer_steps,
            hwm,
            max_queue_size,
            topic,
            bind=bind,
            wire=wire,
            encoding=encoding,
            replay_format=replay_format,
            overflow=overflow,
            curve=curve,
        )
        self._outbox = self._core.outbox
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread_id = 0
        self._closed = False
        detach_when_forked(self)
        self._attach_to_loop(required=False)

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
        self._check_open()
        self._attach_to_loop(required=True)
        await self._core.put(events, timeout)

    def publish(self, events: EventBatch) -> None:
        """Number the batch and queue it; it is encoded and sent on a later turn of the loop.

        Raises:
            PublisherClosed: The publisher was closed.
            QueueFull: No room, and ``overflow`` is ``"raise"``.
            RoleError: Called outside the publisher's event loop or from another thread.
            TypeError: Not an ``EventBatch``.
        """
        if self._closed:
            self._check_open()
        if not isinstance(events, EventBatch):
            raise TypeError(f"publish takes an EventBatch, not {type(events).__name__}")
        if self._thread_id != get_ident():
            self._attach_to_loop(required=True)
        if self._outbox.put(events):
            assert self._loop is not None
            self._loop.call_soon(self._core.drain)

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
        if self._inherited:
            self._check_open()
        if not self._closed:
            self._attach_to_loop(required=True)
            await self._core.flush(timeout)

    async def aclose(self, timeout: float = CLOSE_TIMEOUT_S) -> None:
        """Send what is queued, finish replays in progress, and close.

        What could not be sent within the timeout is named in a warning and counted as dropped. Cancelled, it
        closes at once. ``publish`` raises from the first call on; calling it again does nothing.

        Args:
            timeout: Seconds for all of it, ZeroMQ's own delivery to connected subscribers included.
        """
        if self._closed:
            return
        self._attach_to_loop(required=True)
        self._closed = True
        await self._core.aclose(timeout)

    def shutdown(self) -> None:
        """Send everything that is queued now, here and at once, and close; for callers that cannot await.

        ZeroMQ delivers what it holds in the background, up to a second, as long as the process lives.
        """
        if not self._closed:
            self._closed = True
            self._core.shutdown()

    async def __aenter__(self) -> ZmqEventPublisher:
        self._attach_to_loop(required=True)
        return self

    def __del__(self) -> None:
        if not self._closed:
            warn_not_closed(self)
            self._core.stop(0.0)

    def detach_after_fork(self) -> None:
        """Be closed: the sockets are the parent's."""
        self._inherited = not self._closed
        self._closed = True

    def _check_open(self) -> None:
        if self._inherited:
            raise RoleError(f"the event publisher {self.endpoint} belongs to the process that this one was forked from")
        if self._closed:
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
