"""A reader's end of a queue whose writer is on another host."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from threading import get_ident
from time import monotonic_ns
from typing import Any

from aioshm.codec import Codec, cannot_decode, loads_of, view_of
from aioshm.codec.buffers import own_copy
from aioshm.codec.frames import INLINE, RAW, split_body
from aioshm.config import Options, check_int
from aioshm.errors import CodecError, MessagesLost, QueueEmpty
from aioshm.queue import wire
from aioshm.queue.delivery import Missing
from aioshm.queue.end import deadline_after
from aioshm.queue.handle import Handle
from aioshm.queue.remote_end import RemoteEnd
from aioshm.ring.atomics import NOTHING
from aioshm.wait.stall import seconds

COPY_BYTES = 16 * 1024
"""Longer messages are decoded where they lie."""

logger = logging.getLogger("aioshm.queue")


class RemoteReader(RemoteEnd):
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
        self._loads = loads_of(self._codec)
        self._view = view_of(self._codec)
        self.receive = self._receive

    # Receiving

    async def dequeue(
        self, timeout: float | None = None, cancel: asyncio.Event | None = None, indefinite: bool = False
    ) -> Any:
        obj = self.receive()
        if obj is not NOTHING:
            return obj
        deadline = deadline_after(timeout, cancel, indefinite)
        await self._line_up(deadline, cancel)
        try:
            await self._next_message(deadline, cancel, indefinite)
            return self._take()
        finally:
            self._leave()

    def _receive(self) -> Any:
        """Return the next message, or `NOTHING` if it is not there or needs more than a look."""
        if not self._passes() or not self._look():
            return NOTHING
        return self._take()

    def _quick_receive(self) -> Callable[[], Any]:
        return self._receive_at_hand

    def _receive_at_hand(self) -> Any:
        """Return the next message if the sockets have been read up to it, or `NOTHING`."""
        return self._take() if self._window.ready and self._passes() else NOTHING

    def _poll(self) -> Any:
        return self._take() if self._look() else NOTHING

    async def dequeue_many(
        self,
        max_items: int,
        timeout: float | None = None,
        cancel: asyncio.Event | None = None,
        indefinite: bool = False,
    ) -> list[Any]:
        check_int("max_items", max_items, minimum=1)
        if self._passes() and self._look():
            return self._take_many(max_items)
        deadline = deadline_after(timeout, cancel, indefinite)
        await self._line_up(deadline, cancel)
        try:
            await self._next_message(deadline, cancel, indefinite)
            return self._take_many(max_items)
        finally:
            self._leave()

    def dequeue_nowait(self) -> Any:
        self._check_nowait()
        if self._in_line:
            raise QueueEmpty(f"{self!r}: other tasks wait in line")
        gone = self._writer_gone
        if not self._look():
            raise QueueEmpty(f"{self!r}: nothing to read yet") if gone is None else gone()
        return self._take()

    def acquire_read(
        self, timeout: float | None = None, cancel: asyncio.Event | None = None, indefinite: bool = False
    ) -> AbstractAsyncContextManager[memoryview]:
        return self._next_in_block(timeout, cancel, indefinite, decoded=False)

    def lease(
        self, timeout: float | None = None, cancel: asyncio.Event | None = None, indefinite: bool = False
    ) -> AbstractAsyncContextManager[Any]:
        return self._next_in_block(timeout, cancel, indefinite, decoded=True)

    @asynccontextmanager
    async def _next_in_block(
        self, timeout: float | None, cancel: asyncio.Event | None, indefinite: bool, *, decoded: bool
    ) -> AsyncIterator[Any]:
        """Give the next message, where it lies, to the block, whose end lets go of it, also when it raises."""
        deadline = deadline_after(timeout, cancel, indefinite)
        await self._line_up(deadline, cancel)
        try:
            data = await self._next_message(deadline, cancel, indefinite)
            self._hold()
            try:
                if decoded:
                    yield self._seen(data)
                else:
                    with data.body.toreadonly() as view:
                        yield view
            finally:
                if not self.undo:
                    self._done()
        finally:
            self._leave()

    async def broadcast_object(self, obj: Any = None) -> Any:
        return await self.dequeue()

    # Waiting

    def _passes(self) -> bool:
        """Return whether this thread may read at once."""
        core = self._core
        return bool(core.open and core.turn > 0 and (self._blocks or get_ident() == self._thread) and self._loop_runs())

    async def _line_up(self, deadline: float | None, cancel: asyncio.Event | None) -> None:
        """Wait until it is this task's turn to read, which lasts until `_leave`."""
        if not self._ready:
            await self._become_ready(deadline, cancel)
        self._check_usable()
        await self._yield_turn()
        await self._enter(deadline, cancel)

    def _look(self) -> bool:
        """Return whether there is something to read, also in the sockets."""
        window = self._window
        if not window.ready and self._sockets is not None:
            self._sockets.look()
            if self._left_behind and not window.ready:
                window.lost_the_rest()
        return bool(window.ready)

    async def _next_message(self, deadline: float | None, cancel: asyncio.Event | None, indefinite: bool) -> wire.Data:
        """Wait for the next message, and leave it where it is.

        Raises:
            MessagesLost: It cannot be had any more; the one behind is next.
        """
        assert self._poller is not None
        while True:
            self._check_usable()
            gone = self._writer_gone  # before looking: what had arrived before the writer went is then seen
            if self._look():
                message = self._window.ready[0][0]
                if isinstance(message, Missing):
                    self._finished_one()
                    raise MessagesLost(message.first, message.last)
                return message
            if gone is not None:
                raise gone()
            stall = None if indefinite else self._stall_of_reading()
            try:
                if await self._poller.wait(
                    self._may_go_on, self._window.taken, 0, deadline=deadline, cancel=cancel, stall=stall
                ):
                    self._new_turn()
            except TimeoutError:
                raise TimeoutError(f"{self!r}: message {self._window.taken} did not come in time") from None
            finally:
                if stall is not None:
                    stall.pause()

    def _may_go_on(self) -> bool:
        return self._refusal is not None or self._writer_gone is not None or bool(self._window.ready)

    def _report_waiting(self, waited_s: float) -> None:
        if not self._ready:
            self._report_not_ready(waited_s)
            return
        level, about = self._findings()
        taken = self._window.taken
        logger.log(
            level, "%r, rank %d: waited %s for message %d: %s", self, self._rank, seconds(waited_s), taken, about
        )

    # Taking

    def _take(self) -> Any:
        """Return the first message in line, which is there, and let go of it whatever it is."""
        message = self._window.ready[0][0]
        try:
            if isinstance(message, Missing):
                raise MessagesLost(message.first, message.last)
            return self._decoded(message)
        finally:
            self._done()

    def _take_many(self, most: int) -> list[Any]:
        """Return what is there: at least one message; it ends before one that is damaged, if that is not the first."""
        batch = [self._take()]
        ready = self._window.ready
        while len(batch) < most and self._core.turn > 0 and self._look():
            message = ready[0][0]
            if isinstance(message, Missing):
                break
            try:
                batch.append(self._decoded(message))
            except CodecError:
                break
            self._done()
        return batch

    def _done(self) -> None:
        core = self._core
        core.turn = core.turn - 1 if monotonic_ns() < core.turn_ends_ns else 0
        self._finished_one()

    def _decoded(self, data: wire.Data) -> Any:
        if data.kind == RAW:
            return bytearray(data.body)
        self._check_codec(data)
        if data.n_buffers or data.main_bytes > COPY_BYTES:
            main, buffers = split_body(data.body, data.n_buffers, data.main_bytes)
            return self._codec.decode(main, buffers)
        try:
            return self._loads(bytes(data.body))
        except Exception as error:
            raise cannot_decode(error, self._codec.name) from error

    def _seen(self, data: wire.Data) -> Any:
        """Decode a message where it lies."""
        # It is nobody else's memory, so views of it may live on; but ZeroMQ aligns it as it likes.
        body = (memoryview(own_copy(data.body)) if data.n_buffers else data.body).toreadonly()
        if data.kind == RAW:
            return body
        self._check_codec(data)
        main, buffers = split_body(body, data.n_buffers, data.main_bytes)
        return self._view(main, buffers)

    def _check_codec(self, data: wire.Data) -> None:
        if data.kind != INLINE or data.codec != self._codec.code:
            raise CodecError(
                f"message {data.seq} has codec {data.codec}, the queue has {self._codec.code} ({self._codec.name!r})"
            )
