"""The same queue for plain threads: every call blocks instead of being awaited.

Writers and readers of one queue may mix this API with the awaited one. `BlockingEnd` has what the calls are made of.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Self, Unpack, cast, overload

from aioshm.arguments import check_int
from aioshm.closing import Closing
from aioshm.codec import Codec, S, T
from aioshm.config import Options
from aioshm.errors import QueueClosed, QueueEmpty, QueueFull
from aioshm.process.loop_thread import process_lock
from aioshm.queue import api
from aioshm.queue.base import AnyHandle, CodedNaming, CodedReading, Naming, QueueBase, Reading, documented_as
from aioshm.queue.blocking.blocks import LeaseBlock, Leases, WriteBlock
from aioshm.queue.blocking.end import BlockingEnd, made
from aioshm.queue.ends.blocks import Message
from aioshm.queue.ends.reader import Reader
from aioshm.queue.ends.sender import encode_all
from aioshm.queue.ends.writer import Membership, Writer
from aioshm.queue.groups.factory import GroupCall, become_ready
from aioshm.queue.handle import Handle
from aioshm.queue.local.loans import ArraySpec, Like
from aioshm.queue.membership import Change, ReaderInfo
from aioshm.queue.tracing import TraceContext
from aioshm.wait.limits import deadline_after

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from aioshm.queue.groups.process_group import ObjectGroup


@documented_as(api.MessageQueue)
class MessageQueue(QueueBase[T], Closing):
    """A queue from one writer to many readers, for threads without an event loop.

    Names, arguments, results and errors are those of `aioshm.MessageQueue`; ``cancel`` is a `threading.Event`. While a
    call waits, other threads run. A background thread of the process attaches ends and notices changes of other ends.

    **Signals.** An exception of a signal handler, such as KeyboardInterrupt, ends a waiting call. An interrupted call
    that receives loses nothing: the next call returns the same message. An interrupted call that sends may have sent or
    not, which `messages` tells::

        before = mq.messages
        try:
            mq.enqueue(obj)
        except KeyboardInterrupt:
            if mq.messages == before:
                ...  # nothing was sent

    A message that a call has returned belongs to the caller, even if a handler raises before the assignment. A block
    that is interrupted on the way in was not entered; one that is interrupted on the way out sends nothing.

    **Threads.** Any thread of the process may use an end, one at a time: a call waits while another thread waits in a
    call of the same end, or is in a block that has its slot, and its ``timeout`` counts meanwhile. A call inside of a
    block of the same thread, or in a signal handler that interrupts a call, raises `RoleError`, except `close`. Codecs
    must not wait for other threads that use blocking queues.
    """

    def _hold(self, end: Writer | Reader) -> None:
        super()._hold(end)
        self.held: BlockingEnd = BlockingEnd(end)

    # The type of the messages is that of ``type``, or of the codec. To type checkers, a union is no `type`, but Any.
    if TYPE_CHECKING:

        @overload
        @classmethod
        def create_from_handle(
            cls, handle: AnyHandle, rank: int | None = None, *, type: type[S], **reader: Unpack[CodedReading]
        ) -> MessageQueue[S]: ...

        @overload
        @classmethod
        def create_from_handle(
            cls, handle: AnyHandle, rank: int | None = None, *, codec: Codec[S], **reader: Unpack[Reading]
        ) -> MessageQueue[S]: ...

        @overload
        @classmethod
        def create_from_handle(
            cls, handle: AnyHandle, rank: int | None = None, *, type: Any = None, **reader: Unpack[CodedReading]
        ) -> Self: ...

        @classmethod
        def create_from_handle(cls, *args: Any, **kwargs: Any) -> Any: ...

        @overload
        @classmethod
        def attach(
            cls, name: str, rank: int | None = None, *, type: type[S], **reader: Unpack[CodedNaming]
        ) -> MessageQueue[S]: ...

        @overload
        @classmethod
        def attach(
            cls, name: str, rank: int | None = None, *, codec: Codec[S], **reader: Unpack[Naming]
        ) -> MessageQueue[S]: ...

        @overload
        @classmethod
        def attach(
            cls, name: str, rank: int | None = None, *, type: Any = None, **reader: Unpack[CodedNaming]
        ) -> Self: ...

        @classmethod
        def attach(cls, *args: Any, **kwargs: Any) -> Any: ...

    @classmethod
    def create_from_process_group(
        cls,
        pg: ProcessGroup | ObjectGroup,
        max_chunk_bytes: int,
        max_chunks: int,
        writer_rank: int = 0,
        external_writer_handle: AnyHandle | None = None,
        blocking: bool = True,
        *,
        options: Options | None = None,
        codec: str | Codec = "pickle",
        connect_ip: str | None = None,
        slots: int | None = None,
        type: type[S] | None = None,  # noqa: A002
    ) -> MessageQueue[S]:
        call = GroupCall(pg, (max_chunk_bytes, max_chunks, slots), connect_ip, codec, options, type)
        end = made(lambda: call.one_writer(writer_rank, external_writer_handle, wait=False), lambda end: end)
        return cast(MessageQueue[S], cls.around(end)._become_ready(blocking))

    @classmethod
    def create_from_process_group_single_reader(
        cls,
        pg: ProcessGroup | ObjectGroup,
        max_chunk_bytes: int,
        max_chunks: int,
        reader_rank: int = 0,
        blocking: bool = False,
        *,
        options: Options | None = None,
        codec: str | Codec = "pickle",
        connect_ip: str | None = None,
        slots: int | None = None,
        type: type[S] | None = None,  # noqa: A002
    ) -> tuple[MessageQueue[S], list[Handle]]:
        call = GroupCall(pg, (max_chunk_bytes, max_chunks, slots), connect_ip, codec, options, type)
        end, handles = made(lambda: call.one_reader(reader_rank, wait=False), lambda made: made[0])
        queue = cls.around(end)._become_ready(blocking and call.rank != reader_rank)
        return cast(MessageQueue[S], queue), handles

    def _become_ready(self, wait: bool) -> Self:
        try:
            if wait:
                self.held.alone(lambda: self.held.run(lambda: become_ready(self.end)), None)
        except BaseException:
            self.close()
            raise
        return self

    # Attaching

    def wait_until_ready(self, timeout: float | None = None) -> None:
        held = self.held
        end = held.end
        deadline = deadline_after(timeout, in_thread=True)
        held.alone(lambda: held.run(lambda: end.wait_until_ready(deadline)), deadline)

    # Sending

    def enqueue(self, obj: T, timeout: float | None = None) -> None:
        held = self.held
        try:  # as `BlockingEnd.send_now`, whose call would cost as much as a tenth of a small message
            message = held.send_if_room(obj)
            if held.pending_wakeups or process_lock.waiting:
                held.settle()
        except BaseException as error:
            held.interrupted(error)
        if message is not None:
            if self._writer is None:
                self._wrong_end("enqueue", "writer")
            held.send(obj, message, deadline_after(timeout, in_thread=True))

    def enqueue_many(self, objs: Iterable[T], timeout: float | None = None) -> None:
        writer = self._writer_of("enqueue_many")
        held = self.held
        deadline = deadline_after(timeout, in_thread=True)

        def send() -> None:
            held.run(lambda: writer.prepare(deadline))
            messages = encode_all(lambda obj: held.encode(writer, obj), objs)
            held.run(lambda: writer.send_many(messages, deadline))

        held.alone(send, deadline)

    def enqueue_nowait(self, obj: T) -> None:
        writer = self._writer_of("enqueue_nowait")
        held = self.held
        message = held.send_now(obj)
        if message is None:
            return

        async def send() -> None:
            writer.check_sending()
            writer.send_now(message)

        held.acquire(None, QueueFull)
        try:
            if message is False:
                held.loop().do(writer.check_sending)
                message = held.encode(writer, obj)
            held.run(send)
        finally:
            held.lock.owner = 0
            held.release()

    def acquire_write(
        self, timeout: float | None = None, *, nbytes: int | None = None
    ) -> AbstractContextManager[memoryview]:
        writer = self._writer_of("acquire_write")
        return WriteBlock(self.held, lambda left: writer.acquire_write(left, nbytes), timeout)

    def loan(
        self, shape: int | Sequence[int], dtype: Any = "float32", like: Like = "numpy", timeout: float | None = None
    ) -> AbstractContextManager[Any]:
        writer = self._writer_of("loan")
        spec = ArraySpec(shape, dtype, like)
        return WriteBlock(self.held, lambda left: writer.loan(spec, left), timeout)

    def loan_bytes(self, nbytes: int, timeout: float | None = None) -> AbstractContextManager[memoryview]:
        writer = self._writer_of("loan_bytes")
        return WriteBlock(self.held, lambda left: writer.loan_bytes(nbytes, left), timeout)

    def build(self, nbytes: int | None = None, timeout: float | None = None) -> AbstractContextManager[Message]:
        writer = self._writer_of("build")
        return WriteBlock(self.held, lambda left: writer.build(nbytes, left), timeout)

    # Receiving

    def dequeue(
        self, timeout: float | None = None, cancel: threading.Event | None = None, indefinite: bool = False
    ) -> T:
        held = self.held
        undelivered = held.undelivered
        if not undelivered:
            try:  # as `BlockingEnd.receive_now`
                held.receive_next(undelivered)
                if held.pending_wakeups or process_lock.waiting:
                    held.settle()
            except BaseException as error:
                held.interrupted(error)
        # No call from this check to the return: handlers and other threads run only in calls, and an object that was
        # removed from the list would be lost.
        if undelivered:
            obj = undelivered[0]
            del undelivered[0]
            return obj  # type: ignore[no-any-return]  # what the codec has decoded
        if self._reader is None:
            self._wrong_end("dequeue", "reader")
        deadline = deadline_after(timeout, cancel, indefinite, in_thread=True)
        while True:
            held.receive(deadline, cancel, indefinite)
            if undelivered:
                obj = undelivered[0]
                del undelivered[0]
                return obj  # type: ignore[no-any-return]

    def dequeue_many(
        self,
        max_items: int,
        timeout: float | None = None,
        cancel: threading.Event | None = None,
        indefinite: bool = False,
    ) -> list[T]:
        self._reader_of("dequeue_many")
        check_int("max_items", max_items, minimum=1)
        held = self.held
        undelivered = held.undelivered
        deadline = deadline_after(timeout, cancel, indefinite, in_thread=True)
        held.loop()  # or this would block an event loop
        held.receive_now(max_items)
        while True:
            if undelivered:
                batch = undelivered[:max_items]
                del undelivered[:max_items]
                return batch
            held.receive(deadline, cancel, indefinite, max_items)

    def dequeue_nowait(self) -> T:
        reader = self._reader_of("dequeue_nowait")
        held = self.held
        undelivered = held.undelivered

        async def receive() -> None:
            undelivered.append(reader.dequeue_nowait())

        held.loop()  # as above
        held.receive_now(1)
        while True:
            if undelivered:
                obj = undelivered[0]
                del undelivered[0]
                return obj  # type: ignore[no-any-return]
            held.acquire(None, QueueEmpty)
            try:
                held.raise_failure()
                held.run(receive)
            finally:
                held.lock.owner = 0
                held.release()

    def acquire_read(
        self, timeout: float | None = None, cancel: threading.Event | None = None, indefinite: bool = False
    ) -> AbstractContextManager[memoryview]:
        self._reader_of("acquire_read")
        return LeaseBlock(self.held, timeout, cancel, indefinite, decoded=False)

    def lease(
        self, timeout: float | None = None, cancel: threading.Event | None = None, indefinite: bool = False
    ) -> AbstractContextManager[T]:
        self._reader_of("lease")
        return LeaseBlock(self.held, timeout, cancel, indefinite, decoded=True)

    def leases(self) -> Leases[T]:
        self._reader_of("leases")
        return Leases(self.lease)

    def broadcast_object(self, obj: T | None = None) -> T:
        if self._writer is None:
            return self.dequeue()
        self.enqueue(cast(T, obj))  # None may be a message, too
        return cast(T, obj)

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        try:
            return self.dequeue()
        except QueueClosed:
            raise StopIteration from None

    # Information, closing

    def trace_contexts(self, count: int) -> list[TraceContext | None]:
        return self._reader_of("trace_contexts").trace_contexts(count, len(self.held.undelivered))

    @property
    def readers(self) -> tuple[ReaderInfo, ...]:
        writer = self._writer_of("readers")
        if self.held.state.closed:
            return ()
        return self.held.loop().do(writer.readers)

    def membership(self, timeout: float | None = None) -> Iterator[Change]:
        writer = self._writer_of("membership")
        return _Changes(self.held, self.held.loop().do(lambda: Membership(writer, timeout)))

    def dismiss(self, rank: int) -> None:
        writer = self._writer_of("dismiss")
        self.held.loop().do(lambda: writer.dismiss(rank))

    @property
    def messages(self) -> int:
        """Number of messages that this end has sent, or that its calls have returned."""
        return self.stats().messages - len(self.held.undelivered)

    def __repr__(self) -> str:
        return repr(self.held)

    def close(self) -> None:
        """Close this end and notify the peer. Idempotent; may be called from any thread.

        Calls that wait in other threads raise `QueueClosed` before this returns. While a block has the slot, or in a
        signal handler that interrupts a call, this returns immediately: further calls raise `QueueClosed`, a block of
        `acquire_write` sends nothing, and the end is closed when the block or call ends.
        """
        self.held.close()

    aclose = close

    def __del__(self) -> None:
        if hasattr(self, "held"):
            self.held.forget()


class _Changes(Iterator[Change]):
    """The changes from now on."""

    def __init__(self, held: BlockingEnd, changes: Membership) -> None:
        self._held = held
        self._changes = changes
        self._kept: list[Change] = []  # at most one per thread; an interrupted call leaves it to the next call

    def __next__(self) -> Change:
        while self._kept or self._wait():
            try:
                return self._kept.pop(0)
            except IndexError:
                continue  # another thread has taken the change
        raise StopIteration

    def _wait(self) -> bool:
        """Wait for a change; return False if the queue was closed."""
        try:
            return self._held.run(self._next)
        except QueueClosed:
            return False

    async def _next(self) -> bool:
        change = await self._changes.next()
        if change is not None:
            self._kept.append(change)
        return change is not None
