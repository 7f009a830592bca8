"""A reader's end of a queue: its state and call lock, the source that it receives from, and the calls that receive."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic
from typing import Any, NoReturn

import msgspec

from aioshm.codec import Codec, Encoded, cannot_decode
from aioshm.config import check_int
from aioshm.errors import AioshmError, CodecError, QueueEmpty
from aioshm.queue.ends.leasing import AwaitedReadBlock, Leases
from aioshm.queue.ends.reconnect import Following
from aioshm.queue.handle import Handle
from aioshm.queue.source import Source, nothing
from aioshm.queue.state import EndState
from aioshm.queue.stats import QueueStats
from aioshm.queue.tracing import TraceContext, unpack_trace
from aioshm.ring.calls import Calls
from aioshm.ring.cores import EMPTY, SLOW_PATH, ReaderCore
from aioshm.ring.layout import TRAIL
from aioshm.wait.limits import Inquiry, Stall, deadline_after, settle


class ReadingEnd:
    """Receives from one source, or from the sources of successive writers."""

    def __init__(
        self,
        state: EndState,
        source: Source | None,
        handle: Handle | None,
        rank: int,
        codec: Codec | None,
        following: Following | None = None,
    ) -> None:
        self.state = state
        self.handle = handle
        self.rank = rank
        self._codec = codec
        # None: bound to one writer.
        self._following = following
        if following is not None:
            source = following.begin(source, self._use)
        assert source is not None
        self.source: Source = source
        # `Source.receive`, once a call has found the end ready.
        self.receive: Callable[[], Any] = nothing
        # The coroutines of the async API; they ask the ring's core first, once the end is ready.
        self.calls: Calls = Calls(self.dequeue)
        self._stall: Stall | None = None
        self._stalled_at = -1
        state.enclose(self)

    def _use(self, source: Source, handle: Handle | None, codec: Codec | None) -> None:
        """Receive from another source from now on."""
        self.source, self.handle, self._codec = source, handle, codec
        self.receive, self._stall = nothing, None
        self.calls.core = None

    # Attaching

    def start_attaching(self) -> None:
        """Belong to the running loop and begin to attach, unless that was done; nothing waits for it."""
        self.source.start(self.state.bind())

    async def wait_until_ready(self, deadline: float | None, cancel: asyncio.Event | None = None) -> None:
        """Wait until every end is attached."""
        state, began = self.state, monotonic()
        self.start_attaching()
        stall = self._inquiry()
        try:
            while not state.ready:
                self._check_attaching()
                until = deadline
                if until is None and self._following is not None:
                    until = self._following.writer_deadline(began)
                await settle(state.news(), deadline=until, cancel=cancel, stall=stall)
        except TimeoutError:
            raise self.source.too_late() from None
        state.reopen()
        news = self.tell()
        if news is not None:
            raise news

    # One writer after the other

    def tell(self) -> AioshmError | None:
        """Return, once, the news that the next call has to report first, if any."""
        return None if self._following is None else self._following.tell()

    @property
    def has_news(self) -> bool:
        """True if `tell` has something to return."""
        return self._following is not None and self._following.has_news

    @property
    def _restarting(self) -> bool:
        return self._following is not None and self._following.telling

    def reconnect_after(self, error: AioshmError) -> None:
        """Wait for the next writer, now that this one is gone and drained, or raise ``error``."""
        if self._following is None:
            raise error
        self._following.reconnect_after(error)

    def _check_attaching(self) -> None:
        """Raise the error that prevents attaching; look for the next writer if this is gone."""
        self.state.check_usable()
        gone = self.source.gone
        if self._following is not None:
            self._following.check_attaching()
        elif gone is not None:
            raise gone()

    # Receiving

    def own_calls(self) -> Calls:
        """Return an object with `dequeue` as `aioshm.MessageQueue` has it."""
        return self.calls

    def leases(self) -> Leases[Any]:
        """Return an iterator that leases each message until the next one."""
        return Leases(self)

    async def dequeue(self, outcome: Any, timeout: float | None, cancel: asyncio.Event | None, indefinite: bool) -> Any:
        """Receive the next message after the core did not; ``outcome``: its answer, its exception, or None."""
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
        if not self.begin_turn():
            await self.line_up(deadline, cancel)
        try:
            while True:
                await self.next(deadline, cancel, indefinite)
                if (obj := self.source.take()) is not SLOW_PATH:
                    return obj
                await self.rest(deadline, cancel, indefinite)
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
            if source.look() and (batch := source.take_many(max_items)):
                return batch
        deadline = deadline_after(timeout, cancel, indefinite)
        await self.line_up(deadline, cancel)
        try:
            while True:
                await self.next(deadline, cancel, indefinite)
                batch = self.source.take_many(max_items)
                if batch:
                    return batch
                if (obj := self.source.take()) is not SLOW_PATH:
                    return [obj]
                await self.rest(deadline, cancel, indefinite)
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
            raise QueueEmpty(f"{state!r}: other tasks wait in line")
        news = self.tell()
        if news is not None:
            raise news
        source = self.source
        gone = source.gone  # before looking: what was published before the writer went is then seen
        obj = self.poll()
        if obj is not EMPTY and obj is not SLOW_PATH:
            return obj
        if gone is not None:
            self.reconnect_after(gone() if obj is EMPTY else source.lost())
            raise QueueEmpty(str(self.source.too_late()))
        what = "nothing to read yet" if obj is EMPTY else f"the body of message {source.progress} is on its way"
        raise QueueEmpty(f"{state!r}: {what}")

    # Blocks

    def lease(self, timeout: float | None, cancel: asyncio.Event | None, indefinite: bool) -> AwaitedReadBlock:
        """Give the next message to the block, decoded where it lies, as `aioshm.MessageQueue.lease`."""
        return AwaitedReadBlock(self, timeout, cancel, indefinite)

    def acquire_read(self, timeout: float | None, cancel: asyncio.Event | None, indefinite: bool) -> AwaitedReadBlock:
        """Give the next message's bytes to the block, as `aioshm.MessageQueue.acquire_read`."""
        return AwaitedReadBlock(self, timeout, cancel, indefinite, decoded=False)

    def poll(self) -> Any:
        """Take the next message without the call lock; call it on the owning loop."""
        self.source.settle()
        return self.source.take()

    def may_go_on(self) -> bool:
        """Return whether a call that waits has anything to do."""
        source = self.source
        return self.state.refusal is not None or source.gone is not None or source.ready()

    async def line_up(self, deadline: float | None, cancel: asyncio.Event | None, *, settles: bool = True) -> None:
        """Wait until this task may read; settle the latest lease unless told not to."""
        state = self.state
        if not state.ready or self._restarting:
            await self.wait_until_ready(deadline, cancel)
        state.check_usable()
        self.receive = self.source.receive
        if type(state.core) is ReaderCore:
            self.calls.core = state.core
        await state.yield_turn()
        await state.enter(deadline, cancel)
        if settles:
            self._settle()

    def begin_turn(self, *, settles: bool = True) -> bool:
        """Enter if nothing is in the way, in fewer calls than `line_up`; return whether."""
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

    async def next(self, deadline: float | None, cancel: asyncio.Event | None, indefinite: bool) -> None:
        """Wait for the next message, and leave it where it is."""
        while not await self.next_of_writer(deadline, cancel, indefinite):
            await self.wait_until_ready(deadline, cancel)

    async def next_of_writer(self, deadline: float | None, cancel: asyncio.Event | None, indefinite: bool) -> bool:
        """Wait as `next`, for the poller only; return False if another writer is awaited, or to be."""
        state = self.state
        while True:
            state.check_usable()
            if not state.ready:
                return False
            source, poller, core = self.source, state.poller, state.core
            assert poller is not None
            gone = source.gone  # before looking: what was published before the writer went is then seen
            if source.look():
                return True
            if gone is not None:
                if self._following is not None and asyncio._get_running_loop() is None:
                    return False  # the loop leaves the writer: a signal handler may raise here
                self.reconnect_after(gone())
                continue
            progress = source.progress if source.ring is None else source.ring.core.seq
            stall = None if indefinite else self._stall_of_reading(progress)
            there = False
            state.wake_peers()
            try:
                if await poller.wait(
                    self.may_go_on, progress, core.published_ns, deadline=deadline, cancel=cancel, stall=stall
                ):
                    state.new_turn()
                # Not by way of the loop's beginning: after a wait that code is cold, which single messages feel.
                there = state.refusal is None and state.ready and self.source.look()
                if there:
                    return True
            except TimeoutError:
                raise TimeoutError(f"{state!r}: message {progress} did not come in time") from None
            finally:
                if stall is not None and not there:
                    stall.pause()
                core.spin_ns = poller.inline_spin_ns

    async def rest(self, deadline: float | None, cancel: asyncio.Event | None, indefinite: bool) -> None:
        """Wait for the rest of the next message, or any other news."""
        state, source = self.state, self.source
        state.check_usable()
        if source.gone is not None:
            self.reconnect_after(source.lost())
            return
        try:
            await settle(state.news(), deadline=deadline, cancel=cancel, stall=None if indefinite else self._inquiry())
        except TimeoutError:
            what = f"the body of message {source.progress}"
            raise TimeoutError(f"{state!r}: {what} did not come in time") from None
        state.check_usable()

    def fail(self, error: Exception) -> NoReturn:
        """Raise an error of `receive` as callers see it; the core's are the codec's own."""
        ring = self.source.ring
        if ring is None or isinstance(error, CodecError) or not ring.core.damaged:
            raise error
        ring.core.damaged = False
        raise cannot_decode(error, self.codec_name) from error

    # Reporting

    def _inquiry(self) -> Stall:
        """Return the report of a long wait, which asks the writer for a sign of life."""
        ask, report = lambda: self.source.ask_writer(), lambda waited_s: self.source.report_waiting(waited_s)
        return self.state.stall(Inquiry(self.state.options.stall_warning_s, ask, report))

    def _stall_of_reading(self, progress: int) -> Stall:
        """Return the stall report of a wait for a message, continued from an earlier call."""
        stall = self._stall
        if stall is None or (stall.reported and self._stalled_at != progress):
            stall = self._stall = self._inquiry()
        elif self._stalled_at == progress:
            stall.resume()
        else:
            stall.restart()
        self._stalled_at = progress
        return stall

    # Telling about itself

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

    def block(self) -> None:
        """See `EndState.block`."""
        self.state.block()

    def wake_peers(self) -> None:
        """Wake the writer if it is parked and can go on; may be interrupted, and then has to be called again."""
        self.source.wake_writer()

    def stats(self) -> QueueStats:
        stats = self.source.stats()
        following = self._following
        if following is None:
            return stats
        return msgspec.structs.replace(
            stats,
            messages=following.received + stats.messages,
            bytes=following.received_bytes + stats.bytes,
            restarts=following.restarts,
        )

    # Closing (see `closing.Closable`)

    def lingers(self) -> bool:
        """Return False: a reader keeps no messages for others."""
        return False

    async def linger(self) -> None:
        """Do nothing."""

    def say_goodbye(self) -> None:
        """Notify the writer that this reader leaves, where it needs the notice immediately."""
        self.source.say_goodbye()

    def close(self) -> None:
        """Release everything that the goodbye does not need."""
        self.source.close()

    def detach_after_fork(self) -> None:
        """Release, in a forked child, everything that would hide the parent's death."""
        self.source.detach_after_fork()

    def finished(self) -> bool:
        """Return whether `finish` has nothing to do."""
        return self.source.finished() and (self._following is None or self._following.finished)

    async def finish(self) -> None:
        """Wait until the writers have heard the goodbye, if that does not take long."""
        await self.source.finish()
        if self._following is not None:
            await self._following.finish()

    def __repr__(self) -> str:
        return repr(self.state)
