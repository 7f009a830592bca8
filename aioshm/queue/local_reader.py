"""A reader's end of a queue, on the writer's host."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from threading import get_ident
from time import monotonic_ns
from typing import Any, Final

from aioshm.codec import get_codec
from aioshm.codec.frames import INLINE, OVERFLOW, RAW, plain, split_body, unpack_header, unpack_words
from aioshm.config import Options, check_int
from aioshm.errors import (
    AioshmError,
    CodecError,
    CorruptSlot,
    HandleError,
    MessagesLost,
    PeerDied,
    QueueClosed,
    QueueEmpty,
)
from aioshm.queue.attachment import Attachment
from aioshm.queue.end import End, deadline_after
from aioshm.queue.handle import Handle
from aioshm.queue.report import SUSPECT_STATES, process_state
from aioshm.queue.sockets import SECRET, OverflowReceiver
from aioshm.queue.stats import QueueStats
from aioshm.ring import RingReader
from aioshm.ring.cursors import Slot
from aioshm.ring.layout import VERSION
from aioshm.wait.attach import Lifeline, dial
from aioshm.wait.line import settle
from aioshm.wait.protocol import Hello

logger = logging.getLogger("aioshm.queue")


_NOTHING: Final = object()
_ELSEWHERE: Final = object()


class LocalReader(End):
    """An end that receives; made by `MessageQueue.create_from_handle`, whose docstring describes the arguments."""

    _side = "reader"

    # Set when the writer has admitted this reader, before which nothing that uses them runs.
    _lifeline: Lifeline
    _ring: RingReader
    _overflow: OverflowReceiver

    def __init__(self, handle: Handle | str | bytes, rank: int, *, options: Options | None = None) -> None:
        if isinstance(handle, (str, bytes)):
            handle = Handle.from_json(handle)
        if not isinstance(handle, Handle):
            raise HandleError(f"not a handle: {type(handle).__name__}")
        handle.check()
        check_int("rank", rank, minimum=0)
        if rank not in handle.local_reader_ranks:
            raise ValueError(f"rank must be one of {handle.local_reader_ranks}, not {rank}")
        self._handle = handle
        self._rank = rank
        self._codec = get_codec(handle.codec)
        self._decode = self._codec.decode
        self._code = self._codec.code
        self._plain = plain(self._code)
        self._chunk_bytes = handle.max_chunk_bytes
        self._hello = Hello(VERSION, handle.queue_id, handle.token, rank, os.getpid())
        self._sock = dial(handle.lifeline, self._hello)
        self._attaching: asyncio.Task[None] | None = None
        self._going: asyncio.Future[None] | None = None
        self._attachment: Attachment | None = None
        self._waking = False
        self._wake_at = 0
        # Set once the writer is gone: what to raise when everything it published has been read.
        self._writer_gone: Callable[[], AioshmError] | None = None
        super().__init__(handle.queue_id, handle.options if options is None else options)

    # Attaching

    async def wait_until_ready(self, timeout: float | None = None) -> None:
        await self._become_ready(deadline_after(timeout))

    async def _become_ready(self, deadline: float | None, cancel: asyncio.Event | None = None) -> None:
        loop = self._bind()
        if self._attaching is None:
            # A task of its own, so that a caller that gives up and comes back finds it where it was.
            self._going = loop.create_future()
            self._attaching = loop.create_task(self._attach())
            self._attaching.add_done_callback(self._attached)
        assert self._going is not None
        try:
            await settle(self._going, deadline=deadline, cancel=cancel, stall=self._stall(self._report_not_ready))
        except TimeoutError:
            raise TimeoutError(f"{self!r}: {self._why_not_ready()}") from None
        if not self._ready:
            self._check_usable()
            assert self._writer_gone is not None
            raise self._writer_gone()
        self._reopen()

    async def _attach(self) -> None:
        sock, self._sock = self._sock, None
        self._attachment = attachment = await Attachment.make(
            self._handle, self._rank, self._hello, sock, self._options.prefault_bytes
        )
        self._lifeline, self._ring, self._overflow = attachment.lifeline, attachment.ring, attachment.overflow
        self._poller = self._new_poller(self._ring.parked, ends=1 + self._handle.layout.n_reader)
        self._lifeline.start(self._on_go, self._poller.wake, self._on_writer_gone)
        await self._overflow.prove()
        self._lifeline.prove()

    def _attached(self, attaching: asyncio.Task[None]) -> None:
        if attaching.cancelled():
            return
        error = attaching.exception()
        if error is not None and self._refusal is None:
            self._refuse(lambda: error if isinstance(error, AioshmError) else HandleError(f"cannot attach: {error}"))

    # What the lifeline tells

    def _on_go(self) -> None:
        self._ready = True
        self._reopen()
        self._going_changed()

    def _on_writer_gone(self, said_goodbye: bool) -> None:
        if said_goodbye:
            self._writer_gone = lambda: QueueClosed(f"{self!r}: the writer has closed the queue")
        else:
            pid = self._lifeline.welcome.pid
            self._writer_gone = functools.partial(PeerDied, -1, pid, "writer", f"queue {self._name}")
        if self._poller is not None:
            self._poller.wake()
        self._going_changed()

    def _going_changed(self) -> None:
        if self._going is not None and not self._going.done():
            self._going.set_result(None)

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
            if kind == OVERFLOW and self._is_marker(slot, seq):
                body = await self._body(deadline, cancel, indefinite)
                self._overflows += 1
            else:
                body = slot.chunk
            try:
                if kind not in (INLINE, OVERFLOW, RAW) or seq != self._seq or size > len(body):
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

    def _why_not_ready(self) -> str:
        if self._attachment is None:
            return "the writer does not answer: does its event loop run, in wait_until_ready()?"
        return "other readers are missing"

    def _report_not_ready(self) -> None:
        logger.warning("%r: waited %g s: %s", self, self._options.stall_warning_s, self._why_not_ready())

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

    def stats(self) -> QueueStats:
        if self._dismantled:
            return self._last_stats
        return self._current_stats()

    def _current_stats(self) -> QueueStats:
        if self._attachment is None:
            return self._stats(None, self._rank, 0, 0)
        return self._stats(self._ring, self._rank, self._ring.messages_written() - self._ring.seq, 0)

    # Closing (see `End`)

    def _interrupt(self) -> None:
        if self._poller is not None:
            self._poller.wake()
        if self._attachment is not None:
            self._overflow.interrupt()
        self._going_changed()

    def _say_goodbye(self) -> None:
        """Say nothing yet: once the writer knows, it overwrites what a block may still be reading."""

    def _dismantle(self) -> None:
        self._last_stats = self._current_stats()
        if self._attaching is not None and self._loop is not None and not self._loop.is_closed():
            self._attaching.cancel()
        if self._sock is not None:
            self._sock.close()
        if self._attachment is not None:
            self._attachment.close()

    async def _finish(self) -> None:
        if self._attaching is not None:
            await asyncio.wait({self._attaching})

    def _abandon(self) -> None:
        if self._sock is not None:
            os.close(self._sock.detach())
        if self._attachment is not None:
            self._lifeline.abandon()
