"""A reader's end of a queue, on the writer's host."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from aioshm.codec import Codec, cannot_decode, loads_of, view_of
from aioshm.codec.buffers import own_copy
from aioshm.codec.frames import INLINE, OVERFLOW, RAW, body_bytes, plain, split_body, unpack_header
from aioshm.codec.raw import RawCodec
from aioshm.config import Options, check_int
from aioshm.errors import CodecError, CorruptSlot, QueueEmpty
from aioshm.queue.end import deadline_after
from aioshm.queue.handle import Handle
from aioshm.queue.local_slots import LocalSlots
from aioshm.ring.atomics import ELSEWHERE, NOTHING
from aioshm.ring.slot import Slot


class LocalReader(LocalSlots):
    """An end that receives; made by `MessageQueue.create_from_handle`, whose docstring describes the arguments."""

    def __init__(
        self,
        handle: Handle,
        rank: int,
        *,
        codec: str | Codec | None = None,
        options: Options | None = None,
    ) -> None:
        super().__init__(handle, rank, codec, options)
        self._decode = self._codec.decode
        self._code = self._codec.code
        self.receive: Callable[[], Any] = lambda: NOTHING  # until there is a ring
        self._view = view_of(self._codec)

    def _begin(self) -> None:
        self._core.bind(loads_of(self._codec), plain(self._code), isinstance(self._codec, RawCodec), self._writer_waits)
        self.receive = self._core.receive

    # Receiving

    async def dequeue(
        self, timeout: float | None = None, cancel: asyncio.Event | None = None, indefinite: bool = False
    ) -> Any:
        try:
            obj = self.receive()
        except Exception as error:
            raise cannot_decode(error, self._codec.name) from error
        if obj is not NOTHING and obj is not ELSEWHERE:
            return obj
        deadline = deadline_after(timeout, cancel, indefinite)
        await self._line_up(deadline, cancel)
        try:
            await self._next_slot(deadline, cancel, indefinite)
            obj = self._take()
            if obj is not ELSEWHERE:
                return obj
            return await self._take_later(deadline, cancel, indefinite)
        finally:
            self._leave()

    async def dequeue_many(
        self,
        max_items: int,
        timeout: float | None = None,
        cancel: asyncio.Event | None = None,
        indefinite: bool = False,
    ) -> list[Any]:
        check_int("max_items", max_items, minimum=1)
        core = self._core
        if core.passes() and (core.ready() or (core.spin_ns and core.spin(core.spin_ns))):
            batch = self._take_many(max_items)
            if batch:
                return batch
        deadline = deadline_after(timeout, cancel, indefinite)
        await self._line_up(deadline, cancel)
        try:
            await self._next_slot(deadline, cancel, indefinite)
            batch = self._take_many(max_items)
            if batch:
                return batch
            obj = self._take()  # it is no ordinary one
            if obj is ELSEWHERE:
                obj = await self._take_later(deadline, cancel, indefinite)
            return [obj]
        finally:
            self._leave()

    def dequeue_nowait(self) -> Any:
        self._check_nowait()
        if self._in_line:
            raise QueueEmpty(f"{self!r}: other tasks wait in line")
        gone = self._writer_gone  # before looking: what was published before the writer went is then seen
        obj = self._poll()
        if obj is NOTHING:
            raise QueueEmpty(f"{self!r}: nothing to read yet") if gone is None else gone()
        if obj is not ELSEWHERE:
            return obj
        if gone is not None:
            raise self._annex_lost()
        raise QueueEmpty(f"{self!r}: the annex of message {self._seq} is on its way")

    @asynccontextmanager
    async def acquire_read(
        self, timeout: float | None = None, cancel: asyncio.Event | None = None, indefinite: bool = False
    ) -> AsyncIterator[memoryview]:
        deadline = deadline_after(timeout, cancel, indefinite)
        await self._line_up(deadline, cancel)
        try:
            slot = await self._next_slot(deadline, cancel, indefinite)
            self._hold()
            kind, _, _, n_buffers, seq, at, size = unpack_header(slot.header)
            elsewhere = kind == OVERFLOW and self._is_marker(slot, seq)
            body = await self._body(slot, deadline, cancel, indefinite) if elsewhere else slot.chunk
            try:
                if (not elsewhere and kind not in (INLINE, RAW)) or seq != self._seq or size > len(body):
                    raise CorruptSlot(seq, self._seq)
                with body[: len(body) if n_buffers else size].toreadonly() as view:
                    yield view
            finally:
                if elsewhere:
                    body.release()
                if not self.undo:
                    self._release(at)
        finally:
            self._leave()

    @asynccontextmanager
    async def lease(
        self, timeout: float | None = None, cancel: asyncio.Event | None = None, indefinite: bool = False
    ) -> AsyncIterator[Any]:
        deadline = deadline_after(timeout, cancel, indefinite)
        await self._line_up(deadline, cancel, leasing=True)
        try:
            slot = await self._next_slot(deadline, cancel, indefinite)
            self._hold()
            kind, _, _, n_buffers, seq, at, size = unpack_header(slot.header)
            if kind == OVERFLOW and self._is_marker(slot, seq):
                # Into memory of its own: there is no window into an annex.
                body = await self._body(slot, deadline, cancel, indefinite)
                try:
                    copy = memoryview(own_copy(body)).toreadonly()
                    obj = self._seen(copy, kind, n_buffers, size)
                    del copy
                    yield obj
                finally:
                    body.release()
                    if not self.undo:
                        self._release(at)
                return
            leases, nbytes = self._leases_of_this(), 0
            try:
                self._check_inline(slot)
                nbytes = body_bytes(size, [len(part) for part in split_body(slot.chunk, n_buffers, size)[1]])
                obj = self._seen(leases.view(slot.index, nbytes), kind, n_buffers, size)
                yield obj
            finally:
                obj = None
                if not self.undo:
                    self._core.published_ns = at
                    self._core.turn -= 1
                    leases.end(slot.index, nbytes)
        finally:
            self._leave()

    async def broadcast_object(self, obj: Any = None) -> Any:
        return await self.dequeue()

    def _poll(self) -> Any:
        if self._leases is not None:
            self._leases.settle()
        return self._take()

    def _take(self) -> Any:
        """Return the next message; or `NOTHING`, or `ELSEWHERE` if its annex has not arrived yet."""
        try:
            obj = self._core.take()
        except Exception as error:
            raise cannot_decode(error, self._codec.name) from error
        return self._take_unusual() if obj is ELSEWHERE else obj

    def _take_many(self, most: int) -> list[Any]:
        try:
            return self._core.take_many(min(most, sys.maxsize))
        except Exception as error:
            raise cannot_decode(error, self._codec.name) from error

    def _take_unusual(self) -> Any:
        slot = self._ring.peek()
        assert slot is not None
        kind, _, _, n_buffers, seq, at, size = unpack_header(slot.header)
        elsewhere = kind == OVERFLOW and self._is_marker(slot, seq)
        body: memoryview | None = None
        try:
            if elsewhere:
                body = self._annex_body(slot)
                return ELSEWHERE if body is None else self._decoded(body, n_buffers, size)
            self._check_inline(slot)
            if kind == RAW:
                return bytearray(slot.chunk[:size])
            return self._decoded(slot.chunk, n_buffers, size)
        except CorruptSlot:
            elsewhere = False
            raise
        finally:
            if body is not None:
                body.release()
            if body is not None or not elsewhere:
                self._release(at)

    def _check_inline(self, slot: Slot) -> None:
        """Raise unless the slot holds a whole message of this queue's codec, or one without."""
        kind, code, _, _, seq, _, size = unpack_header(slot.header)
        if seq != self._seq:
            raise CorruptSlot(seq, self._seq)
        if kind not in (INLINE, RAW):
            raise CorruptSlot(seq, seq, f"there is no kind {kind} of message")
        if kind == INLINE and code != self._code:
            raise CodecError(f"message {seq} has codec {code}, the queue has {self._code} ({self._codec.name!r})")
        if size > len(slot.chunk):
            raise CodecError(f"damaged message: {size} bytes announced, {len(slot.chunk)} there")

    async def _take_later(self, deadline: float | None, cancel: asyncio.Event | None, indefinite: bool) -> Any:
        """Return the next message once its annex has arrived; giving up loses nothing."""
        while (obj := self._take()) is ELSEWHERE:
            await self._annex(deadline, cancel, indefinite)
        return obj

    def _decoded(self, body: memoryview, n_buffers: int, size: int) -> Any:
        main, buffers = split_body(body, n_buffers, size)
        return self._decode(main, buffers)

    def _seen(self, body: memoryview, kind: int, n_buffers: int, size: int) -> Any:
        """Decode a message where it lies."""
        if kind == RAW:
            return body[:size]
        main, buffers = split_body(body, n_buffers, size)
        return self._view(main, buffers)
