"""The same queue for plain threads: every call blocks instead of being awaited.

Each end has an event loop of its own, which runs only while a call has to wait: there it parks, its lifeline is
watched, large messages arrive. Whatever need not wait never comes near it. Writers and readers of one queue may mix
this face with the other one. Threads that use the same end take turns; see ``turns.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from threading import get_ident
from time import monotonic
from types import TracebackType
from typing import Any, Self, TypeVar, cast

from aioshm.codec import Codec, cannot_decode
from aioshm.config import Options, shown
from aioshm.errors import AioshmError, QueueClosed, QueueEmpty, QueueFull
from aioshm.queue import base
from aioshm.queue.base import MAX_CHUNK_BYTES, MAX_CHUNKS
from aioshm.queue.end import deadline_after
from aioshm.queue.handle import Handle
from aioshm.queue.private_loop import PrivateLoop
from aioshm.queue.reader_end import ReaderEnd
from aioshm.queue.stats import QueueStats
from aioshm.queue.turns import Turns
from aioshm.queue.writer import Writer
from aioshm.ring.atomics import ELSEWHERE, NOTHING

T = TypeVar("T")

CANCEL_POLL_S = 0.02
"""How often a wait looks at a ``cancel`` event, of which a thread cannot be told otherwise."""


class MessageQueue:
    """A queue from one writer to many readers, for threads without an event loop.

    The arguments, the results and the errors are those of `aioshm.MessageQueue`, and the names are, too. While a call
    waits, other threads run, and Ctrl-C interrupts it; an interrupted call has lost nothing. An end notices what
    happens to the other ends only inside of calls.

    Any thread of the process that made it may use an end, one at a time: a call waits while another thread is in a call
    of the same end, or in a block that has its slot, and its ``timeout`` counts meanwhile. Messages are sent whole and
    in the order in which the calls had their turns; several threads that receive get different messages. A call inside
    of a block of the same thread, and in a signal handler that interrupts one, is refused with `RoleError` instead of
    waiting for itself; but see `close`.

    Args:
        n_reader, n_local_reader, local_reader_ranks, max_chunk_bytes, max_chunks, connect_ip, codec, options,
            remote_reader_ranks: As
            `aioshm.MessageQueue`.
    """

    def __init__(
        self,
        n_reader: int,
        n_local_reader: int,
        local_reader_ranks: Sequence[int] | None = None,
        max_chunk_bytes: int = MAX_CHUNK_BYTES,
        max_chunks: int = MAX_CHUNKS,
        connect_ip: str | None = None,
        *,
        codec: str | Codec = "pickle",
        options: Options | None = None,
        remote_reader_ranks: Sequence[int] | None = None,
    ) -> None:
        self._adopt(
            base.MessageQueue(
                n_reader,
                n_local_reader,
                local_reader_ranks,
                max_chunk_bytes,
                max_chunks,
                connect_ip,
                codec=codec,
                options=options,
                remote_reader_ranks=remote_reader_ranks,
            )
        )

    @classmethod
    def create_from_handle(
        cls,
        handle: Handle | str | bytes,
        rank: int,
        *,
        codec: str | Codec | None = None,
        options: Options | None = None,
    ) -> Self:
        """Make a reader's end, as `aioshm.MessageQueue.create_from_handle`."""
        queue = cls.__new__(cls)
        queue._adopt(base.MessageQueue.create_from_handle(handle, rank, codec=codec, options=options))
        return queue

    def _adopt(self, end: base.MessageQueue) -> None:
        assert isinstance(end, (Writer, ReaderEnd))
        self._end: Writer | ReaderEnd = end
        end.block()
        self._loop = PrivateLoop(lambda: f"<blocking {end!r}>")
        self._turns = Turns(end)
        self._in_block = False
        self._to_close = False  # whether whoever has the turn is to close this end when it is over
        # What usually is all that a call needs; until the end is ready, both say that they cannot.
        self._send: Callable[[Any], Any] = _not_at_once
        self._receive: Callable[[], Any] = _nothing_at_once

    # Attaching

    def export_handle(self) -> Handle:
        """Return what readers need in order to attach."""
        return self._end.export_handle()

    def wait_until_ready(self, timeout: float | None = None) -> None:
        """Wait until every reader is attached; every end calls this."""
        self._run(self._end.wait_until_ready, timeout)

    # Sending

    def enqueue(self, obj: Any, timeout: float | None = None) -> None:
        """Send an object to every reader, waiting for a free slot."""
        message = self._send(obj)
        if message is not None:
            end = self._end
            if isinstance(end, Writer):
                self._run(lambda left: end.enqueue_slowly(obj, message, left), timeout)
            else:
                self._run(lambda left: end.enqueue(obj, left), timeout)

    def enqueue_many(self, objs: Iterable[Any], timeout: float | None = None) -> None:
        """Send objects, in order and one right after the other: all or none."""
        self._run(lambda left: self._end.enqueue_many(objs, left), timeout)

    def enqueue_nowait(self, obj: Any) -> None:
        """Send an object to every reader now."""
        self._run(lambda _: _called(self._end.enqueue_nowait, obj), busy=QueueFull)

    def acquire_write(self, timeout: float | None = None) -> AbstractContextManager[memoryview]:
        """Give the next free slot's chunk to the block to fill."""
        if not isinstance(self._end, Writer):
            self._end.acquire_write(timeout)  # which refuses it
        return self._entered(lambda _, left: self._end.acquire_write(left), timeout)

    # Receiving

    def dequeue(
        self, timeout: float | None = None, cancel: threading.Event | None = None, indefinite: bool = False
    ) -> Any:
        """Receive the next message; ``cancel``, a `threading.Event`, ends the wait within `CANCEL_POLL_S`."""
        try:
            obj = self._receive()
            if obj is NOTHING and self._end.linger_ns and timeout != 0:
                obj = self._end.linger(self._receive)
        except AioshmError:
            raise
        except Exception as error:  # the ring's core decodes with the codec's bare function
            raise cannot_decode(error, cast(ReaderEnd, self._end).codec_name) from error
        if obj is not NOTHING and obj is not ELSEWHERE:
            return obj
        return self._wait(cancel, lambda event, left: self._end.dequeue(left, event, indefinite), timeout)

    def dequeue_many(
        self,
        max_items: int,
        timeout: float | None = None,
        cancel: threading.Event | None = None,
        indefinite: bool = False,
    ) -> list[Any]:
        """Wait for a message and return it with those behind it that are there."""
        return self._wait(
            cancel, lambda event, left: self._end.dequeue_many(max_items, left, event, indefinite), timeout
        )

    def dequeue_nowait(self) -> Any:
        """Receive the next message if it is there."""
        return self._run(lambda _: _called(self._end.dequeue_nowait), busy=QueueEmpty)

    def acquire_read(
        self, timeout: float | None = None, cancel: threading.Event | None = None, indefinite: bool = False
    ) -> AbstractContextManager[memoryview]:
        """Give the next message's bytes, undecoded and read-only, to the block."""
        return self._entered(lambda event, left: self._end.acquire_read(left, event, indefinite), timeout, cancel)

    def lease(
        self, timeout: float | None = None, cancel: threading.Event | None = None, indefinite: bool = False
    ) -> AbstractContextManager[Any]:
        """Give the next message to the block, decoded where it lies.

        Where a large message is still held when the block ends, its slot goes back at the latest with the next call.
        """
        return self._entered(lambda event, left: self._end.lease(left, event, indefinite), timeout, cancel)

    def broadcast_object(self, obj: Any = None) -> Any:
        """Send ``obj`` and return it (writer), or receive what the writer sends (reader)."""
        if isinstance(self._end, Writer):
            self.enqueue(obj)
            return obj
        return self.dequeue()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return self.dequeue()
        except QueueClosed:
            raise StopIteration from None

    # Telling about itself, closing

    def stats(self) -> QueueStats:
        """Return what this end has done so far."""
        return self._end.stats()

    def __repr__(self) -> str:
        return f"<blocking {self._end!r}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close this end: the other side is told. Idempotent, and from any thread.

        Calls that wait in other threads raise `QueueClosed` before this returns. Where the end is in use so that this
        cannot wait, inside of a block that has its slot, in whichever thread, or in a signal handler that interrupts
        one of its calls, this returns at once, everything that is asked of the end from then on raises `QueueClosed`
        (a block of `acquire_write` sends nothing), and it is closed when that block or call ends.
        """
        turns = self._turns
        while not self._loop.closed:
            taken = turns.take_now()
            mine = self._end._core.user == get_ident()
            if mine and (taken or not turns.lasting):  # not: in a handler while the core passes a message
                try:
                    self._loop.run(self._end.aclose(), closing=True)
                    self._loop.close()
                finally:
                    if taken:
                        turns.give()
                self._loop.raise_interrupt()
                return
            self._loop.check_process()
            if mine or self._in_block:
                self._to_close = True
                self._end.refuse_closed()
                self._loop.call_soon(self._end.refuse_closed)
                turns.wake()
                if self._end._core.user:  # whoever has the turn looks what there is to do, after it
                    return
            else:
                self._end._core.open = False  # so that also a thread that never has to wait comes by
                self._loop.call_soon(self._end.refuse_closed)
                turns.wait()

    aclose = close

    def __del__(self) -> None:
        if hasattr(self, "_loop"):
            self._loop.close()  # the end itself warns

    # Running the loop

    def _run(
        self,
        call: Callable[[float | None], Coroutine[Any, Any, T]],
        timeout: float | None = None,
        *,
        busy: type[AioshmError] | None = None,
        leaving: bool = False,
        keep: bool = False,
    ) -> T:
        """Run what ``call`` makes of the time that is left, in this thread's turn.

        Args:
            call: Makes it.
            timeout: For all of it, waiting for the turn included.
            busy: What to raise instead of waiting for the turn.
            leaving: This must run; whichever thread has the turn has it for the block that this ends.
            keep: The turn is to last when the call has succeeded.
        """
        self._loop.check_thread()
        turns, kept = self._turns, False
        if leaving:
            self._end._core.user = get_ident()
            taken = True
        elif not (taken := turns.take_now()):
            deadline = deadline_after(timeout)
            taken = turns.take(deadline, busy)
            if deadline is not None:
                timeout = max(0.0, deadline - monotonic())
        try:
            result = self._loop.run(call(timeout), leaving=leaving)
            kept = keep
            return result
        finally:
            if taken and not kept:
                turns.give()
            if self._loop.interrupted:
                # The call ended just before it could be cancelled. So the next one takes no short cut, but comes here
                # and tells.
                self._send, self._receive = _not_at_once, _nothing_at_once
            elif self._end._ready:
                self._take_short_cuts()
            if self._to_close and not kept:
                self.close()

    def _take_short_cuts(self) -> None:
        """Let the next calls send or receive at once if they can."""
        end = self._end
        if isinstance(end, Writer):
            if self._send is _not_at_once:
                self._send = self._at_once(end.send, otherwise=False)
        elif self._receive is _nothing_at_once:
            self._receive = self._at_once(end.receive, otherwise=NOTHING)

    def _at_once(self, call: Callable[..., Any], *, otherwise: Any) -> Callable[..., Any]:
        """Return what does this if it is nobody else's turn: the core's own functions look for themselves."""
        if getattr(call, "__self__", None) is self._end._core:
            return call

        def in_turn(*args: Any) -> Any:
            if not self._turns.take_now():
                return otherwise
            try:
                return call(*args)
            finally:
                self._turns.give()

        return in_turn

    def _wait(
        self,
        cancel: threading.Event | None,
        call: Callable[[asyncio.Event | None, float | None], Coroutine[Any, Any, T]],
        timeout: float | None,
        *,
        keep: bool = False,
    ) -> T:
        if cancel is None:
            return self._run(lambda left: call(None, left), timeout, keep=keep)
        if not callable(getattr(cancel, "is_set", None)):
            raise TypeError(f"cancel must be a threading.Event or None, not {shown(cancel)}")
        return self._run(lambda left: _cancellable(cancel, lambda event: call(event, left)), timeout, keep=keep)

    @contextlib.contextmanager
    def _entered(
        self,
        block: Callable[[asyncio.Event | None, float | None], AbstractAsyncContextManager[T]],
        timeout: float | None,
        cancel: threading.Event | None = None,
    ) -> Iterator[T]:
        entered: list[AbstractAsyncContextManager[T]] = []

        def enter(event: asyncio.Event | None, left: float | None) -> Coroutine[Any, Any, T]:
            entered.append(block(event, left))
            return entered[0].__aenter__()

        # The value keeps no name here: a lease would take that for somebody who holds it.
        values = [self._wait(cancel, enter, timeout, keep=True)]
        self._in_block = True
        try:
            yield values.pop()
        except BaseException as error:
            if not self._leave(entered[0], type(error), error, error.__traceback__):
                raise
        else:
            self._leave(entered[0], None, None, None)

    def _leave(self, block: AbstractAsyncContextManager[Any], *error: Any) -> bool | None:
        self._in_block = False
        return self._run(lambda _: block.__aexit__(*error), leaving=True)


async def _called(call: Callable[..., T], *args: Any) -> T:
    await asyncio.sleep(0)  # what the loop has to tell comes first
    return call(*args)


async def _cancellable(cancel: threading.Event, call: Callable[[asyncio.Event | None], Coroutine[Any, Any, T]]) -> T:
    event = asyncio.Event()

    async def watch() -> None:
        while not cancel.is_set():  # noqa: ASYNC110 - nothing else tells a loop of a thread's event
            await asyncio.sleep(CANCEL_POLL_S)
        event.set()

    if cancel.is_set():
        event.set()
    watching = asyncio.ensure_future(watch())
    try:
        return await call(event)
    finally:
        watching.cancel()


def _not_at_once(_obj: Any) -> bool:
    return False


def _nothing_at_once() -> Any:
    return NOTHING
