"""The queue as its users see it: one class for either end; the work is done by the end that it holds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from typing import TYPE_CHECKING, Any, Self, Unpack, cast, overload

from aioshm.closing import AsyncClosing
from aioshm.codec import Codec, S, T
from aioshm.config import Options
from aioshm.errors import AioshmError, QueueClosed
from aioshm.process.limits import naming_limits
from aioshm.queue.base import Naming, QueueBase, Reading
from aioshm.queue.ends.leasing import Leases
from aioshm.queue.ends.lending import Message
from aioshm.queue.ends.membership import Membership
from aioshm.queue.ends.reading import ReadingEnd
from aioshm.queue.ends.writing import WritingEnd
from aioshm.queue.handle import Handle
from aioshm.queue.local.loans import ArraySpec, Like
from aioshm.queue.membership import ReaderInfo
from aioshm.ring.calls import Calls
from aioshm.wait.limits import deadline_after

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from aioshm.queue.groups.process_group import ObjectGroup


class MessageQueue(QueueBase[T], AsyncClosing):
    """A queue from one writer to many readers, of messages of one type, or of any.

    ``MessageQueue(...)`` makes the writer's end, `create_from_handle` or `attach` a reader's. Either may be made before
    any event loop runs; it then belongs to the loop, thread and process that first await it.
    """

    def _hold(self, end: WritingEnd | ReadingEnd) -> None:
        super()._hold(end)
        # What is called for every message is the end's own, unless a subclass has another: a coroutine that need not
        # wait takes about as long to make as a small message takes to pass.
        calls = end.own_calls()
        name = "enqueue" if self._reader is None else "dequeue"
        if calls is not None and getattr(type(self), name) is getattr(MessageQueue, name):
            vars(self)[name] = getattr(calls, name)

    if TYPE_CHECKING:  # the type of the messages is that of ``type``, or of the codec

        @overload
        @classmethod
        def create_from_handle(
            cls,
            handle: Handle | str | bytes,
            rank: int | None = None,
            *,
            codec: str | Codec | None = None,
            type: type[S],
            **reader: Unpack[Reading],
        ) -> MessageQueue[S]: ...

        @overload
        @classmethod
        def create_from_handle(
            cls, handle: Handle | str | bytes, rank: int | None = None, *, codec: Codec[S], **reader: Unpack[Reading]
        ) -> MessageQueue[S]: ...

        @overload
        @classmethod
        def create_from_handle(
            cls,
            handle: Handle | str | bytes,
            rank: int | None = None,
            *,
            codec: str | Codec | None = None,
            type: Any = None,  # also for a union, which is no `type` to type checkers
            **reader: Unpack[Reading],
        ) -> Self: ...

        @classmethod
        def create_from_handle(cls, *args: Any, **kwargs: Any) -> Any: ...

        @overload
        @classmethod
        def attach(
            cls,
            name: str,
            rank: int | None = None,
            *,
            codec: str | Codec | None = None,
            type: type[S],
            **reader: Unpack[Naming],
        ) -> MessageQueue[S]: ...

        @overload
        @classmethod
        def attach(
            cls, name: str, rank: int | None = None, *, codec: Codec[S], **reader: Unpack[Naming]
        ) -> MessageQueue[S]: ...

        @overload
        @classmethod
        def attach(
            cls,
            name: str,
            rank: int | None = None,
            *,
            codec: str | Codec | None = None,
            type: Any = None,  # also for a union, which is no `type` to type checkers
            **reader: Unpack[Naming],
        ) -> Self: ...

        @classmethod
        def attach(cls, *args: Any, **kwargs: Any) -> Any: ...

    @classmethod
    async def create_from_process_group(
        cls,
        pg: ProcessGroup | ObjectGroup,
        max_chunk_bytes: int,
        max_chunks: int,
        writer_rank: int = 0,
        external_writer_handle: Handle | str | bytes | None = None,
        blocking: bool = True,
        *,
        options: Options | None = None,
        codec: str | Codec = "pickle",
        connect_ip: str | None = None,
        slots: int | None = None,
        type: type[S] | None = None,  # noqa: A002
    ) -> MessageQueue[S]:
        """Make a queue from one rank of a process group to all the others. Every rank awaits this.

        A reader's rank in the queue is its rank in the group. Readers that share memory with the writer, which is tried
        out, read the ring; the others are remote readers.

        A reader that is gone once all were ready is replaced as in any queue, by ``create_from_handle(handle, rank)``
        with what the writer's `export_handle` returns: on the writer's host where that rank was there, else anywhere.

        In a group of one nobody reads: the writer's end is ready at once, and sends to nobody.

        If it fails at one rank, it raises at all. Cancelling it takes effect here at once, and makes it fail at the
        others when their collectives get to it; once all have their end, closes this one instead. Later calls with the
        same group wait until the collectives are over.

        Args:
            pg: A ``torch.distributed.ProcessGroup`` with a backend for the CPU such as gloo, a
                `StatelessProcessGroup`, or an object with ``rank``, ``world_size``, ``broadcast_obj`` and
                ``all_gather_obj``.
            max_chunk_bytes: Room for one message in the ring, in bytes.
            max_chunks: How many messages of that size it has room for.
            writer_rank: Who writes, by rank in the group.
            external_writer_handle: The handle of a queue whose writer is outside of the group: all ranks then read that
                one, ``writer_rank`` too. Only what ``writer_rank`` passes counts.
            blocking: Whether to wait until every rank is attached. Without, await ``wait_until_ready()`` before use.
            options: For the queue, as for `MessageQueue`.
            codec: For the queue. Readers take the writer's; one that is not given by name is that reader's own
                instance.
            connect_ip: The address that remote readers connect to. Only the writer's counts.
            slots: Messages that the ring holds, as for `MessageQueue`. Only the writer's counts.
            type: What the messages are, as for `MessageQueue` and `create_from_handle`.

        Returns:
            The writer's end at ``writer_rank``, a reader's elsewhere.

        Raises:
            HandleError: It failed at another rank, which the text names; or this one cannot attach.
            SharedMemoryError: There is not enough memory, or no socket can be bound.
            ValueError, TypeError: An argument is out of range, or ``writer_rank`` not the same everywhere; ``pg`` is no
                process group, or none that this process belongs to.
            TimeoutError, GroupBroken: A collective of the group failed, whose ranks may be out of step from then on.
            PeerDied, QueueClosed: With ``blocking``: another rank went away before every rank was attached.
        """
        with naming_limits("a reader or a writer"):
            from aioshm.queue.groups.making import GroupCall

        call = GroupCall(pg, (max_chunk_bytes, max_chunks, slots), connect_ip, codec, options, type)
        end = await call.one_writer(writer_rank, external_writer_handle, wait=blocking)
        return cast(MessageQueue[S], cls.around(end))

    @classmethod
    async def create_from_process_group_single_reader(
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
        """Make a queue from every rank of a process group to one of them. Every rank awaits this.

        Each rank, ``reader_rank`` too, gets the writer's end of a queue of its own, whose only reader has rank 0. At
        ``reader_rank`` call ``MessageQueue.create_from_handle(handles[rank], 0)`` for each rank that is to be read.

        If it fails at one rank, it raises at all. Cancelling it: see `create_from_process_group`.

        Args:
            pg: As for `create_from_process_group`.
            max_chunk_bytes: Room for one message in each ring, in bytes.
            max_chunks: How many messages of that size each has room for.
            reader_rank: Who reads, by rank in the group.
            blocking: Whether to wait until the reader is attached to this rank's queue. At ``reader_rank`` itself this
                never waits: only its caller can do what that would wait for.
            options: For the queues, as for `MessageQueue`; each rank's own count.
            codec: For the queues; each rank's own counts.
            connect_ip: The address that a remote reader connects to; each rank's own counts.
            slots: Messages that each ring holds, as for `MessageQueue`; each rank's own counts.
            type: What the messages are, as for `MessageQueue`.

        Returns:
            This rank's writer; and at ``reader_rank`` the handles of all ranks' queues, by rank, elsewhere none.

        Raises:
            HandleError, SharedMemoryError, ValueError, TypeError, TimeoutError, GroupBroken, PeerDied, QueueClosed: As
                `create_from_process_group`.
        """
        with naming_limits("a writer"):
            from aioshm.queue.groups.making import GroupCall

        call = GroupCall(pg, (max_chunk_bytes, max_chunks, slots), connect_ip, codec, options, type)
        end, handles = await call.one_reader(reader_rank, wait=blocking)
        return cast(MessageQueue[S], cls.around(end)), handles

    async def wait_until_ready(self, timeout: float | None = None) -> None:
        """Wait until every reader has the ring mapped. Every end calls this.

        May be cancelled, and called again.

        Args:
            timeout: Seconds to wait; None waits for ever.

        Raises:
            TimeoutError: An end is missing; the text says which.
            PeerDied: The writer, or a reader whose death is not tolerated, died. The writer is told once of a reader
                that was there and died before all were ready; its place is free, and this can be called again.
            HandleError: The writer refused this reader.
        """
        await self.end.wait_until_ready(deadline_after(timeout))

    async def enqueue(self, obj: T, timeout: float | None = None) -> None:
        """Send an object to every reader, waiting for room in the ring.

        After this returns, the object may be changed or freed. Cancelling it has sent the message to every reader or
        to none.

        Args:
            obj: What the queue's codec can encode.
            timeout: Seconds to wait; None waits for ever.

        Raises:
            TimeoutError: No room became free in time; nothing was sent.
            CodecError: The object cannot be encoded; nothing was sent.
            PeerDied: A reader died (with ``on_reader_death="raise"``).
            QueueClosed: This end was closed, or every reader has left.
        """
        writer = self._writer_of("enqueue")
        outcome = writer.send(obj)
        if outcome is not None:
            await writer.enqueue(outcome, obj, timeout)

    async def enqueue_many(self, objs: Iterable[T], timeout: float | None = None) -> None:
        """Send objects, in order and one right after the other, with one wake-up of each reader.

        All of them or none: everything is encoded first, and published once there is room for all. A batch for which
        the whole ring has not enough slots or chunks goes in parts; when this is cancelled or times out, the parts that
        were sent stay sent, which ``stats().messages`` counts.

        Args:
            objs: What the queue's codec can encode.
            timeout: Seconds to wait; None waits for ever.

        Raises:
            TimeoutError: Not enough room became free in time.
            CodecError: An object cannot be encoded; nothing was sent.
            PeerDied, QueueClosed: As `enqueue`.
        """
        writer = self._writer_of("enqueue_many")
        await writer.enqueue_many(objs, timeout)

    def enqueue_nowait(self, obj: T) -> None:
        """Send an object to every reader now.

        A reader that is a whole ring or window behind leaves no room for the message, for any reader. To send past slow
        readers, make them with ``slow_reader="skip"`` or ``"evict"``, or the queue with ``Options(slow_reader=)``.

        Raises:
            QueueFull: There is no room, or other tasks wait for some; nothing was sent. The text names who has to read.
            CodecError, PeerDied, QueueClosed: As `enqueue`.
        """
        writer = self._writer_of("enqueue_nowait")
        writer.enqueue_nowait(obj)

    async def dequeue(
        self, timeout: float | None = None, cancel: asyncio.Event | None = None, indefinite: bool = False
    ) -> T:
        """Receive the next message; it is the caller's own.

        Cancelling this call loses nothing: the next call returns the same message.

        Args:
            timeout: Seconds to wait; None waits for ever.
            cancel: Ends the wait once set.
            indefinite: Report nothing however long this takes. Otherwise the log tells, every
                ``options.stall_warning_s``, what is known of the writer: whether it is stopped, hung, or just has
                nothing to send. Waits for the same message that time out, or are cancelled, count together.

        Raises:
            TimeoutError: Nothing arrived in time.
            QueueCancelled: ``cancel`` is set and no message is there.
            PeerDied: The writer died and everything it published has been read.
            QueueClosed: This end was closed, or the writer was and everything it sent has been read.
            CorruptSlot, CodecError: The message was damaged; the next call returns the one behind it.
            MessagesLost: With ``slow_reader="skip"``: this reader was too slow; the next call continues after it.
            ReaderEvicted: With ``slow_reader="evict"``: this reader was too slow, and receives nothing more.
            QueueRestarted: With ``reconnect=True``: the writer is another one, whose messages later calls return.
        """
        reader = self._reader_of("dequeue")
        return await reader.calls.dequeue(timeout, cancel, indefinite)  # type: ignore[no-any-return]

    async def dequeue_many(
        self,
        max_items: int,
        timeout: float | None = None,
        cancel: asyncio.Event | None = None,
        indefinite: bool = False,
    ) -> list[T]:
        """Wait for a message and return it with those behind it that are there: at least one, at most ``max_items``.

        A batch may end early: before a message that comes with large buffers or is damaged, which is then the next
        call's first, and when the loop's other tasks must have their turn. Cancelling this call loses nothing.

        Raises:
            TimeoutError, QueueCancelled, PeerDied, QueueClosed: As `dequeue`.
            CorruptSlot, CodecError: The first message was damaged; the next call begins with the one behind it.
        """
        reader = self._reader_of("dequeue_many")
        return await reader.dequeue_many(max_items, timeout, cancel, indefinite)

    def dequeue_nowait(self) -> T:
        """Receive the next message if it is there.

        Raises:
            QueueEmpty: It is not, or other tasks wait for it.
            PeerDied, QueueClosed, CorruptSlot, CodecError: As `dequeue`.
        """
        reader = self._reader_of("dequeue_nowait")
        return reader.dequeue_nowait()  # type: ignore[no-any-return]

    def acquire_write(
        self, timeout: float | None = None, *, nbytes: int | None = None
    ) -> AbstractAsyncContextManager[memoryview]:
        """Give so many writable bytes of the ring to the block to fill, which hold whatever was there before.

        The block's end publishes them; a block that raises, or is cancelled, publishes nothing.

        Args:
            timeout: Seconds to wait; None waits for ever.
            nbytes: How many, at most ``max_chunk_bytes``; None: as many as that.

        Raises:
            TimeoutError, PeerDied, QueueClosed: As `enqueue`.
            ValueError: ``nbytes`` is out of range.
        """
        writer = self._writer_of("acquire_write")
        return writer.acquire_write(timeout, nbytes)

    def loan(
        self,
        shape: int | Sequence[int],
        dtype: Any = "float32",
        like: Like = "numpy",
        timeout: float | None = None,
    ) -> AbstractAsyncContextManager[Any]:
        """Lend an array to the block, to be filled where readers will see it, and send it when the block ends.

        Nothing is copied: an array of 64 KiB and more lies in the ring, or in a segment beside it, of whatever size; a
        smaller one is copied, which takes less time. Nothing is sent where the block raises or is cancelled. Readers
        receive what they would if the array had been enqueued: a copy of their own from `dequeue`, a view from `lease`.

        When the block has ended, the memory belongs to the queue. An array of 64 KiB and more, and
        every view of it, then reads as zeros, and what is written to it reaches no reader. Copy
        inside the block what you need afterwards.

        Meanwhile other tasks that send wait, and calls of this one are refused with `RoleError`. With remote readers a
        copy goes over the network; with ``Options(overflow="zmq")`` what is larger than ``max_chunk_bytes`` is copied.

        Args:
            shape: The array's shape, or its length.
            dtype: The name of its type, or that of NumPy or torch itself.
            like: ``"numpy"``, or ``"torch"`` for a tensor.
            timeout: Seconds to wait for room; None waits for ever.

        Raises:
            TimeoutError, PeerDied, QueueClosed, CodecError: As `enqueue`.
            TypeError, ValueError: An argument is not what it has to be; the text names it.
            MessageTooLarge: It has more bytes than ``options.max_message_bytes``.
            SharedMemoryError: At the end: the array is still referred to, and the system refuses to take its memory
                from it. Nothing was sent.
        """
        writer = self._writer_of("loan")
        return writer.loan(ArraySpec(shape, dtype, like), timeout)

    def loan_bytes(self, nbytes: int, timeout: float | None = None) -> AbstractAsyncContextManager[memoryview]:
        """Lend so many writable bytes to the block, as `loan` does an array.

        The bytes hold whatever was there before. Readers receive what the codec makes of bytes-like objects: ``bytes``
        with ``"raw"`` and ``"msgpack"``, a writable bytes-like object with ``"pickle"``; and a lease shows a read-only
        ``memoryview`` of them.

        Args:
            nbytes: How many.
            timeout: Seconds to wait for room; None waits for ever.

        Raises:
            TimeoutError, PeerDied, QueueClosed, MessageTooLarge, SharedMemoryError: As `loan`.
        """
        writer = self._writer_of("loan_bytes")
        return writer.loan_bytes(nbytes, timeout)

    def build(self, nbytes: int | None = None, timeout: float | None = None) -> AbstractAsyncContextManager[Message]:
        """Lend a message to the block that can have arrays inside, to be filled where readers will see them.

        Other parts are encoded as usual::

            async with mq.build() as message:
                message["hidden"] = message.empty((256, 4096), "float16")
                message["hidden"][...] = ...
                message["step"] = 3

        A dict is sent, or whatever ``message.value`` was set to, with the arrays anywhere inside of it. What becomes of
        them is what `loan` says.

        Args:
            nbytes: How much room the arrays need together; None: as much as ``max_chunk_bytes``. Arrays for which that
                is not enough are copied when the block ends.
            timeout: Seconds to wait for room; None waits for ever.

        Raises:
            TimeoutError, PeerDied, QueueClosed, CodecError, MessageTooLarge, SharedMemoryError: As `loan`.
        """
        writer = self._writer_of("build")
        return writer.build(nbytes, timeout)

    def acquire_read(
        self, timeout: float | None = None, cancel: asyncio.Event | None = None, indefinite: bool = False
    ) -> AbstractAsyncContextManager[memoryview]:
        """Give the next message's bytes, undecoded and read-only, to the block.

        They are valid inside the block, whose end releases the slot, also when it raises.

        Raises:
            TimeoutError, QueueCancelled, PeerDied, QueueClosed, CorruptSlot: As `dequeue`.
        """
        reader = self._reader_of("acquire_read")
        return reader.acquire_read(timeout, cancel, indefinite)

    def lease(
        self, timeout: float | None = None, cancel: asyncio.Event | None = None, indefinite: bool = False
    ) -> AbstractAsyncContextManager[T]:
        """Give the next message to the block, decoded where it lies: large arrays, tensors and bytes are not copied.

        What is seen where it lies is read-only: arrays, and a ``memoryview`` of what was bytes. A tensor cannot be:
        what is written to it reaches a private copy of the page (on Linux; elsewhere it ends the process), and nobody
        else. The slot is held until the block ends, also by an exception. What is used after that is a copy, made of
        whatever is still held at the end of the next lease, or some 10 ms after this one, unless a call waits for a
        message then: so a loop's own name for the message causes none, however long the next one takes.

        A message of less than 256 KiB is received as by `dequeue` when the block begins, since a copy takes less time
        than a view. `leases` does the same for one message after the other.

        Until the block ends, calls of other tasks wait, and calls of this one are refused with `RoleError`.

        Raises:
            TimeoutError, QueueCancelled, PeerDied, QueueClosed, CorruptSlot, CodecError: As `dequeue`.
            SharedMemoryError: At the end: something is still held and there is no memory for its copy.
        """
        reader = self._reader_of("lease")
        return reader.lease(timeout, cancel, indefinite)

    def leases(self) -> Leases[T]:
        """Iterate over messages, each leased until the next one is asked for; until the writer closes.

        As a block of `lease` around the loop's body. A loop that is left by ``break``, ``return`` or an exception ends
        its last lease, unless the iterator has a name: then ``await its.aclose()`` does, or `contextlib.aclosing`.

        Raises:
            PeerDied, CorruptSlot, CodecError: As `dequeue`, when the next message is asked for.
            SharedMemoryError: Then as well: what the lease before has shown is still held and there is no memory for
                its copy.
            RoleError: This is the writer's end.
        """
        reader = self._reader_of("leases")
        return reader.leases()

    async def broadcast_object(self, obj: T | None = None) -> T:
        """Send ``obj`` and return it (writer), or receive what the writer sends (reader)."""
        if self._writer is None:
            return await self.dequeue()
        await self.enqueue(cast(T, obj))  # None may be a message, too
        return cast(T, obj)

    @property
    def readers(self) -> tuple[ReaderInfo, ...]:
        """Who reads, at every place that has, had or awaits a reader; of the writer's end. Empty once it was closed."""
        writer = self._writer_of("readers")
        return writer.readers()

    def membership(self, timeout: float | None = None) -> Membership:
        """Iterate over what becomes of readers from now on, with ``async for``, until this end is closed.

        The items are `ReaderJoined`, `ReaderLeft` and `ReaderDied`. The last 1024 are kept for each iteration; one that
        is slower than that gets a `ChangesLost`. `readers` says how it is.

        Args:
            timeout: Seconds for which each step waits before it raises ``TimeoutError``; the next one goes on.
        """
        writer = self._writer_of("membership")
        return Membership(writer, timeout)

    def dismiss(self, rank: int) -> None:
        """Go on without a reader; its place is vacant then.

        One that has died with ``on_reader_death="raise"`` is not raised any more, and a place that ``"hold"`` keeps is
        given up with its messages. One that never came is not waited for. One that lives is evicted: its calls raise
        `ReaderEvicted`. What a block of one on this host sees just now, or a call decodes, may be overwritten under it,
        and its place can be had again when it has closed its end, or has died.

        Raises:
            ValueError: No reader has this rank.
            QueueClosed: This end was closed.
        """
        writer = self._writer_of("dismiss")
        writer.dismiss(rank)

    # Iterating, closing

    def __aiter__(self) -> AsyncIterator[T]:
        reader = self._reader
        if reader is None or vars(self).get("dequeue") != reader.calls.dequeue:
            return self  # `__anext__` calls the `dequeue` of a subclass, or of an observer
        return _Messages(reader)

    async def __anext__(self) -> T:
        try:
            return await self.dequeue()
        except QueueClosed:
            raise StopAsyncIteration from None

    async def __aenter__(self) -> Self:
        """Enter the block that closes this end; a reader begins to attach, so that a writer in the same task meets it.

        Whatever forbids that, the first call that needs it raises.
        """
        if self._reader is not None:
            with suppress(AioshmError):
                self._reader.start_attaching()
        return self

    async def aclose(self) -> None:
        """Close this end: the other side is told, waiting calls raise `QueueClosed`. Idempotent.

        A writer's readers can still read everything that was sent. Where ``on_reader_death="hold"`` keeps messages for
        the replacement of a reader that has died, this waits for that, ``options.linger_s`` at most, and then a warning
        says what is lost. Cancelling this ends that waiting, but does not stop the closing. It may be awaited on any
        loop of the process, in any thread: also while the one that this end belongs to runs in another thread, which
        then does it, and after that one was closed. Where that one has only stopped, what still waits there keeps the
        memory until it goes on.
        """
        await self.end.state.aclose()

    def __repr__(self) -> str:
        return repr(self.end)


Calls.docs = MessageQueue.enqueue.__doc__ or "", MessageQueue.dequeue.__doc__ or ""  # for `help` on an instance


class _Messages(Calls):
    """An iteration over messages, until the queue is closed. Ending the iteration does not close the queue."""

    def __init__(self, reader: ReadingEnd) -> None:
        super().__init__(self._slow_path)
        self._reader = reader

    def __aiter__(self) -> Self:
        return self

    def __anext__(self) -> Coroutine[Any, Any, Any]:
        return self.dequeue()

    async def _slow_path(self, *args: Any) -> Any:
        try:
            return await self._reader.dequeue(*args)
        except QueueClosed:
            raise StopAsyncIteration from None
        finally:
            self.core = self._reader.calls.core

    async def aclose(self) -> None:
        """End the iteration."""
