"""The publisher for callers without an event loop: the same publisher, on a loop in a thread of its own."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, TypeVar

from aioshm.closing import warn_not_closed
from aioshm.errors import PublisherClosed, QueueFull, RoleError
from aioshm.events.config import (
    CLOSE_TIMEOUT_S,
    DEFAULT_ENDPOINT,
    KVEventsConfig,
)
from aioshm.events.protocol.messages import EventBatch
from aioshm.events.protocol.outbox import OVERFLOWS, Overflow
from aioshm.events.publish.base import EventPublisher
from aioshm.events.publish.publisher import ZmqEventPublisher
from aioshm.events.stats import PublisherStats
from aioshm.process.limits import check_descriptors, naming_limits
from aioshm.process.threads import start_thread

_T = TypeVar("_T")

_LOOP_DESCRIPTORS = 8  # of whatever kind it is

# What the thread gets on top of the caller's timeout to wind up.
_GRACE_S = 2.0


class _HostedPublisher(ZmqEventPublisher):
    """A ``ZmqEventPublisher`` whose ``enqueue`` may be called from any thread."""

    _overflows = OVERFLOWS

    def enqueue(self, batch: EventBatch) -> None:
        if self._outbox.put(batch):
            self._wake()

    def wait_for_room(self, timeout: float | None) -> bool:
        """Block the calling thread until there is room; False if there is none in time."""
        if threading.get_ident() == self._thread_id:
            raise RoleError("publish would wait for its own thread to make room: call it from another one")
        return self._outbox.wait_for_room(self._wake, timeout)

    def refuse(self) -> None:
        """Take no more batches; in any thread."""
        self._outbox.close()

    def _wake(self) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(self._drain)
        except RuntimeError:
            raise PublisherClosed("the thread of this event publisher has ended") from None


class ThreadedEventPublisher(EventPublisher):
    """Publishes from any thread; takes the arguments of ``ZmqEventPublisher`` and binds before it returns.

    Encoding and sending happen in the publisher's thread. Batches of one thread go out in the order in which
    it published them.

    Where the queue is full (``max_queue_size``), ``publish`` waits until there is room, as that of vLLM does, so
    nothing is dropped. ``overflow="drop"`` and ``"raise"`` never wait, see ``ZmqEventPublisher``.

    Attributes:
        endpoint, replay_endpoint, connect_endpoint, connect_replay_endpoint: See ``ZmqEventPublisher``.
    """

    def __init__(
        self,
        data_parallel_rank: int,
        endpoint: str = DEFAULT_ENDPOINT,
        *arguments: Any,
        overflow: Overflow = "block",
        **options: Any,
    ) -> None:
        self._closed = True
        super().__init__(data_parallel_rank)

        async def make() -> _HostedPublisher:
            return _HostedPublisher(data_parallel_rank, endpoint, *arguments, overflow=overflow, **options)

        self._pid = os.getpid()
        self._blocks = overflow == "block"
        self._lock = threading.Lock()
        what = f"a publisher of events at {endpoint}"
        check_descriptors(what, _LOOP_DESCRIPTORS)  # one that is made in part only is not given back
        with naming_limits(what):
            self._loop = asyncio.new_event_loop()
            # The thread must not know this object, or it could never be collected.
            try:
                self._thread = start_thread(_host, self._loop, name="aioshm-events", what=what)
            except BaseException:
                self._loop.close()
                raise
        try:
            self._publisher = self._call(make(), None)
        except BaseException:
            self._end_thread()
            raise
        self.endpoint: str = self._publisher.endpoint
        self.replay_endpoint: str | None = self._publisher.replay_endpoint
        self.connect_endpoint: str = self._publisher.connect_endpoint
        self.connect_replay_endpoint: str | None = self._publisher.connect_replay_endpoint
        self._closed = False

    def get_publisher_config(self) -> KVEventsConfig:
        """Return the configuration with the endpoints that are really in use."""
        return self._publisher.get_publisher_config()

    def stats(self) -> PublisherStats:
        """Return what was done so far."""
        return self._publisher.stats()

    def publish(self, events: EventBatch, timeout: float | None = None) -> None:
        """Number the batch and queue it for the thread; by default, wait while the queue is full.

        Ctrl-C interrupts the wait; the batch has got no number then and is not sent.

        Args:
            events: The batch.
            timeout: Seconds to wait for room; None waits as long as it takes.

        Raises:
            TimeoutError: There was no room in time; the batch was not taken.
            PublisherClosed: The publisher was closed, before or meanwhile, or its thread has ended.
            QueueFull: No room, and ``overflow`` is ``"raise"``.
            RoleError: Called in a forked child, where the thread does not exist; or there is no room, and this is the
                publisher's own thread.
            TypeError: Not an ``EventBatch``.
        """
        if not isinstance(events, EventBatch):
            raise TypeError(f"publish takes an EventBatch, not {type(events).__name__}")
        self._check_process()
        if not self._blocks:
            self._publisher.enqueue(events)
            return
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            try:
                self._publisher.enqueue(events)
                return
            except QueueFull:
                left = None if deadline is None else deadline - time.monotonic()
            if not self._publisher.wait_for_room(left):
                raise TimeoutError(f"the queue of this event publisher was still full after {timeout} s")

    def flush(self, timeout: float | None = None) -> None:
        """Wait until everything published so far has been handed to ZeroMQ.

        Args:
            timeout: Seconds to wait; None waits as long as it takes.

        Raises:
            TimeoutError: Some batches still wait; the text says how many.
        """
        self._check_process()
        if not self._closed:
            self._call(self._publisher.flush(timeout), timeout)

    def shutdown(self, timeout: float = CLOSE_TIMEOUT_S) -> None:
        """Send what is queued, close, and end the thread; calling it again does nothing.

        In a forked child this does nothing: the thread and the sockets are the parent's.

        Args:
            timeout: Seconds for it; what was not sent by then is named in a warning.
        """
        if self._pid != os.getpid():
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._publisher.refuse()
        try:
            self._call(self._publisher.aclose(timeout), timeout)
        finally:
            self._end_thread()

    def __enter__(self) -> ThreadedEventPublisher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} at {self.endpoint}>"

    def __del__(self) -> None:
        if not self._closed and self._pid == os.getpid():
            warn_not_closed(self, "use `with`, or call shutdown()")
            self._closed = True
            self._loop.call_soon_threadsafe(self._publisher.shutdown)
            self._loop.call_soon_threadsafe(self._loop.stop)

    def _call(self, work: Coroutine[Any, Any, _T], timeout: float | None) -> _T:
        """Run ``work`` in the thread; the wait is bounded even if the thread hangs."""
        if threading.get_ident() == self._thread.ident:
            work.close()
            raise RoleError("called from the publisher's own thread, which would wait for itself")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(None if timeout is None else timeout + _GRACE_S)
        except BaseException:
            future.cancel()
            raise

    def _end_thread(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_GRACE_S)

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise RoleError(f"this event publisher lives in process {self._pid}, not in its child {os.getpid()}")


def _host(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()
