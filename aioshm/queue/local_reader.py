"""A reader's end of a queue, on the writer's host."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from threading import get_ident
from time import monotonic_ns
from typing import Any, Final

from aioshm.codec.frames import INLINE, OVERFLOW, RAW, plain, split_body, unpack_header, unpack_words
from aioshm.config import Options
from aioshm.errors import AioshmError, CodecError, CorruptSlot, MessagesLost, PeerDied, QueueEmpty
from aioshm.queue.end import deadline_after
from aioshm.queue.handle import Handle
from aioshm.queue.local_end import LocalEnd
from aioshm.queue.report import SUSPECT_STATES, process_state
from aioshm.queue.sockets import SECRET
from aioshm.ring.cursors import Slot

logger = logging.getLogger("aioshm.queue")

_NOTHING: Final = object()
_ELSEWHERE: Final = object()


class LocalReader(LocalEnd):
    """An end that receives; made by `MessageQueue.create_from_handle`, whose docstring describes the arguments."""

    def __init__(self, handle: Handle | str | bytes, rank: int, *, options: Options | None = None) -> None:
        super().__init__(handle, rank, options)
        self._decode = self._codec.decode
        self._code = self._codec.code
        self._plain = plain(self._code)
        self._chunk_bytes = self._handle.max_chunk_bytes
        self._waking = False
        self._wake_at = 0

    # Receiving

    async def dequeue(
        self, timeout: float | None = None, cancel: asyncio.Event | None = None, indefinite: bool = False
    ) -> Any:
        if self._open and self._turn > 0 and get_ident() == self._thread and self._loop_runs():
            obj = self._take()
            if obj is not _NOTHING and obj is not _ELSEWHERE:
                return obj
        deadline = deadline_after(timeout)
        async with self._next_message(deadline, cancel, indefinite):
            obj = self._take()
            if obj is not _ELSEWHERE:
                return obj
            return self._take_body(await self._body(deadline, cancel, indefinite))

    def dequeue_nowait(self) -> Any:
        self._check_nowait()
        if self._in_line:
            raise QueueEmpty(f"{self!r}: other tasks wait in line")
        gone = self._writer_gone  # before looking: what was published before the writer went is then seen
        obj = self._take()
        if obj is _NOTHING:
            raise QueueEmpty(f"{self!r}: nothing to read yet") if gone is None else gone()
        if obj is not _ELSEWHERE:
            return obj
        try:
            body = self._overflow.receive_nowait(self._seq)
        except CorruptSlot:
            self._release()
            raise
        if body is None:
            if self._overflow.lost():
                raise self._payload_lost()
            raise QueueEmpty(f"{self!r}: the payload of message {self._seq} is on its way")
        return self._take_body(body)

    @asynccontextmanager
    async def acquire_read(
        self, timeout: float | None = None, cancel: asyncio.Event | None = None, indefinite: bool = False
    ) -> AsyncIterator[memoryview]:
        deadline = deadline_after(timeout)
        async with self._next_message(deadline, cancel, indefinite) as slot:
            kind, _, _, n_buffers, seq, at, size = unpack_header(slot.header)
            elsewhere = kind == OVERFLOW and self._is_marker(slot, seq)
            if elsewhere:
                body = await self._body(deadline, cancel, indefinite)
                self._overflows += 1
            else:
                body = slot.chunk
            try:
                if (not elsewhere and kind not in (INLINE, RAW)) or seq != self._seq or size > len(body):
                    raise CorruptSlot(seq, self._seq)
                with body[: len(body) if n_buffers else size].toreadonly() as view:
                    yield view
            finally:
                self._release(at)

    async def broadcast_object(self, obj: Any = None) -> Any:
        return await self.dequeue()

    def _take(self) -> Any:
        """Return the next message; or `_NOTHING`, or `_ELSEWHERE` if its body comes over the socket."""
        ring = self._ring
        slot = ring.peek()
        if slot is None:
            return _NOTHING
        what, seq, at, size = unpack_words(slot.header)
        if what != self._plain or seq != ring.seq or size > self._chunk_bytes:
            return self._take_unusual(slot)
        try:
            return self._decode(slot.chunk[:size], ())
        finally:  # what _release does, without the call
            self._published_ns = at
            self._turn = self._turn - 1 if monotonic_ns() < self._turn_ends_ns else 0
            if ring.release():
                self._writer_waits()

    def _take_unusual(self, slot: Slot) -> Any:
        kind, code, _, n_buffers, seq, at, size = unpack_header(slot.header)
        if kind == OVERFLOW and self._is_marker(slot, seq):
            return _ELSEWHERE
        try:
            if seq != self._seq:
                raise CorruptSlot(seq, self._seq)
            if kind == RAW:
                return bytearray(slot.chunk[:size])
            if kind != INLINE:
                raise CorruptSlot(seq, seq, f"there is no kind {kind} of message")
            if code != self._code:
                raise CodecError(f"message {seq} has codec {code}, the queue has {self._code} ({self._codec.name!r})")
            return self._decoded(slot.chunk, n_buffers, size)
        finally:
            self._release(at)

    def _take_body(self, body: memoryview) -> Any:
        """Decode the next message from a body that came over the socket."""
        slot = self._ring.peek()
        assert slot is not None
        _, _, _, n_buffers, _, at, size = unpack_header(slot.header)
        self._overflows += 1
        try:
            return self._decoded(body, n_buffers, size)
        finally:
            self._release(at)

    def _decoded(self, body: memoryview, n_buffers: int, size: int) -> Any:
        main, buffers = split_body(body, n_buffers, size)
        return self._decode(main, buffers)

    def _release(self, published_ns: int = 0) -> None:
        if published_ns:
            self._published_ns = published_ns
        self._turn = self._turn - 1 if monotonic_ns() < self._turn_ends_ns else 0
        if self._ring.release():
            self._writer_waits()

    def _writer_waits(self) -> None:
        """Wake the writer, but not for each slot: it would fill that one and go to sleep again.

        Within one turn of the loop it is woken once, or when half of the ring has become free.
        """
        assert self._loop is not None
        if not self._waking:
            self._waking = True
            self._wake_at = self._ring.seq - 1 + self._handle.max_chunks // 2
            self._loop.call_soon(self._wake_writer)
        if self._ring.seq >= self._wake_at:
            self._wake_writer()

    def _wake_writer(self) -> None:
        self._waking = False
        if not self._dismantled and self._ring.writer_can_go_on():
            self._ring.writer_parked[0] = 0  # one ring is enough until it wakes
            self._lifeline.ring()

    def _is_marker(self, slot: Slot, seq: int) -> bool:
        return seq == self._seq and slot.header[SECRET] == self._lifeline.welcome.secret

    # Waiting

    @asynccontextmanager
    async def _next_message(
        self, deadline: float | None, cancel: asyncio.Event | None, indefinite: bool
    ) -> AsyncIterator[Slot]:
        """Wait in line, then for the next message, which is this task's inside the block."""
        if not self._ready:
            await self._become_ready(deadline, cancel)
        self._check_usable()
        await self._yield_turn()
        await self._enter(deadline, cancel)
        try:
            yield await self._next_slot(deadline, cancel, indefinite)
        finally:
            self._leave()

    async def _next_slot(self, deadline: float | None, cancel: asyncio.Event | None, indefinite: bool) -> Slot:
        assert self._poller is not None
        while True:
            self._check_usable()
            gone = self._writer_gone  # before looking: what was published before the writer went is then seen
            slot = self._ring.peek()
            if slot is not None:
                return slot
            if gone is not None:
                raise gone()
            stall = None if indefinite else self._stall(self._report_writer)
            try:
                if await self._poller.wait(
                    self._may_go_on, self._seq, self._published_ns, deadline=deadline, cancel=cancel, stall=stall
                ):
                    self._new_turn()
            except TimeoutError:
                raise TimeoutError(f"{self!r}: message {self._seq} did not come in time") from None

    def _may_go_on(self) -> bool:
        return self._refusal is not None or self._writer_gone is not None or self._ring.ready()

    async def _body(self, deadline: float | None, cancel: asyncio.Event | None, indefinite: bool) -> memoryview:
        """Wait for the next message's payload from the socket; giving up loses nothing."""
        stall = None if indefinite else self._stall(self._report_payload)
        try:
            body = await self._overflow.receive(self._seq, deadline, cancel, stall)
        except TimeoutError:
            raise TimeoutError(f"{self!r}: the payload of message {self._seq} did not come in time") from None
        except CorruptSlot:
            self._release()
            raise
        self._check_usable()
        if body is None:
            raise self._payload_lost()
        return body

    def _payload_lost(self) -> AioshmError:
        if self._lifeline.said_goodbye:
            return MessagesLost(self._seq, self._ring.messages_written() - 1)
        return PeerDied(-1, self._lifeline.welcome.pid, "writer", f"with the payload of message {self._seq}")

    # Reporting

    @property
    def _seq(self) -> int:
        return self._ring.seq

    def _report_writer(self) -> None:
        # Nothing to read is no news; a writer that cannot write is.
        state = process_state(self._lifeline.writer_pid)
        if state in SUSPECT_STATES:
            logger.warning(
                "%r, rank %d: waited %g s for message %d: the writer (pid %d) is %s",
                self,
                self._rank,
                self._options.stall_warning_s,
                self._seq,
                self._lifeline.welcome.pid,
                state,
            )

    def _report_payload(self) -> None:
        logger.warning(
            "%r, rank %d: waited %g s for the payload of message %d from the writer (pid %d, %s)",
            self,
            self._rank,
            self._options.stall_warning_s,
            self._seq,
            self._lifeline.welcome.pid,
            process_state(self._lifeline.writer_pid),
        )
