"""The publisher for callers without an event loop, and the factory of publishers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, ClassVar

from aioshm.arguments import check_plain
from aioshm.closing import Closing, warn_not_closed
from aioshm.errors import EndClosed, PublisherClosed, QueueFull
from aioshm.events.config import CLOSE_TIMEOUT_S, KVEventsConfig, PublisherSettings
from aioshm.events.protocol.messages import EventBatch
from aioshm.events.publish.core import PublisherCore
from aioshm.events.publish.publisher import CorePublisher, EventPublisher, NullEventPublisher, ZmqEventPublisher
from aioshm.process.loop_thread import shared_loop

_ENDED = "the thread of this event publisher has ended"


class ThreadedEventPublisher(Closing, CorePublisher):
    """Publishes from any thread; takes the arguments of ``ZmqEventPublisher`` and binds before it returns.

    A background thread encodes and sends. Batches of one thread are sent in the order in which
    the thread published them.

    If the queue is full (``max_queue_size``), ``publish`` waits until there is room, as in vLLM, so
    nothing is dropped. ``overflow="drop"`` and ``"raise"`` never wait, see ``ZmqEventPublisher``.
    """

    _overflow = "block"

    def _open(self, settings: PublisherSettings) -> None:
        self._blocks = settings.overflow == "block"
        self._host = shared_loop()

        def make() -> PublisherCore:
            core = PublisherCore(settings)
            core.start(self._host.loop)
            return core

        self._core = self._host.do(make)

    def publish(self, events: EventBatch, timeout: float | None = None) -> None:
        """Number the batch and queue it for the thread; by default, wait while the queue is full.

        Ctrl-C interrupts the wait, and the batch is not sent.

        Args:
            events: The batch.
            timeout: Seconds to wait for room; None waits for ever.

        Raises:
            TimeoutError: There was no room in time; the batch is not sent.
            PublisherClosed: The publisher was closed, before or during this call, or its thread has ended.
            QueueFull: No room, and ``overflow`` is ``"raise"``.
            RoleError: Called in a forked child, which does not have the thread; or there is no room, and the caller is
                the publisher's own thread.
            TypeError: Not an ``EventBatch``.
        """
        if not isinstance(events, EventBatch):
            raise TypeError(f"publish takes an EventBatch, not {type(events).__name__}")
        if self._host.elsewhere:
            self._host.check()
        try:
            if self._core.outbox.put(events):
                self._wake()
        except QueueFull:
            if not self._blocks:
                raise
            self._wait_for_room(events, timeout)

    def _wake(self) -> None:
        try:
            self._host.loop.call_soon_threadsafe(self._core.drain)
        except RuntimeError:
            raise PublisherClosed(_ENDED) from None

    def _wait_for_room(self, events: EventBatch, timeout: float | None) -> None:
        try:
            self._host.run(lambda: self._core.put(events, timeout))
        except PublisherClosed:
            raise
        except EndClosed:
            raise PublisherClosed(_ENDED) from None

    def flush(self, timeout: float | None = None) -> None:
        """Wait until all batches published so far have been passed to ZeroMQ.

        Args:
            timeout: Seconds to wait; None waits for ever.

        Raises:
            TimeoutError: Some batches still wait; the text says how many.
            RoleError: Called in a forked child, which does not have the thread.
        """
        if self._core.inherited or not self._core.outbox.closed:
            self._host.run(lambda: self._core.flush(timeout))

    def shutdown(self, timeout: float = CLOSE_TIMEOUT_S) -> None:
        """Send queued batches, and close. Idempotent.

        In a forked child this call does nothing: the sockets belong to the parent.

        Args:
            timeout: Seconds for sending; batches that are left are named in a warning.
        """
        if not self._host.elsewhere and self._core.outbox.close():
            self._host.run(lambda: self._core.aclose(timeout))

    def close(self) -> None:
        """Call `shutdown`."""
        self.shutdown()

    def __del__(self) -> None:
        core = getattr(self, "_core", None)  # None if an argument was invalid
        if core is not None and not core.outbox.closed and not self._host.elsewhere:
            warn_not_closed(self, "use `with`, or call shutdown()")
            self._host.post(core.shutdown)


def _zmq_publisher(**options: Any) -> EventPublisher:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return ThreadedEventPublisher(**options)
    return ZmqEventPublisher(**options)


class EventPublisherFactory:
    """Creates the publisher that a configuration names.

    ``"zmq"`` is a ``ZmqEventPublisher`` if a loop is running, else a ``ThreadedEventPublisher``.
    ``"zmq-thread"`` is always a ``ThreadedEventPublisher``.
    """

    _registry: ClassVar[dict[str, Callable[..., EventPublisher]]] = {
        "null": NullEventPublisher,
        "zmq": _zmq_publisher,
        "zmq-thread": ThreadedEventPublisher,
    }

    @classmethod
    def register_publisher(cls, name: str, ctor: Callable[..., EventPublisher]) -> None:
        """Register ``ctor`` as a kind of publisher; it is called with ``data_parallel_rank`` and the config's fields.

        Raises:
            KeyError: The name is taken.
            TypeError: ``ctor`` is a coroutine function.
        """
        if name in cls._registry:
            raise KeyError(f"publisher {name!r} is already registered")
        cls._registry[name] = check_plain("ctor", ctor)

    @classmethod
    def create(cls, config: KVEventsConfig | None, data_parallel_rank: int = 0) -> EventPublisher:
        """Create a publisher; the configuration itself is not changed.

        Returns:
            A ``NullEventPublisher`` if the configuration is None, disabled or names ``"null"``. For any other
            publisher ``get_publisher_config()`` returns the configuration in effect.

        Raises:
            ValueError: This kind of publisher is not registered, or an option is invalid.
        """
        if config is None or not config.enable_kv_cache_events or config.publisher == "null":
            return NullEventPublisher(data_parallel_rank)
        options = asdict(config)
        del options["enable_kv_cache_events"]
        kind = options.pop("publisher")
        try:
            ctor = cls._registry[kind]
        except KeyError:
            known = ", ".join(sorted(cls._registry))
            raise ValueError(f"unknown event publisher {kind!r}: known are {known}") from None
        return ctor(data_parallel_rank=data_parallel_rank, **options)
