"""The reader of a queue: receives from its source."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic
from typing import Any, NoReturn

import msgspec

from aioshm.arguments import check_int
from aioshm.codec import Codec, Encoded, cannot_decode
from aioshm.errors import AioshmError, CodecError, QueueEmpty
from aioshm.queue.closing import Closable
from aioshm.queue.ends.blocks import AwaitedReadBlock
from aioshm.queue.ends.reconnect import NoWriter, Reconnect
from aioshm.queue.handle import Handle
from aioshm.queue.source import Source, nothing
from aioshm.queue.state import EndState
from aioshm.queue.stats import QueueStats
from aioshm.queue.tracing import TraceContext, unpack_trace
from aioshm.ring import RingReader
from aioshm.ring.cores import EMPTY, SLOW_PATH, Calls
from aioshm.ring.layout import TRAIL
from aioshm.wait.limits import Stall, deadline_after, settle


class Reader(Closable):
    """Receives from one source, or from the sources of successive writers."""

    def __init__(
        self,
        state: EndState,
        source: Source | None,
        handle: Handle | None,
        rank: int,
        codec: Codec | None,
        reconnect: Reconnect | None = None,
    ) -> None:
        self.state = state
        self.rank = rank
        # The coroutines of the async API; they ask the ring's core first, once the end is ready.
        self.calls: Calls = Calls(self.dequeue)
        # Finds the next writer when the present writer is gone. None: bound to one writer.
        self._reconnect = reconnect
        if source is None:
            assert reconnect is not None
            source = NoWriter(reconnect)
        self._stalled_at = -1
        self.use(source, handle, codec)
        if reconnect is not None:
            reconnect.begin(self)
        state.set_end(self)

    def use(self, source: Source, handle: Handle | None, codec: Codec | None) -> None:
        """Receive from this source from now on."""
        self.source: Source = source
        self.handle = handle
        self._codec = codec
        # `Source.receive`, once a call has found the end ready.
        self.receive: Callable[[], Any] = nothing
        self.calls.core = None
        self._stall: Stall | None = None

    # Attaching

    def start_attaching(self) -> None:
        """Belong to the running loop and start to attach in the background. Idempotent."""
        self.source.start(self.state.bind())

    async def wait_until_ready(self, deadline: float | None, cancel: asyncio.Event | None = None) -> None:
        """Wait until every end is attached."""
        state = self.state
        began = monotonic()
        self.start_attaching()
        stall = self.inquiry()
        try:
            while not state.ready:
                self._check_attaching()
                until = deadline
                if until is None and self._reconnect is not None:
                    until = self._reconnect.writer_deadline(began)
                await settle(state.news(), deadline=until, cancel=cancel, stall=stall)
        except TimeoutError:
            raise self.source.too_late() from None
        state.reopen()
        news = self.pop_news()
        if news is not None:
            raise news

    # Successive writers

    def pop_news(self) -> AioshmError | None:
        """Return, once, the news that the next call has to raise first, if any."""
        if self._reconnect is None:
            return None
        return self._reconnect.pop_news()

    @property
    def has_news(self) -> bool:
        """True if `pop_news` has something to return."""
        return self._reconnect is not None and self._reconnect.has_news

    @property
    def _restarting(self) -> bool:
        return self._reconnect is not None and self._reconnect.unreported

    def leave_writer(self, error: AioshmError) -> None:
        """Search for the next writer, now that the present writer is gone and drained, or raise ``error``."""
        if self._reconnect is None:
            raise error
        self._reconnect.leave_writer(error)

    def _check_attaching(self) -> None:
        """Raise the error that prevents attaching; search for the next writer if the present writer is gone."""
        self.state.check_usable()
        if self._reconnect is not None:
            self._reconnect.check_attaching()
        elif self.source.gone is not None:
            raise self.source.gone()

    # Receiving

    async def dequeue(self, outcome: Any, timeout: float | None, cancel: asyncio.Event | None, indefinite: bool) -> Any:
        """Receive the next message after the core did not; ``outcome``: the core's answer or exception, or None."""
        if outcome is None:
            try:
                outcome = self.receive()
            except Exception as error:
                self.fail(error)
            if outcome is not EMPTY and outcome is not SLOW_PATH:
                return outcome
        elif isinstance(outcome, Exception):
            self.fail(outcome)
        deadline = deadline_after(timeout, cancel, indefinite)
        if not self.enter_now():
            await self.enter(deadline, cancel)
        try:
            while True:
                await self.wait_for_message(deadline, cancel, indefinite)
                obj = self.source.take()
                if obj is SLOW_PATH:
                    await self.wait_for_body(deadline, cancel, indefinite)
                elif obj is not EMPTY:
                    return obj
        finally:
            self.state.leave()

    async def dequeue_many(
        self, max_items: int, timeout: float | None, cancel: asyncio.Event | None, indefinite: bool
    ) -> list[Any]:
        """Receive available messages, as `aioshm.MessageQueue.dequeue_many`."""
        check_int("max_items", max_items, minimum=1)
        source = self.source
        if self.state.core.passes():
            source.settle()
            if source.poll() and (batch := source.take_many(max_items)):
                return batch
        deadline = deadline_after(timeout, cancel, indefinite)
        await self.enter(deadline, cancel)
        try:
            while True:
                await self.wait_for_message(deadline, cancel, indefinite)
                batch = self.source.take_many(max_items)
                if batch:
                    return batch
                obj = self.source.take()
                if obj is SLOW_PATH:
                    await self.wait_for_body(deadline, cancel, indefinite)
                elif obj is not EMPTY:
                    return [obj]
        finally:
            self.state.leave()

    def dequeue_nowait(self) -> Any:
        """Receive the next message if it is there, as `aioshm.MessageQueue.dequeue_nowait`."""
        state = self.state
        if self._restarting and not state.ready:
            self._check_attaching()
            raise QueueEmpty(str(self.source.too_late()))
        state.check_ready()
        if state.lock.calls:
            raise QueueEmpty(f"{state!r}: other tasks wait for a message")
        news = self.pop_news()
        if news is not None:
            raise news
        source = self.source
        gone = source.gone  # first: the poll then finds everything that the writer has published
        obj = self.take()
        if obj is not EMPTY and obj is not SLOW_PATH:
            return obj
        if gone is not None:
            self.leave_writer(gone() if obj is EMPTY else source.lost())
            raise QueueEmpty(str(self.source.too_late()))
        if obj is EMPTY:
            raise QueueEmpty(f"{state!r}: no message has arrived")
        raise QueueEmpty(f"{state!r}: the body of message {source.progress} has not arrived yet")

    # Blocks

    def lease(
        self, timeout: float | None, cancel: asyncio.Event | None, indefinite: bool, *, decoded: bool = True
    ) -> AwaitedReadBlock:
        """Give the next message to the block, decoded in place, or its bytes, as `aioshm.MessageQueue.lease`."""
        return AwaitedReadBlock(self, timeout, cancel, indefinite, decoded=decoded)

    def take(self) -> Any:
        """Take the next message without the call lock; call it on the owning loop."""
        self.source.settle()
        return self.source.take()

    def can_continue(self) -> bool:
        """Return whether a waiting call can continue."""
        source = self.source
        return self.state.refusal is not None or source.gone is not None or source.has_message()

    async def enter(self, deadline: float | None, cancel: asyncio.Event | None, *, settles: bool = True) -> None:
        """Acquire the call lock of a ready end; ``settles``: finish with the latest lease."""
        state = self.state
        if not state.ready or self._restarting:
            await self.wait_until_ready(deadline, cancel)
        state.check_usable()
        self.receive = self.source.receive
        if type(state.core) is RingReader:
            self.calls.core = state.core
        await state.yield_turn()
        await state.enter(deadline, cancel)
        if settles:
            self._settle()

    def enter_now(self, *, settles: bool = True) -> bool:
        """Enter without waiting; return False if that is not possible now."""
        state = self.state
        if self.receive is nothing or not state.core.passes():
            return False
        state.enter_now()
        if settles:
            self._settle()
        return True

    def _settle(self) -> None:
        try:
            self.source.settle()
        except BaseException:
            self.state.leave()
            raise

    async def wait_for_message(self, deadline: float | None, cancel: asyncio.Event | None, indefinite: bool) -> None:
        """Wait for the next message; do not take it."""
        while not await self.wait_for_writer_message(deadline, cancel, indefinite):
            await self.wait_until_ready(deadline, cancel)

    async def wait_for_writer_message(
        self, deadline: float | None, cancel: asyncio.Event | None, indefinite: bool
    ) -> bool:
        """Wait for the next message of this writer, on the poller only; return False if a next writer is due."""
        state = self.state
        while True:
            state.check_usable()
            if not state.ready or self.has_news:  # news: the call that waited for the next writer was cancelled
                return False
            source = self.source
            core = state.core
            poller = state.poller
            assert poller is not None
            gone = source.gone  # first: the poll then finds everything that the writer has published
            if source.poll():
                return True
            if gone is not None:
                if self._reconnect is not None and asyncio._get_running_loop() is None:
                    return False  # the background loop leaves the writer: a signal handler may raise here
                self.leave_writer(gone())
                continue
            progress = source.progress if source.ring is None else source.ring.seq
            stall = None
            if not indefinite:
                stall = self._stall_of_reading(progress)
            found = False
            state.wake_peers()
            try:
                if await poller.wait(
                    self.can_continue, progress, core.published_ns, deadline=deadline, cancel=cancel, stall=stall
                ):
                    state.new_turn()
                # Not at the beginning of the loop: after a wait, that code has left the caches.
                found = state.refusal is None and state.ready and self.source.poll()
                if found:
                    return True
            except TimeoutError:
                raise TimeoutError(f"{state!r}: message {progress} did not come in time") from None
            finally:
                if stall is not None and not found:
                    stall.pause()
                core.spin_ns = poller.inline_spin_ns

    async def wait_for_body(self, deadline: float | None, cancel: asyncio.Event | None, indefinite: bool) -> None:
        """Wait for the body of the next message, or any other news."""
        state = self.state
        source = self.source
        state.check_usable()
        if source.gone is not None:
            self.leave_writer(source.lost())
            return
        stall = None
        if not indefinite:
            stall = self.inquiry()
        try:
            await settle(state.news(), deadline=deadline, cancel=cancel, stall=stall)
        except TimeoutError:
            raise TimeoutError(f"{state!r}: the body of message {source.progress} did not come in time") from None
        state.check_usable()

    def fail(self, error: Exception) -> NoReturn:
        """Raise an error of `receive`, or a `CodecError` where the core's decoder raised it."""
        ring = self.source.ring
        if ring is None or isinstance(error, CodecError) or not ring.damaged:
            raise error
        ring.damaged = False
        raise cannot_decode(error, self.codec_name) from error

    # Reporting

    def inquiry(self) -> Stall:
        """Return a stall report that first asks the writer whether its event loop runs."""
        return self.state.stall(
            lambda waited_s: self.source.report_waiting(waited_s),  # the source may be another one by then
            lambda: self.source.ask_writer(),
        )

    def _stall_of_reading(self, progress: int) -> Stall:
        """Return the stall report of a wait for a message, continued from an earlier call."""
        stall = self._stall
        if stall is None or (stall.reported and self._stalled_at != progress):
            stall = self._stall = self.inquiry()
        elif self._stalled_at == progress:
            stall.resume()
        else:
            stall.restart()
        self._stalled_at = progress
        return stall

    # Information

    def trace_contexts(self, count: int, behind: int = 0) -> list[TraceContext | None]:
        """Return ``count`` trace contexts, without the ``behind`` latest, the latest last."""
        check_int("count", count, minimum=0)
        traces = self.source.traces(min(count + behind, TRAIL))
        return [unpack_trace(trace) for trace in traces[: len(traces) - behind]]

    @property
    def codec_name(self) -> str:
        """The codec's name."""
        assert self._codec is not None
        return self._codec.name

    def encode(self, obj: Any) -> Encoded:
        """Encode an object that was received, as its sender did."""
        assert self._codec is not None
        return self._codec.encode(obj)

    def wake_peers(self) -> None:
        """Wake the writer if it is parked and can continue; call it again after an interruption."""
        self.source.wake_writer()

    def stats(self) -> QueueStats:
        source = self.source
        stats = source.stats()
        if self._reconnect is None:
            return stats
        messages, nbytes = source.earlier
        return msgspec.structs.replace(
            stats, messages=messages + stats.messages, bytes=nbytes + stats.bytes, restarts=self._reconnect.restarts
        )

    # Closing

    def announce_close(self) -> None:
        self.source.announce_close()

    def close(self) -> None:
        self.source.close()

    def detach_after_fork(self) -> None:
        self.source.detach_after_fork()

    def finished(self) -> bool:
        return self.source.finished() and (self._reconnect is None or self._reconnect.finished)

    async def finish(self) -> None:
        await self.source.finish()
        if self._reconnect is not None:
            await self._reconnect.finish()

    def __repr__(self) -> str:
        return repr(self.state)
