"""The publisher for callers without an event loop: the same core, on the background loop of the process."""

from __future__ import annotations

import threading
import time
from typing import Any

from aioshm.closing import Closing, warn_not_closed
from aioshm.errors import PublisherClosed, QueueFull
from aioshm.events.config import CLOSE_TIMEOUT_S, DEFAULT_ENDPOINT
from aioshm.events.protocol.messages import EventBatch
from aioshm.events.protocol.outbox import Overflow
from aioshm.events.publish.base import CorePublisher
from aioshm.events.publish.core import PublisherCore
from aioshm.process.limits import check_descriptors, naming_limits
from aioshm.process.loop_thread import shared_loop

_LOOP_DESCRIPTORS = 8  # of whatever kind it is
# How often a call that waits for room looks whether the thread is still there to make any.
_LOOK_S = 0.5


class ThreadedEventPublisher(Closing, CorePublisher):
    """Publishes from any thread; takes the arguments of ``ZmqEventPublisher`` and binds before it returns.

    Encoding and sending happen in a background thread. Batches of one thread go out in the order in which
    it published them.

    Where the queue is full (``max_queue_size``), ``publish`` waits until there is room, as that of vLLM does, so
    nothing is dropped. ``overflow="drop"`` and ``"raise"`` never wait, see ``ZmqEventPublisher``.
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
        self._blocks = overflow == "block"
        self._lock = threading.Lock()
        what = f"a publisher of events at {endpoint}"
        check_descriptors(what, _LOOP_DESCRIPTORS)  # one that is made in part only is not given back
        with naming_limits(what):
            self._host = shared_loop()
        loop = self._host.loop

        def make() -> PublisherCore:
            core = PublisherCore(data_parallel_rank, endpoint, *arguments, overflow=overflow, **options)
            core.start(loop)
            return core

        self._core = self._host.do(make)
        self._closed = False

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
        if self._host.elsewhere:
            self._host.check()
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            try:
                if self._core.outbox.put(events):
                    self._wake()
                return
            except QueueFull:
                if not self._blocks:
                    raise
            self._host.check()
            self._wake()  # raises where there is no thread any more to make room
            left = _LOOK_S if deadline is None else min(_LOOK_S, deadline - time.monotonic())
            if not self._core.outbox.wait_for_room(max(0.0, left)) and left < _LOOK_S:
                raise TimeoutError(f"the queue of this event publisher was still full after {timeout} s")

    def _wake(self) -> None:
        try:
            self._host.loop.call_soon_threadsafe(self._core.drain)
        except RuntimeError:
            raise PublisherClosed("the thread of this event publisher has ended") from None

    def flush(self, timeout: float | None = None) -> None:
        """Wait until everything published so far has been handed to ZeroMQ.

        Args:
            timeout: Seconds to wait; None waits as long as it takes.

        Raises:
            TimeoutError: Some batches still wait; the text says how many.
        """
        if not self._closed:
            self._host.run(lambda: self._core.flush(timeout))

    def shutdown(self, timeout: float = CLOSE_TIMEOUT_S) -> None:
        """Send what is queued, and close; calling it again does nothing.

        In a forked child this does nothing: the sockets are the parent's.

        Args:
            timeout: Seconds for it; what was not sent by then is named in a warning.
        """
        if self._host.elsewhere:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._core.outbox.close()
        self._host.run(lambda: self._core.aclose(timeout))

    def close(self) -> None:
        """Call `shutdown`."""
        self.shutdown()

    def __del__(self) -> None:
        if not self._closed and not self._host.elsewhere:
            warn_not_closed(self, "use `with`, or call shutdown()")
            self._host.post(self._core.shutdown)
