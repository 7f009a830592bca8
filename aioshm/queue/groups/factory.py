"""Queues between the processes of a process group.

Only handles travel over the group, once. The group's collectives block, so they run in a thread.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from aioshm.codec import Codec
from aioshm.config import Options
from aioshm.errors import HandleError
from aioshm.process.background import in_thread
from aioshm.queue.ends.factory import ReaderArguments, checked_ranks, create_reader, create_writer
from aioshm.queue.ends.reader import Reader
from aioshm.queue.ends.writer import Writer
from aioshm.queue.groups.process_group import ObjectGroup, as_group, broadcast, check_rank, gather, probe
from aioshm.queue.handle import Handle

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")


class GroupCall:
    """One rank's part in creating queues; the private methods block, and run in a thread."""

    def __init__(
        self,
        pg: ProcessGroup | ObjectGroup,
        sizes: tuple[int, int, int | None],
        connect_ip: str | None,
        codec: str | Codec,
        options: Options | None,
        message: Any = None,
    ) -> None:
        self._pg = pg
        self._group = as_group(pg)
        self._sizes = sizes
        self._options = options
        self._codec = codec
        self._message = message
        self._connect_ip = connect_ip
        self._end: Writer | Reader | None = None
        self._cancelled = threading.Event()

    @property
    def rank(self) -> int:
        """This process' rank in the group."""
        return self._group.rank

    async def _run(self, make: Callable[[], T]) -> T:
        """Run ``make`` in a thread, after earlier calls with the same group; close the end after a cancellation."""
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
            turn.end()  # no thread could be started
            raise

    async def one_writer(
        self, writer_rank: int, external: Handle | str | bytes | None, *, wait: bool
    ) -> Writer | Reader:
        """Create this rank's end of a queue with one writer; ``wait``: until ready."""
        end = await self._run(lambda: self._make_one_writer(writer_rank, external))
        if wait:
            await become_ready(end)
        return end

    async def one_reader(self, reader_rank: int, *, wait: bool) -> tuple[Writer, list[Handle]]:
        """Create this rank's queue to one reader; ``wait``: until ready, except at the reader."""
        end, handles = await self._run(lambda: self._make_one_reader(reader_rank))
        if wait and self._group.rank != reader_rank:
            await become_ready(end)
        return end, handles

    def _make_one_writer(self, writer_rank: int, external: Handle | str | bytes | None) -> Writer | Reader:
        group = self._group
        if self._agree("writer_rank", writer_rank, external)[writer_rank]:
            text = broadcast(group, writer_rank, lambda: _json_of(external))
        else:
            near = probe(group, writer_rank, self._options)
            others = [rank for rank in range(group.world_size) if rank != writer_rank]
            local = [rank for rank in others if near[rank]]
            remote = [rank for rank in others if not near[rank]]
            text = broadcast(group, writer_rank, lambda: self._write(local, remote, writer_rank))
        gather(group, lambda: self._read(text))  # every rank waits for all ends
        assert self._end is not None
        return self._end

    def _make_one_reader(self, reader_rank: int) -> tuple[Writer, list[Handle]]:
        group = self._group
        self._agree("reader_rank", reader_rank)
        near = probe(group, reader_rank, self._options)[group.rank]
        texts = gather(group, lambda: self._write([0] * near, [0] * (not near)))
        assert isinstance(self._end, Writer)
        if group.rank != reader_rank:
            return self._end, []
        return self._end, [Handle.from_json(text) for text in texts]

    # Steps

    def _agree(self, name: str, rank: int, external: object = None) -> list[bool]:
        """Check that every rank makes the same call; return which ranks have an external handle."""

        def check() -> tuple[str, int, bool]:
            self._check()
            return name, check_rank(name, rank, self._group.world_size), external is not None

        calls = gather(self._group, check)
        for other, (argument, value, _) in enumerate(calls):
            if argument != calls[0][0]:
                raise ValueError(
                    f"every rank must make the same call: rank 0 has {calls[0][0]}, rank {other} {argument}"
                )
            if value != calls[0][1]:
                raise ValueError(
                    f"{name} must be the same at every rank: it is {calls[0][1]} at rank 0, {value} at rank {other}"
                )
        return [has_handle for _, _, has_handle in calls]

    def _check(self) -> None:
        if self._cancelled.is_set():
            raise HandleError("the call was cancelled there")
        if self._options is not None and not isinstance(self._options, Options):
            raise TypeError(f"options must be an Options or None, not {self._options!r}")

    def _write(self, local: Sequence[int], remote: Sequence[int], own_rank: int = -1) -> str:
        self._check()
        self._end = end = create_writer(
            checked_ranks(len(local) + len(remote), len(local), local, remote),
            self._sizes,
            self._connect_ip,
            self._codec,
            self._options,
            self._message,
            own_rank=own_rank,
        )
        return end.export_handle().to_json()

    def _read(self, handle: str) -> None:
        self._check()
        if self._end is None:  # not at the writer
            codec = None
            if not isinstance(self._codec, str):
                codec = self._codec
            arguments = ReaderArguments(self._group.rank, codec, self._options, None, self._message)
            self._end = create_reader(handle, arguments)

    def _close(self) -> None:
        """Close an end that no loop has used."""
        if self._end is not None:
            self._end.state.discard()


class _Turn:
    """A call's turn among the calls with the same group, whose collectives must not mix."""

    _last: ClassVar[dict[int, threading.Event]] = {}  # by the group's id: set at the end of the latest call
    _lock: ClassVar = threading.Lock()

    def __init__(self, pg: object) -> None:
        self._pg = pg  # keeps the id in use
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
        """Start the next call. Idempotent."""
        self._over.set()
        with self._lock:
            if self._last.get(id(self._pg)) is self._over:
                del self._last[id(self._pg)]


async def become_ready(end: Writer | Reader) -> None:
    """Wait until an end of a group's queue is ready; close the end if that fails, such as when a rank has left."""
    try:
        if isinstance(end, Writer):
            await end.wait_until_ready(None, replaceable=False)
        else:
            await end.wait_until_ready(None)
    except BaseException:
        await end.state.aclose()
        raise


def _json_of(handle: Handle | str | bytes | None) -> str:
    if isinstance(handle, (str, bytes)):
        handle = Handle.from_json(handle)
    if not isinstance(handle, Handle):
        raise TypeError(f"external_writer_handle must be a Handle, its JSON text or None, not {handle!r}")
    return handle.to_json()
