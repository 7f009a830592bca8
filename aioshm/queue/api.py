"""The async API: one class for writers and readers, which forwards to its `Writer` or `Reader`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from typing import TYPE_CHECKING, Any, Self, Unpack, cast, overload

from aioshm.closing import AsyncClosing
from aioshm.codec import Codec, S, T
from aioshm.config import Options
from aioshm.errors import AioshmError, QueueClosed
from aioshm.process.limits import naming_limits
from aioshm.queue.base import AnyHandle, CodedNaming, CodedReading, Naming, QueueBase, Reading
from aioshm.queue.ends.blocks import Leases, Message
from aioshm.queue.ends.reader import Reader
from aioshm.queue.ends.writer import Membership, Writer
from aioshm.queue.handle import Handle
from aioshm.queue.local.loans import ArraySpec, Like
from aioshm.queue.membership import ReaderInfo
from aioshm.ring.cores import Calls
from aioshm.wait.limits import deadline_after

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from aioshm.queue.groups.process_group import ObjectGroup


class MessageQueue(QueueBase[T], AsyncClosing):
    """A queue from one writer to many readers.

    ``MessageQueue(...)`` creates the writer; `create_from_handle` and `attach` create readers. An end may be created
    before any event loop runs. It belongs to the loop, thread and process that first await it.
    """

    def _hold(self, end: Writer | Reader) -> None:
        super()._hold(end)
        # The instance gets the core's awaitable, unless a subclass overrides the call: creating a coroutine that need
        # not wait takes about as long as a small message takes to pass.
        name = "enqueue"
        if self._reader is not None:
            name = "dequeue"
        if end.calls is not None and getattr(type(self), name) is getattr(MessageQueue, name):
            vars(self)[name] = getattr(end.calls, name)

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
    async def create_from_process_group(
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
        """Make a queue from one rank of a process group to all other ranks. Every rank awaits this.

        A reader has the rank that its process has in the group. Readers that share memory with the writer read the
        ring; all others are remote readers. In a group of one, the writer sends to nobody. To replace a reader, call
        ``create_from_handle(handle, rank)`` with the handle of the writer's `export_handle`.

        If this fails at one rank, it raises at all ranks. Cancelling it fails all other ranks, too, unless all have
        their end already. Later calls with the same group wait until its collectives are over.

        Args:
            pg: A ``torch.distributed.ProcessGroup`` with a CPU backend such as gloo, a `StatelessProcessGroup`, or an
                object with ``rank``, ``world_size``, ``broadcast_obj`` and ``all_gather_obj``.
            max_chunk_bytes: Room for one message in the ring, in bytes.
            max_chunks: Number of messages of that size in the ring.
            writer_rank: The writer's rank in the group.
            external_writer_handle: The handle of a queue with a writer outside of the group: all ranks read that queue,
                ``writer_rank`` too. Only the argument of ``writer_rank`` counts.
            blocking: Whether to wait until every rank is attached. If not, await ``wait_until_ready()`` before use.
            options: As for `MessageQueue`.
            codec: The writer's counts; a reader may pass its own instance of the same codec.
            connect_ip: The address that remote readers connect to. Only the writer's counts.
            slots: As for `MessageQueue`. Only the writer's counts.
            type: The type of the messages, as for `MessageQueue` and `create_from_handle`.

        Returns:
            The writer's end at ``writer_rank``, a reader's elsewhere.

        Raises:
            HandleError: It failed at another rank, which the text names; or this rank cannot attach.
            SharedMemoryError: There is not enough memory, or no socket can be bound.
            ValueError, TypeError: An argument is out of range, ``writer_rank`` differs between ranks, or ``pg`` is no
                process group of this process.
            TimeoutError, GroupBroken: A collective of the group failed; its ranks may be out of step from then on.
            PeerDied, QueueClosed: With ``blocking``: a rank went away before every rank was attached.
        """
        with naming_limits("a reader or a writer"):
            from aioshm.queue.groups.factory import GroupCall

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

        Each rank, ``reader_rank`` too, gets the writer's end of its own queue, with rank 0 as its only reader. At
        ``reader_rank``, call ``MessageQueue.create_from_handle(handles[rank], 0)`` for each rank.

        Errors and cancellation: see `create_from_process_group`.

        Args:
            pg: As for `create_from_process_group`.
            max_chunk_bytes: Room for one message in each ring, in bytes.
            max_chunks: Number of messages of that size in each ring.
            reader_rank: The reader's rank in the group.
            blocking: Whether to wait until the reader is attached to this rank's queue. ``reader_rank`` never waits.
            options: As for `MessageQueue`; each rank's own counts, also for ``codec``, ``connect_ip`` and ``slots``.
            codec: As for `MessageQueue`.
            connect_ip: As for `MessageQueue`.
            slots: As for `MessageQueue`.
            type: As for `MessageQueue`.

        Returns:
            This rank's writer; and at ``reader_rank`` the handles of all ranks' queues, by rank, elsewhere none.

        Raises:
            HandleError, SharedMemoryError, ValueError, TypeError, TimeoutError, GroupBroken, PeerDied, QueueClosed: As
                `create_from_process_group`.
        """
        with naming_limits("a writer"):
            from aioshm.queue.groups.factory import GroupCall

        call = GroupCall(pg, (max_chunk_bytes, max_chunks, slots), connect_ip, codec, options, type)
        end, handles = await call.one_reader(reader_rank, wait=blocking)
        return cast(MessageQueue[S], cls.around(end)), handles

    async def wait_until_ready(self, timeout: float | None = None) -> None:
        """Wait until every reader is attached. Every end may call this, and call it again after cancelling it.

        Args:
            timeout: Seconds to wait; None waits for ever.

        Raises:
            TimeoutError: An end is missing; the text says which.
            PeerDied: The writer died, or a reader whose death is not tolerated. The writer raises this once for a
                reader that died before all were ready; the rank is vacant then, and this can be called again.
            HandleError: The writer refused this reader.
        """
        await self.end.wait_until_ready(deadline_after(timeout))

    async def enqueue(self, obj: T, timeout: float | None = None) -> None:
        """Send an object to every reader, waiting for room in the ring.

        After this returns, the object may be changed or freed. A cancelled call has sent the message to every reader
        or to none.

        Args:
            obj: An object that the queue's codec can encode.
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

        All of them or none: everything is encoded first, and published once there is room for all. There are two
        exceptions: a batch larger than the whole ring goes in parts, and a message larger than a chunk may find no
        memory after earlier messages were sent. ``stats().messages`` counts the messages sent.

        Args:
            objs: Objects that the queue's codec can encode.
            timeout: Seconds to wait; None waits for ever.

        Raises:
            TimeoutError: Not enough room became free in time.
            CodecError: An object cannot be encoded; nothing was sent.
            SharedMemoryError, OutOfDescriptors: There is no memory for a message larger than a chunk.
            PeerDied, QueueClosed: As `enqueue`.
        """
        writer = self._writer_of("enqueue_many")
        await writer.enqueue_many(objs, timeout)

    def enqueue_nowait(self, obj: T) -> None:
        """Send an object to every reader now.

        A reader that is a whole ring or window behind leaves no room for the message, for any reader. To send past slow
        readers, make them with ``slow_reader="skip"`` or ``"evict"``, or the queue with ``Options(slow_reader=)``.

        Raises:
            QueueFull: There is no room, or other tasks wait for some; nothing was sent. The text names slow readers.
            CodecError, PeerDied, QueueClosed: As `enqueue`.
        """
        writer = self._writer_of("enqueue_nowait")
        writer.enqueue_nowait(obj)

    async def dequeue(
        self, timeout: float | None = None, cancel: asyncio.Event | None = None, indefinite: bool = False
    ) -> T:
        """Receive the next message; it belongs to the caller.

        Cancelling this call loses nothing: the next call returns the same message.

        Args:
            timeout: Seconds to wait; None waits for ever.
            cancel: Ends the wait once set.
            indefinite: Report nothing however long this takes. Otherwise the log says, every
                ``options.stall_warning_s``, whether the writer is stopped, hung, or has nothing to send. Waits for the
                same message that time out, or are cancelled, count together.

        Raises:
            TimeoutError: Nothing arrived in time.
            QueueCancelled: ``cancel`` is set and no message is there.
            PeerDied: The writer died and everything it published has been read.
            QueueClosed: This end was closed, or the writer was and everything it sent has been read.
            CorruptSlot, CodecError: The message was damaged; the next call returns the message behind it.
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
        """Wait for a message; return it and the available ones behind it, ``max_items`` at most.

        A batch may end early: before a message with large buffers or a damaged one, which the next call returns first,
        and when the loop's other tasks are due. Cancelling this call loses nothing.

        Raises:
            TimeoutError, QueueCancelled, PeerDied, QueueClosed: As `dequeue`.
            CorruptSlot, CodecError: The first message was damaged; the next call begins with the message behind it.
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
        """Give writable bytes of the ring to the block, with arbitrary content, and send them when the block ends.

        A block that raises, or is cancelled, sends nothing.

        Args:
            timeout: Seconds to wait; None waits for ever.
            nbytes: Number of bytes. None: ``max_chunk_bytes``, which is the most.

        Raises:
            TimeoutError, PeerDied, QueueClosed: As `enqueue`.
            ValueError: ``nbytes`` is out of range.
        """
        writer = self._writer_of("acquire_write")
        return writer.acquire_write(timeout, nbytes)

    def loan(
        self, shape: int | Sequence[int], dtype: Any = "float32", like: Like = "numpy", timeout: float | None = None
    ) -> AbstractAsyncContextManager[Any]:
        """Lend an array to the block, which fills it in place, and send it when the block ends.

        An array of 64 KiB and more lies in the ring, or in a segment beside it, and is not copied; a smaller one is. A
        block that raises, or is cancelled, sends nothing. Readers receive the array as if it had been enqueued: a copy
        from `dequeue`, a view from `lease`.

        After the block, the memory belongs to the queue: an array of 64 KiB and more, and every view of it, reads as
        zeros, and writing to it reaches no reader. Copy inside the block what you need afterwards.

        During the block, other tasks that send wait, and calls of this task raise `RoleError`. Remote readers get a
        copy; with ``Options(overflow="zmq")`` an array larger than ``max_chunk_bytes`` is copied, too.

        Args:
            shape: The array's shape, or its length.
            dtype: The name of a dtype, or a dtype of NumPy or torch.
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
        """Lend writable bytes with arbitrary content to the block, as `loan` lends an array.

        Readers receive ``bytes`` with ``"raw"`` and ``"msgpack"``, and a writable bytes-like object with ``"pickle"``;
        a lease shows a read-only ``memoryview``.

        Args:
            nbytes: Number of bytes.
            timeout: Seconds to wait for room; None waits for ever.

        Raises:
            TimeoutError, PeerDied, QueueClosed, MessageTooLarge, SharedMemoryError: As `loan`.
        """
        writer = self._writer_of("loan_bytes")
        return writer.loan_bytes(nbytes, timeout)

    def build(self, nbytes: int | None = None, timeout: float | None = None) -> AbstractAsyncContextManager[Message]:
        """Lend a message to the block, with arrays inside that the block fills in place.

        Other parts are encoded as usual::

            async with mq.build() as message:
                message["hidden"] = message.empty((256, 4096), "float16")
                message["hidden"][...] = ...
                message["step"] = 3

        The message is a dict, or the value of ``message.value``, with the arrays anywhere inside. For the arrays see
        `loan`.

        Args:
            nbytes: Room for all arrays together. None: ``max_chunk_bytes``. Further arrays are copied when the block
                ends.
            timeout: Seconds to wait for room; None waits for ever.

        Raises:
            TimeoutError, PeerDied, QueueClosed, CodecError, MessageTooLarge, SharedMemoryError: As `loan`.
        """
        writer = self._writer_of("build")
        return writer.build(nbytes, timeout)

    def acquire_read(
        self, timeout: float | None = None, cancel: asyncio.Event | None = None, indefinite: bool = False
    ) -> AbstractAsyncContextManager[memoryview]:
        """Give the next message's bytes, undecoded and read-only, to the block; its end releases the slot.

        Raises:
            TimeoutError, QueueCancelled, PeerDied, QueueClosed, CorruptSlot: As `dequeue`.
        """
        reader = self._reader_of("acquire_read")
        return reader.lease(timeout, cancel, indefinite, decoded=False)

    def lease(
        self, timeout: float | None = None, cancel: asyncio.Event | None = None, indefinite: bool = False
    ) -> AbstractAsyncContextManager[T]:
        """Give the next message to the block, decoded in place: large arrays, tensors and bytes are not copied.

        Arrays, and the ``memoryview`` that replaces bytes, are read-only. Writing to a tensor changes a private copy of
        the page (on Linux; elsewhere it ends the process). The slot is held until the block ends. If you keep an array
        after the block, it becomes a private copy: at the end of the next lease, or about 10 ms after this lease unless
        a call waits for a message then. A loop's own variable for the message therefore causes no copy.

        A message of less than 512 KiB is received as by `dequeue`, which is faster. `leases` leases one message after
        the other. During the block, calls of other tasks wait, and calls of this task raise `RoleError`.

        Raises:
            TimeoutError, QueueCancelled, PeerDied, QueueClosed, CorruptSlot, CodecError: As `dequeue`.
            SharedMemoryError: At the end: something is still in use and there is no memory for its copy.
        """
        reader = self._reader_of("lease")
        return reader.lease(timeout, cancel, indefinite)

    def leases(self) -> Leases[T]:
        """Iterate over messages, each leased until the next one is asked for; until the writer closes.

        As a block of `lease` around the loop's body. Leaving the loop ends the last lease, unless a variable holds the
        iterator: then close it (``aclose``, `contextlib.aclosing`).

        Raises:
            PeerDied, CorruptSlot, CodecError, SharedMemoryError: As `lease`, when the next message is due.
            RoleError: This is the writer's end.
        """
        reader = self._reader_of("leases")
        return Leases(reader)

    async def broadcast_object(self, obj: T | None = None) -> T:
        """Send ``obj`` and return it (writer), or receive what the writer sends (reader)."""
        if self._writer is None:
            return await self.dequeue()
        await self.enqueue(cast(T, obj))  # None may be a message, too
        return cast(T, obj)

    @property
    def readers(self) -> tuple[ReaderInfo, ...]:
        """The readers: one entry for each rank that has, had or awaits a reader. Empty after closing; writer only."""
        writer = self._writer_of("readers")
        return writer.readers()

    def membership(self, timeout: float | None = None) -> Membership:
        """Iterate over changes of the readers from now on, until this end is closed.

        The items are `ReaderJoined`, `ReaderLeft` and `ReaderDied`; an iteration that is more than 1024 changes behind
        gets a `ChangesLost`, after which `readers` has the present state.

        Args:
            timeout: Seconds for which each step waits before it raises ``TimeoutError``; the next one continues.
        """
        writer = self._writer_of("membership")
        return Membership(writer, timeout)

    def dismiss(self, rank: int) -> None:
        """Continue without a reader; its rank is vacant then.

        A dead reader is not raised any more (``on_reader_death="raise"``), or not held with its messages (``"hold"``).
        A reader that never came is not waited for. A live reader is evicted: its calls raise `ReaderEvicted`, memory
        that a block of a local one shows may be overwritten, and its rank is vacant when it has closed its end or died.

        Raises:
            ValueError: No reader has this rank.
            QueueClosed: This end was closed.
        """
        writer = self._writer_of("dismiss")
        writer.dismiss(rank)

    # Iterating, closing

    def __aiter__(self) -> AsyncIterator[T]:
        return _Messages(self)

    async def __anext__(self) -> T:
        try:
            return await self.dequeue()
        except QueueClosed:
            raise StopAsyncIteration from None

    async def __aenter__(self) -> Self:
        """Enter the block that closes this end. A reader starts to attach, so that a writer in the same task finds it.

        This waits for nobody: await `wait_until_ready`, or receive, to wait for the writer. If attaching fails, the
        first call that needs it raises the error.
        """
        if self._reader is not None:
            with suppress(AioshmError):
                self._reader.start_attaching()
        return self

    async def aclose(self) -> None:
        """Close this end and notify the peer; waiting calls raise `QueueClosed`. Idempotent.

        Readers can still read everything that the writer has sent. If ``on_reader_death="hold"`` holds messages for a
        dead reader's replacement, this waits up to ``options.linger_s`` for it, and then logs what is lost. Cancelling
        this ends that wait, not the closing. Once the owning loop has ended, any loop may await this; if the owning
        loop is stopped but not closed, its pending calls keep the memory mapped until it runs again.
        """
        await self.end.state.aclose()

    def __repr__(self) -> str:
        return repr(self.end)


Calls.docs = MessageQueue.enqueue.__doc__ or "", MessageQueue.dequeue.__doc__ or ""  # for `help` on an instance


class _Messages(AsyncIterator[T]):
    """An iteration over messages. Ending the iteration does not close the queue."""

    def __init__(self, queue: MessageQueue[T]) -> None:
        self._queue = queue

    async def __anext__(self) -> T:
        return await self._queue.__anext__()

    async def aclose(self) -> None:
        """End the iteration."""
