"""The interface of a queue; what each end does of it is in ``writer.py`` and ``local_reader.py``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self

from aioshm.config import Options
from aioshm.errors import QueueClosed, RoleError
from aioshm.process.limits import naming_limits

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from aioshm.codec import Codec
    from aioshm.queue.handle import Handle
    from aioshm.queue.process_group import ObjectGroup
    from aioshm.queue.stats import QueueStats

MAX_CHUNK_BYTES = 24 * 1024 * 1024
MAX_CHUNKS = 10

_UNMADE: Final = "MessageQueue is made as one of its ends, each of which has this method"


class MessageQueue:
    """A queue from one writer to many readers.

    ``MessageQueue(...)`` makes the writer's end, `create_from_handle` a reader's. Either may be made before any event
    loop runs; it then belongs to the loop, thread and process that first await it.

    Args:
        n_reader: Readers in all; each receives every message. With none, as in a group of one, everything is sent at
            once, to nobody.
        n_local_reader: Readers on this host, which read the ring; the others connect over TCP.
        local_reader_ranks: Their ranks; None means 0 to n_local_reader - 1.
        max_chunk_bytes: Room for one message in the ring, in bytes; larger ones lie in memory beside it.
        max_chunks: Messages that the ring holds before the writer has to wait for the slowest reader.
        connect_ip: The address of this host that remote readers connect to; None: the one that its packets to other
            hosts have. ``"*"``, ``"0.0.0.0"`` or ``"::"``: all of them, with that one in the handle.
        codec: How objects become bytes: ``"pickle"``, ``"msgpack"``, ``"raw"``, the name of a codec that was registered
            with `register_codec`, or a codec of one's own making, such as ``MsgpackCodec(type=Step)``.
        options: Everything else; None takes the defaults and the environment.
        remote_reader_ranks: The ranks of the remote readers; None means the lowest that are not local.

    Raises:
        ValueError, TypeError: An argument is out of range; the text names it.
        UnsafePayload: There are remote readers, and ``options.secure=False`` goes with pickle.
        SharedMemoryError: There is not enough memory, or no socket can be bound.
    """

    _side: ClassVar[str]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        if cls is not MessageQueue:
            return object.__new__(cls)
        if _all_local(*args, **kwargs):
            with naming_limits("a writer"):
                from aioshm.queue.writer import Writer

            return object.__new__(Writer)  # type: ignore[return-value]
        with naming_limits("a writer"):
            from aioshm.queue.wide_writer import WideWriter

        return object.__new__(WideWriter)  # type: ignore[return-value]

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
        raise AssertionError(_UNMADE)

    @staticmethod
    def create_from_handle(
        handle: Handle | str | bytes,
        rank: int,
        *,
        codec: str | Codec | None = None,
        options: Options | None = None,
    ) -> MessageQueue:
        """Make a reader's end: a local one if the rank is one of ``handle.local_reader_ranks``, else a remote one.

        Args:
            handle: The writer's handle, or its JSON text.
            rank: Which reader this is.
            codec: This end's own instance of the writer's codec, such as ``MsgpackCodec(type=Step)``; None makes one.
            options: For this end; None takes the writer's.

        Raises:
            HandleError: Not a handle, or of another version, host or user, or its queue is gone, or it needs a codec
                that is not registered here.
            ValueError: No reader has this rank, or ``codec`` is another one than the writer's.
        """
        from aioshm.queue.handle import as_handle

        handle = as_handle(handle)
        if handle.remote is not None and rank in handle.remote.ranks:
            with naming_limits("a reader"):  # which reading the file may reach
                from aioshm.queue.remote_reader import RemoteReader

            return RemoteReader(handle, rank, codec=codec, options=options)
        with naming_limits("a reader"):
            from aioshm.queue.local_reader import LocalReader

        return LocalReader(handle, rank, codec=codec, options=options)

    @staticmethod
    async def create_from_process_group(
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
    ) -> MessageQueue:
        """Make a queue from one rank of a process group to all the others; every rank awaits this.

        See `aioshm.queue.groups.create_from_process_group`, which this is.
        """
        with naming_limits("a reader or a writer"):
            from aioshm.queue.groups import create_from_process_group

        return await create_from_process_group(
            pg,
            max_chunk_bytes,
            max_chunks,
            writer_rank,
            external_writer_handle,
            blocking,
            options=options,
            codec=codec,
            connect_ip=connect_ip,
        )

    @staticmethod
    async def create_from_process_group_single_reader(
        pg: ProcessGroup | ObjectGroup,
        max_chunk_bytes: int,
        max_chunks: int,
        reader_rank: int = 0,
        blocking: bool = False,
        *,
        options: Options | None = None,
        codec: str | Codec = "pickle",
        connect_ip: str | None = None,
    ) -> tuple[MessageQueue, list[Handle]]:
        """Make a queue from every rank of a process group to one of them; every rank awaits this.

        See `aioshm.queue.groups.create_from_process_group_single_reader`, which this is.
        """
        from aioshm.queue.groups import create_from_process_group_single_reader

        return await create_from_process_group_single_reader(
            pg,
            max_chunk_bytes,
            max_chunks,
            reader_rank,
            blocking,
            options=options,
            codec=codec,
            connect_ip=connect_ip,
        )

    def export_handle(self) -> Handle:
        """Return what readers need in order to attach: picklable, and JSON by its ``to_json``."""
        raise self._wrong_end("export_handle", "writer")

    async def wait_until_ready(self, timeout: float | None = None) -> None:
        """Wait until every reader has the ring mapped. Every end calls this.

        May be cancelled, and called again.

        Args:
            timeout: Seconds to wait; None waits for ever.

        Raises:
            TimeoutError: Somebody is missing; the text says who.
            PeerDied: The writer, or a reader whose death is not tolerated, died. The writer is told once of a reader
                that was there and died before all were ready; its place is free, and this can be called again.
            HandleError: The writer refused this reader.
        """
        raise AssertionError(_UNMADE)

    async def enqueue(self, obj: Any, timeout: float | None = None) -> None:
        """Send an object to every reader, waiting for a free slot.

        After this returns, the object may be changed or freed. Cancelling it has sent the message to every reader or
        to none.

        Args:
            obj: What the queue's codec can encode.
            timeout: Seconds to wait; None waits for ever.

        Raises:
            TimeoutError: No slot became free in time; nothing was sent.
            CodecError: The object cannot be encoded; nothing was sent.
            PeerDied: A reader died (with ``on_reader_death="raise"``).
            QueueClosed: This end was closed, or every reader has left.
        """
        raise self._wrong_end("enqueue", "writer")

    async def enqueue_many(self, objs: Iterable[Any], timeout: float | None = None) -> None:
        """Send objects, in order and one right after the other, with one wake-up of each reader.

        All of them or none: everything is encoded first, and published once there are slots for all. A batch of more
        than ``max_chunks`` goes in parts of that size; when this is cancelled or times out, the parts that were sent
        stay sent, which ``stats().messages`` counts.

        Args:
            objs: What the queue's codec can encode.
            timeout: Seconds to wait; None waits for ever.

        Raises:
            TimeoutError: Not enough slots became free in time.
            CodecError: An object cannot be encoded; nothing was sent.
            PeerDied, QueueClosed: As `enqueue`.
        """
        raise self._wrong_end("enqueue_many", "writer")

    def enqueue_nowait(self, obj: Any) -> None:
        """Send an object to every reader now.

        Raises:
            QueueFull: There is no free slot, or other tasks wait for one; nothing was sent.
            CodecError, PeerDied, QueueClosed: As `enqueue`.
        """
        raise self._wrong_end("enqueue_nowait", "writer")

    async def dequeue(
        self, timeout: float | None = None, cancel: asyncio.Event | None = None, indefinite: bool = False
    ) -> Any:
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
        """
        raise self._wrong_end("dequeue", "reader")

    async def dequeue_many(
        self,
        max_items: int,
        timeout: float | None = None,
        cancel: asyncio.Event | None = None,
        indefinite: bool = False,
    ) -> list[Any]:
        """Wait for a message and return it with those behind it that are there: at least one, at most ``max_items``.

        A batch may end early: before a message that comes with large buffers or is damaged, which is then the next
        call's first, and when the loop's other tasks must have their turn. Cancelling this call loses nothing.

        Raises:
            TimeoutError, QueueCancelled, PeerDied, QueueClosed: As `dequeue`.
            CorruptSlot, CodecError: The first message was damaged; the next call begins with the one behind it.
        """
        raise self._wrong_end("dequeue_many", "reader")

    def dequeue_nowait(self) -> Any:
        """Receive the next message if it is there.

        Raises:
            QueueEmpty: It is not, or other tasks wait for it.
            PeerDied, QueueClosed, CorruptSlot, CodecError: As `dequeue`.
        """
        raise self._wrong_end("dequeue_nowait", "reader")

    def acquire_write(self, timeout: float | None = None) -> AbstractAsyncContextManager[memoryview]:
        """Give the next free slot's chunk to the block to fill: ``max_chunk_bytes`` writable bytes.

        The block's end publishes it; a block that raises, or is cancelled, publishes nothing.

        Raises:
            TimeoutError, PeerDied, QueueClosed: As `enqueue`.
        """
        raise self._wrong_end("acquire_write", "writer")

    def acquire_read(
        self, timeout: float | None = None, cancel: asyncio.Event | None = None, indefinite: bool = False
    ) -> AbstractAsyncContextManager[memoryview]:
        """Give the next message's bytes, undecoded and read-only, to the block.

        They are valid inside the block, whose end releases the slot, also when it raises.

        Raises:
            TimeoutError, QueueCancelled, PeerDied, QueueClosed, CorruptSlot: As `dequeue`.
        """
        raise self._wrong_end("acquire_read", "reader")

    def lease(
        self, timeout: float | None = None, cancel: asyncio.Event | None = None, indefinite: bool = False
    ) -> AbstractAsyncContextManager[Any]:
        """Give the next message to the block, decoded where it lies: arrays, tensors and bytes are not copied.

        What points into the slot is read-only where its type allows; a tensor does not, and writing to one ends the
        process with SIGSEGV: ``clone()`` it. The slot is held until the block ends, also by an exception. What is used
        after that is a copy, made when the block ends for whatever is still held; of a message above 256 KiB up to
        10 ms later, or at the end of the next lease, so that a loop's own name for it causes none.

        Raises:
            TimeoutError, QueueCancelled, PeerDied, QueueClosed, CorruptSlot, CodecError: As `dequeue`.
            SharedMemoryError: At the end: something is still held and there is no memory for its copy.
        """
        raise self._wrong_end("lease", "reader")

    async def broadcast_object(self, obj: Any = None) -> Any:
        """Send ``obj`` and return it (writer), or receive what the writer sends (reader)."""
        raise AssertionError(_UNMADE)

    def stats(self) -> QueueStats:
        """Return what this end has done so far. Works at any time, also after closing."""
        raise AssertionError(_UNMADE)

    # Iterating, closing

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        try:
            return await self.dequeue()
        except QueueClosed:
            raise StopAsyncIteration from None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close this end: the other side is told, waiting calls raise `QueueClosed`. Idempotent.

        A writer's readers can still read everything that was sent. Cancelling this does not stop it. It may be awaited
        on any loop of the process, in any thread: also while the one that this end belongs to runs in another thread,
        which then does it, and after that one was closed. Where that one has only stopped, what still waits there keeps
        the memory until it goes on.
        """
        raise AssertionError(_UNMADE)

    def _wrong_end(self, call: str, end: str) -> RoleError:
        return RoleError(f"{call}() belongs to the queue's {end}; this is a {self._side}: {self!r}")


def _all_local(n_reader: object = None, n_local_reader: object = None, *_args: object, **_kwargs: object) -> bool:
    return n_reader == n_local_reader
