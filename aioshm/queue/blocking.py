"""The same queue for plain threads: every call blocks instead of being awaited.

Each end has an event loop of its own, which runs only while a call has to wait: there it parks, its lifeline is
watched, large messages arrive. Whatever need not wait never comes near it. Writers and readers of one queue may mix
this face with the other one.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from types import TracebackType
from typing import Any, Self, TypeVar, cast

from aioshm.codec import Codec, cannot_decode
from aioshm.config import Options
from aioshm.errors import AioshmError, QueueClosed
from aioshm.queue import base
from aioshm.queue.base import MAX_CHUNK_BYTES, MAX_CHUNKS
from aioshm.queue.handle import Handle
from aioshm.queue.private_loop import PrivateLoop
from aioshm.queue.reader_end import ReaderEnd
from aioshm.queue.stats import QueueStats
from aioshm.queue.writer import Writer
from aioshm.ring.atomics import ELSEWHERE, NOTHING

T = TypeVar("T")

CANCEL_POLL_S = 0.02
"""How often a wait looks at a ``cancel`` event, of which a thread cannot be told otherwise."""


class MessageQueue:
    """A queue from one writer to many readers, for threads without an event loop.

    The arguments, the results and the errors are those of `aioshm.MessageQueue`, and the names are, too. An end belongs
    to the thread and process that first uses it. While it waits, other threads run, and Ctrl-C interrupts it; an
    interrupted call has lost nothing. It notices what happens to the other ends only inside of calls.

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
        # What usually is all that a call needs; until the end is ready, both say that they cannot.
        self._send: Callable[[Any], Any] = end.send if isinstance(end, Writer) else _not_at_once
        self._receive: Callable[[], Any] = _nothing_at_once

    # Attaching

    def export_handle(self) -> Handle:
        """Return what readers need in order to attach."""
        return self._end.export_handle()

    def wait_until_ready(self, timeout: float | None = None) -> None:
        """Wait until every reader is attached; every end calls this."""
        self._run(self._end.wait_until_ready(timeout))

    # Sending

    def enqueue(self, obj: Any, timeout: float | None = None) -> None:
        """Send an object to every reader, waiting for a free slot."""
        message = self._send(obj)
        if message is not None:
            end = self._end
            if isinstance(end, Writer):
                self._run(end.enqueue_slowly(obj, message, timeout))
                if not self._loop.interrupted:
                    self._send = end.send
            else:
                self._run(end.enqueue(obj, timeout))

    def enqueue_many(self, objs: Iterable[Any], timeout: float | None = None) -> None:
        """Send objects, in order and one right after the other: all or none."""
        self._run(self._end.enqueue_many(objs, timeout))

    def enqueue_nowait(self, obj: Any) -> None:
        """Send an object to every reader now."""
        self._run(_called(self._end.enqueue_nowait, obj))

    def acquire_write(self, timeout: float | None = None) -> AbstractContextManager[memoryview]:
        """Give the next free slot's chunk to the block to fill."""
        block = self._end.acquire_write(timeout)
        return self._entered(lambda _: block)

    # Receiving

    def dequeue(
        self, timeout: float | None = None, cancel: threading.Event | None = None, indefinite: bool = False
    ) -> Any:
        """Receive the next message; ``cancel``, a `threading.Event`, ends the wait within `CANCEL_POLL_S`."""
        try:
            obj = self._receive()
        except AioshmError:
            raise
        except Exception as error:  # the ring's core decodes with the codec's bare function
            raise cannot_decode(error, cast(ReaderEnd, self._end).codec_name) from error
        if obj is not NOTHING and obj is not ELSEWHERE:
            return obj
        obj = self._wait(cancel, lambda event: self._end.dequeue(timeout, event, indefinite))
        # No call from here on: that is where Python would let Ctrl-C take the message away.
        if not self._loop.interrupted:
            self._receive = cast(ReaderEnd, self._end).receive
        return obj

    def dequeue_many(
        self,
        max_items: int,
        timeout: float | None = None,
        cancel: threading.Event | None = None,
        indefinite: bool = False,
    ) -> list[Any]:
        """Wait for a message and return it with those behind it that are there."""
        return self._wait(cancel, lambda event: self._end.dequeue_many(max_items, timeout, event, indefinite))

    def dequeue_nowait(self) -> Any:
        """Receive the next message if it is there."""
        return self._run(_called(self._end.dequeue_nowait))

    def acquire_read(
        self, timeout: float | None = None, cancel: threading.Event | None = None, indefinite: bool = False
    ) -> AbstractContextManager[memoryview]:
        """Give the next message's bytes, undecoded and read-only, to the block."""
        return self._entered(lambda event: self._end.acquire_read(timeout, event, indefinite), cancel)

    def lease(
        self, timeout: float | None = None, cancel: threading.Event | None = None, indefinite: bool = False
    ) -> AbstractContextManager[Any]:
        """Give the next message to the block, decoded where it lies.

        Where a large message is still held when the block ends, its slot goes back at the latest with the next call.
        """
        return self._entered(lambda event: self._end.lease(timeout, event, indefinite), cancel)

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
        """Close this end: the other side is told. Idempotent."""
        if self._loop.closed:
            return
        self._run(self._end.aclose(), closing=True)
        self._loop.close()
        self._loop.raise_interrupt()

    aclose = close

    def __del__(self) -> None:
        if hasattr(self, "_loop"):
            self._loop.close()  # the end itself warns

    # Running the loop

    def _run(self, call: Coroutine[Any, Any, T], *, closing: bool = False, leaving: bool = False) -> T:
        try:
            return self._loop.run(call, closing=closing, leaving=leaving)
        finally:
            if self._loop.interrupted:
                # The call ended just before it could be cancelled. So the next one takes no short cut, but comes here
                # and tells.
                self._send, self._receive = _not_at_once, _nothing_at_once

    def _wait(
        self, cancel: threading.Event | None, call: Callable[[asyncio.Event | None], Coroutine[Any, Any, T]]
    ) -> T:
        if cancel is None:
            return self._run(call(None))
        return self._run(_cancellable(cancel, call))

    @contextlib.contextmanager
    def _entered(
        self,
        block: Callable[[asyncio.Event | None], AbstractAsyncContextManager[T]],
        cancel: threading.Event | None = None,
    ) -> Iterator[T]:
        entered: list[AbstractAsyncContextManager[T]] = []

        def enter(event: asyncio.Event | None) -> Coroutine[Any, Any, T]:
            entered.append(block(event))
            return entered[0].__aenter__()

        # The value keeps no name here: a lease would take that for somebody who holds it.
        values = [self._wait(cancel, enter)]
        try:
            yield values.pop()
        except BaseException as error:
            if not self._run(entered[0].__aexit__(type(error), error, error.__traceback__), leaving=True):
                raise
        else:
            self._run(entered[0].__aexit__(None, None, None), leaving=True)


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
