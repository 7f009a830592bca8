"""The writer's end of a queue."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from time import monotonic_ns
from typing import Any

from aioshm.codec import Encoded
from aioshm.codec.frames import INLINE, OVERFLOW, RAW, body_bytes, pack_header, write_body
from aioshm.errors import MessageTooLarge, QueueFull
from aioshm.queue.annexes import pack_marker
from aioshm.queue.end import deadline_after
from aioshm.queue.writer_end import WriterEnd
from aioshm.ring.slot import Slot


class Writer(WriterEnd):
    """The end that sends; made by `MessageQueue`, whose docstring describes the arguments."""

    # Sending

    async def enqueue(self, obj: Any, timeout: float | None = None) -> None:
        message = self.send(obj)
        if message is not None:
            await self.enqueue_slowly(obj, message, timeout)

    async def enqueue_slowly(self, obj: Any, message: Any, timeout: float | None) -> None:
        """Do what `WriterCore.send` could not: go on after its answer."""
        deadline = deadline_after(timeout)
        if message is False:
            await self._prepare(deadline)
            message = self._encode(obj)
        if not (self._core.open and self._put(message)):
            await self._put_waiting([message], deadline)

    async def enqueue_many(self, objs: Iterable[Any], timeout: float | None = None) -> None:
        deadline = deadline_after(timeout)
        if not self._core.passes():
            await self._prepare(deadline)
        messages = list(map(self._encode, objs))
        for message in messages:
            if type(message) is not bytes or len(message) > self._chunk_bytes:
                self._check_size(message)
        parts = self._parts(messages)
        if self._core.passes() and len(parts) == 1 and self._has_room(messages):
            self._put_all(messages)
            return
        for part in parts:
            await self._put_waiting(part, deadline)

    def enqueue_nowait(self, obj: Any) -> None:
        self._check_nowait()
        message = self._encode(obj)
        if self._in_line or not self._put(message):
            raise QueueFull(f"{self!r}: {self._why_full()}: {self._laggards()}")

    @asynccontextmanager
    async def acquire_write(self, timeout: float | None = None) -> AsyncIterator[memoryview]:
        deadline = deadline_after(timeout)
        await self._prepare(deadline)
        await self._enter(deadline)
        try:
            while (slot := self._claim_checked()) is None:
                await self._wait_for_chunk(deadline)
            chunk = slot.chunk[:]
            self._hold()
            try:
                yield chunk
            finally:
                chunk.release()
            self._check_usable()
            self._put_raw(slot)
        finally:
            self._leave()

    async def broadcast_object(self, obj: Any = None) -> Any:
        await self.enqueue(obj)
        return obj

    async def _prepare(self, deadline: float | None) -> None:
        """Do what comes before anything that sends: be ready, give the loop its turn, refuse what is refused."""
        if not self._ready:
            await self._become_ready(deadline)
        self._check_usable()
        await self._yield_turn()
        self._check_usable()

    async def _put_waiting(self, messages: list[Encoded], deadline: float | None) -> None:
        """Send messages, at most as many as there are slots, in line and all at once."""
        if not messages:
            return
        await self._enter(deadline)
        try:
            self._check_usable()
            while not self._has_room(messages):
                await self._wait_for_room(messages, deadline)
                self._check_usable()
            self._put_all(messages)
        finally:
            self._leave()

    def _put_all(self, messages: list[Encoded]) -> None:
        """Publish messages for which there are slots."""
        sent = 0
        while sent < len(messages):
            done = self._core.put_many(messages, sent)
            if not done:  # no ordinary message
                self._put(messages[sent])
            sent += done or 1

    def _put_raw(self, slot: Slot) -> None:
        """Publish the claimed slot, which the caller's block has filled."""
        pack_header(slot.header, 0, RAW, 0, 0, 0, self._core.seq, monotonic_ns(), self._chunk_bytes)
        self._commit()

    def _parts(self, messages: list[Encoded]) -> list[list[Encoded]]:
        """Divide messages into runs for which there can be room."""
        most = self._ring.layout.max_chunks
        return [messages[start : start + most] for start in range(0, len(messages), most)]

    def _has_room(self, messages: Sequence[Encoded]) -> bool:
        """Return whether all of some messages can be sent now."""
        return self._ring.free(max(1, len(messages)))

    def _why_full(self) -> str:
        return "no slot is free"

    async def _wait_for_room(self, messages: Sequence[Encoded], deadline: float | None) -> None:
        """Wait for what makes room for all of some messages; there may be more to wait for then."""
        await self._wait_for_slots(len(messages), deadline)

    async def _wait_for_chunk(self, deadline: float | None) -> None:
        """Wait for what lets a slot be claimed."""
        await self._wait_for_slots(1, deadline)

    def _claim_checked(self) -> Slot | None:
        self._check_usable()
        return self._ring.claim()

    async def _wait_for_slots(self, wanted: int, deadline: float | None) -> None:
        poller = self._poller
        assert poller is not None
        free, core = self._ring.free, self._core
        core.spin_for(wanted)
        self._ring.want(wanted)
        stall = self._stall_of_writing(wanted)
        try:
            if await poller.wait(
                lambda: self._refusal is not None or free(wanted),
                core.seq,
                core.published_ns,
                deadline=deadline,
                stall=stall,
            ):
                self._new_turn()
        except TimeoutError:
            what = "no slot became free" if wanted == 1 else f"{wanted} slots did not become free"
            raise TimeoutError(f"{self!r}: {what}: {self._laggards(wanted)}") from None
        finally:
            stall.pause()
            if not self._dismantled:
                core.spin_for(1)
                self._ring.want(1)
                core.spin_ns = poller.inline_spin_ns

    def _put(self, message: Encoded) -> bool:
        """Publish a message, or return False if no slot is free. Has sent to all readers or to none."""
        if isinstance(message, bytes):
            if len(message) <= self._chunk_bytes:
                return self._core.put(message)
            parts: Sequence[bytes | memoryview] = (message,)
            buffers: Sequence[memoryview] = ()
        else:
            parts, buffers = message
        size = self._message_bytes(parts, buffers)
        slot = self._ring.claim()
        if slot is None:
            return False
        kind = INLINE
        if size <= self._chunk_bytes:
            write_body(slot.chunk, parts, buffers)
        else:
            kind = OVERFLOW
            number = self._annexes.put(parts, buffers, size)
            pack_marker(slot.header, self._secret, self._core.seq, number, size)
            self._overflows += 1
        main_bytes = sum(map(len, parts))
        pack_header(slot.header, 0, kind, self._code, 0, len(buffers), self._core.seq, monotonic_ns(), main_bytes)
        self._commit()
        return True

    def _check_size(self, message: Encoded) -> None:
        """Raise `MessageTooLarge` for a message of more bytes than ``options.max_message_bytes``."""
        if isinstance(message, bytes):
            self._message_bytes((message,), ())
        else:
            self._message_bytes(*message)

    def _message_bytes(self, parts: Sequence[bytes | memoryview], buffers: Sequence[memoryview]) -> int:
        size = body_bytes(sum(map(len, parts)), [len(buffer) for buffer in buffers])
        if size > self._options.max_message_bytes:
            raise MessageTooLarge(
                f"the message has {size} bytes, options.max_message_bytes allows {self._options.max_message_bytes}"
            )
        return size

    def _commit(self) -> None:
        core = self._core
        core.published_ns = now = monotonic_ns()
        core.turn = core.turn - 1 if now < core.turn_ends_ns else 0
        if self._ring.commit():
            self._roster.ring_bells()
