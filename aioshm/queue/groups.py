"""Queues between the processes of a process group.

Only handles travel over the group, once; the messages then go through the queues. The group's collectives block, so all
those of one call run in a thread of their own, and the event loop goes on.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from aioshm.codec import Codec
from aioshm.config import Options
from aioshm.errors import HandleError
from aioshm.process.background import in_thread
from aioshm.queue.base import MessageQueue
from aioshm.queue.handle import Handle
from aioshm.queue.process_group import ObjectGroup, as_group, check_rank, gather, tell
from aioshm.queue.same_node import probe
from aioshm.queue.writer_end import WriterEnd

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")


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
    """Make a queue from one rank of a process group to all the others. Every rank awaits this.

    A reader's rank in the queue is its rank in the group. Readers that share memory with the writer, which is tried
    out, read the ring; the others are remote readers.

    In a group of one nobody reads: the writer's end is ready at once, and sends to nobody.

    If it fails at one rank, it raises at all. Cancelling it takes effect here at once, and makes it fail at the others
    when their collectives get to it; once all have their end, closes this one instead. Later calls with the same group
    wait until the collectives are over.

    Args:
        pg: A ``torch.distributed.ProcessGroup`` with a backend for the CPU such as gloo, a `StatelessProcessGroup`, or
            an object with ``rank``, ``world_size``, ``broadcast_obj`` and ``all_gather_obj``.
        max_chunk_bytes: Room for one message in the ring, in bytes.
        max_chunks: Messages that the ring holds.
        writer_rank: Who writes, by rank in the group.
        external_writer_handle: The handle of a queue whose writer is outside of the group: all ranks then read that
            one, ``writer_rank`` too. Only what ``writer_rank`` passes counts.
        blocking: Whether to wait until everybody is attached. Without, await ``wait_until_ready()`` before use.
        options: For the queue, as for `MessageQueue`.
        codec: For the queue. Readers take the writer's; one that is not given by name is that reader's own instance.
        connect_ip: The address that remote readers connect to. Only the writer's counts.

    Returns:
        The writer's end at ``writer_rank``, a reader's elsewhere.

    Raises:
        HandleError: It failed at another rank, which the text names; or this one cannot attach.
        SharedMemoryError: There is not enough memory, or no socket can be bound.
        ValueError, TypeError: An argument is out of range, or ``writer_rank`` not the same everywhere; ``pg`` is no
            process group, or none that this process belongs to.
        TimeoutError, GroupBroken: A collective of the group failed, whose ranks may be out of step from then on.
        PeerDied, QueueClosed: With ``blocking``: another rank went away before everybody was attached.
    """
    call = _Call(pg, max_chunk_bytes, max_chunks, options, codec, connect_ip)
    queue = await call.run(lambda: call.one_writer(writer_rank, external_writer_handle))
    if blocking:
        await _become_ready(queue)
    return queue


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
    """Make a queue from every rank of a process group to one of them. Every rank awaits this.

    Each rank, ``reader_rank`` too, gets the writer's end of a queue of its own, whose only reader has rank 0. At
    ``reader_rank`` call ``MessageQueue.create_from_handle(handles[rank], 0)`` for each rank that is to be read.

    If it fails at one rank, it raises at all. Cancelling it: see `create_from_process_group`.

    Args:
        pg: As for `create_from_process_group`.
        max_chunk_bytes: Room for one message in each ring, in bytes.
        max_chunks: Messages that each ring holds.
        reader_rank: Who reads, by rank in the group.
        blocking: Whether to wait until the reader is attached to this rank's queue. At ``reader_rank`` itself this
            never waits: only its caller can do what that would wait for.
        options: For the queues, as for `MessageQueue`; each rank's own count.
        codec: For the queues; each rank's own counts.
        connect_ip: The address that a remote reader connects to; each rank's own counts.

    Returns:
        This rank's writer; and at ``reader_rank`` the handles of all ranks' queues, by rank, elsewhere none.

    Raises:
        HandleError, SharedMemoryError, ValueError, TypeError, TimeoutError, GroupBroken, PeerDied, QueueClosed: As
            `create_from_process_group`.
    """
    call = _Call(pg, max_chunk_bytes, max_chunks, options, codec, connect_ip)
    queue, handles = await call.run(lambda: call.one_reader(reader_rank))
    if blocking and call.group.rank != reader_rank:
        await _become_ready(queue)
    return queue, handles


class _Call:
    """One rank's part in making queues. Its methods but `run` block, and run in a thread.

    Attributes:
        group: The process group's collectives.
    """

    def __init__(
        self,
        pg: ProcessGroup | ObjectGroup,
        max_chunk_bytes: int,
        max_chunks: int,
        options: Options | None,
        codec: str | Codec,
        connect_ip: str | None,
    ) -> None:
        self._pg = pg
        self.group = as_group(pg)
        self._max_chunk_bytes = max_chunk_bytes
        self._max_chunks = max_chunks
        self._options = options
        self._codec = codec
        self._connect_ip = connect_ip
        self._queue: MessageQueue | None = None
        self._cancelled = threading.Event()

    async def run(self, make: Callable[[], T]) -> T:
        """Run ``make`` in a thread, after the earlier calls with the same group; close its queue if nobody wants it."""
        turn = _Turn(self._pg)

        def work() -> T:
            with turn:
                try:
                    return make()
                except BaseException:
                    self._close()
                    raise

        try:
            return await in_thread(work, discard=lambda _: self._close())
        except asyncio.CancelledError:
            self._cancelled.set()
            raise
        except RuntimeError:
            turn.end()  # if there was no thread to be had
            raise

    def one_writer(self, writer_rank: int, external: Handle | str | bytes | None) -> MessageQueue:
        """Make this rank's end of a queue from one rank to the others."""
        group = self.group

        def check() -> tuple[int, bool]:
            self._check()
            rank = check_rank("writer_rank", writer_rank, group.world_size)
            return rank, group.rank == rank and external is not None

        checked = gather(group, check)
        _check_same("writer_rank", [rank for rank, _ in checked])
        if checked[writer_rank][1]:
            text = tell(group, writer_rank, lambda: _json_of(external))
        else:
            near = probe(group, writer_rank, self._options)
            others = [rank for rank in range(group.world_size) if rank != writer_rank]
            text = tell(
                group,
                writer_rank,
                lambda: self._write(
                    [rank for rank in others if near[rank]], [rank for rank in others if not near[rank]]
                ),
            )
        gather(group, lambda: self._read(text))  # nobody goes on before all have their end
        assert self._queue is not None
        return self._queue

    def one_reader(self, reader_rank: int) -> tuple[MessageQueue, list[Handle]]:
        """Make this rank's queue to the reader, and gather everybody's handles there."""
        group = self.group

        def check() -> int:
            self._check()
            return check_rank("reader_rank", reader_rank, group.world_size)

        _check_same("reader_rank", gather(group, check))
        near = probe(group, reader_rank, self._options)[group.rank]
        texts = gather(group, lambda: self._write([0] if near else [], [] if near else [0]))
        assert self._queue is not None
        return self._queue, [Handle.from_json(text) for text in texts] if group.rank == reader_rank else []

    # Steps, whose errors all ranks are told

    def _check(self) -> None:
        if self._cancelled.is_set():
            raise HandleError("the call was cancelled there")
        if self._options is not None and not isinstance(self._options, Options):
            raise TypeError(f"options must be an Options or None, not {self._options!r}")

    def _write(self, local: Sequence[int], remote: Sequence[int]) -> str:
        self._check()
        elsewhere: dict[str, Any] = {"remote_reader_ranks": remote} if remote else {}
        self._queue = MessageQueue(
            len(local) + len(remote),
            len(local),
            local,
            self._max_chunk_bytes,
            self._max_chunks,
            self._connect_ip,
            codec=self._codec,
            options=self._options,
            **elsewhere,
        )
        return self._queue.export_handle().to_json()

    def _read(self, handle: str) -> None:
        self._check()
        if self._queue is None:  # the writer has its end
            codec = None if isinstance(self._codec, str) else self._codec
            self._queue = MessageQueue.create_from_handle(handle, self.group.rank, codec=codec, options=self._options)

    def _close(self) -> None:
        """Close the queue that was made, if one was; no loop has used it, so it has nothing to wait for."""
        if self._queue is not None:
            with suppress(StopIteration):  # without a loop, for which there may be no descriptor left
                self._queue.aclose().send(None)


class _Turn:
    """A call's place among those with the same group, in the order in which they were made.

    The collectives of two calls at a time would get mixed up, differently at each rank.
    """

    _last: ClassVar[dict[int, threading.Event]] = {}  # by the group's id: set when the last call is over
    _lock: ClassVar = threading.Lock()

    def __init__(self, pg: object) -> None:
        self._pg = pg  # kept, so that no other group gets its id
        self._over = threading.Event()
        with self._lock:
            self._before = self._last.get(id(pg))
            self._last[id(pg)] = self._over

    def __enter__(self) -> None:
        if self._before is not None:
            self._before.wait()

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Let the next call go on. Idempotent."""
        self._over.set()
        with self._lock:
            if self._last.get(id(self._pg)) is self._over:
                del self._last[id(self._pg)]


async def _become_ready(queue: MessageQueue) -> None:
    try:
        if isinstance(queue, WriterEnd):
            await queue.wait_for_these_readers()
        else:
            await queue.wait_until_ready()
    except BaseException:
        await queue.aclose()
        raise


def _json_of(handle: Handle | str | bytes | None) -> str:
    if isinstance(handle, (str, bytes)):
        handle = Handle.from_json(handle)
    if not isinstance(handle, Handle):
        raise TypeError(f"external_writer_handle must be a Handle, its JSON text or None, not {handle!r}")
    return handle.to_json()


def _check_same(name: str, ranks: Sequence[int]) -> None:
    for rank, value in enumerate(ranks):
        if value != ranks[0]:
            raise ValueError(
                f"{name} must be the same at every rank: it is {ranks[0]} at rank 0, {value} at rank {rank}"
            )
