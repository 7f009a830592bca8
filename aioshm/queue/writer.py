"""The writer's end of a queue."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from time import monotonic_ns
from typing import Any

from aioshm.codec import Codec, Encoded, get_codec
from aioshm.codec.frames import INLINE, OVERFLOW, RAW, body_bytes, pack_header, plain, write_body
from aioshm.codec.raw import RawCodec
from aioshm.config import Options, check_int
from aioshm.errors import MessageTooLarge, QueueFull
from aioshm.queue.annexes import SECRET_BYTES, Annexes, pack_marker
from aioshm.queue.base import MAX_CHUNK_BYTES, MAX_CHUNKS
from aioshm.queue.end import End, deadline_after
from aioshm.queue.handle import Handle, host_id
from aioshm.queue.roster import Roster
from aioshm.queue.stats import QueueStats
from aioshm.ring import ShmRingBuffer
from aioshm.ring.atomics import WriterCore
from aioshm.ring.layout import VERSION
from aioshm.ring.slot import Slot
from aioshm.wait.address import new_address
from aioshm.wait.lifeline import LifelineListener
from aioshm.wait.line import settle
from aioshm.wait.protocol import Welcome

logger = logging.getLogger("aioshm.queue")

TOKEN_BYTES = 32


class Writer(End):
    """The end that sends; made by `MessageQueue`, whose docstring describes the arguments."""

    _side = "writer"
    _core: WriterCore

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
    ) -> None:
        ranks = _checked_ranks(n_reader, n_local_reader, local_reader_ranks)
        if connect_ip is not None and not isinstance(connect_ip, str):
            raise TypeError(f"connect_ip must be a string or None, not {connect_ip!r}")
        self._connect_ip = connect_ip
        self._codec = get_codec(codec)
        self._encode = self._codec.encode
        self._code = self._codec.code
        options = Options.from_env() if options is None else options
        if not isinstance(options, Options):
            raise TypeError(f"options must be an Options, not {options!r}")
        self._chunk_bytes = max_chunk_bytes
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._buffer = ShmRingBuffer(n_local_reader, max_chunk_bytes, max_chunks, backing=options.backing)
        try:
            queue_id = self._buffer.queue_id
            self._listener = LifelineListener(
                new_address(options, queue_id, "lifeline"), queue_id, self._token, backlog=max(64, n_local_reader)
            )
        except BaseException:
            self._buffer.close()
            raise
        self._segment_name = self._buffer.name
        self._buffer.prefault(options.prefault_bytes, write=True)
        self._ring = self._buffer.writer()
        self._ring.set_writer_state(closed=False, pid=os.getpid())
        self._roster = Roster(
            queue_id.hex()[:8], ranks, self._ring, options.on_reader_death, self._welcome, self._changed
        )
        self._core = self._ring.core
        self._core.bind(self._encode, plain(self._code), isinstance(self._codec, RawCodec), self._roster.ring_bells)
        self.send = self._core.send
        self._annexes = Annexes(self._ring, self._roster.hand_over)
        self._listening = False
        self._change: asyncio.Future[None] | None = None
        super().__init__(queue_id, options)

    # Attaching

    def export_handle(self) -> Handle:
        sizes = self._ring.layout
        return Handle(
            version=VERSION,
            queue_id=self._buffer.queue_id,
            token=self._token,
            host=host_id(),
            uid=os.geteuid(),
            n_reader=sizes.n_reader,
            local_reader_ranks=self._roster.ranks,
            max_chunk_bytes=sizes.max_chunk_bytes,
            max_chunks=sizes.max_chunks,
            lifeline=self._listener.address,
            segment=self._segment_name,
            codec=self._codec.name,
            connect_ip=self._connect_ip,
            options=self._options,
        )

    async def wait_until_ready(self, timeout: float | None = None) -> None:
        await self._become_ready(deadline_after(timeout))

    async def _become_ready(self, deadline: float | None) -> None:
        loop = self._bind()
        if not self._listening:
            self._listening = True
            self._listener.start(loop, self._roster)
        stall = self._stall(self._report_missing)
        try:
            while not self._roster.complete:
                if self._change is None or self._change.done():
                    self._change = loop.create_future()
                await settle(self._change, deadline=deadline, stall=stall)
                self._check_usable()  # a reader may have died
        except TimeoutError:
            raise TimeoutError(f"{self!r}: not attached yet: {self._roster.missing()}") from None
        if not self._ready:
            self._ready = True
            self._poller = self._new_poller(self._ring.parked, self._roster.pids())
            self._buffer.unlink()  # everybody has it mapped
            self._roster.go()
            logger.debug("%r: %d readers", self, self._roster.alive)
            self._reopen()

    def _changed(self) -> None:
        """Look again at the readers and at the ring."""
        if self._roster.trouble is not None and self._refusal is None:
            self._refuse(self._roster.trouble)
        else:
            self._interrupt()

    def _welcome(self) -> tuple[Welcome, list[int]]:
        by_descriptor = self._segment_name is None
        welcome = Welcome(os.getpid(), self._secret, by_descriptor, self._listener.bell is not None)
        return welcome, [self._buffer.fd] if by_descriptor else []

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
        most = self._ring.layout.max_chunks
        if self._core.passes() and len(messages) <= most and self._ring.free(max(1, len(messages))):
            self._put_all(messages)
            return
        for start in range(0, len(messages), most):
            await self._put_waiting(messages[start : start + most], deadline)

    def enqueue_nowait(self, obj: Any) -> None:
        self._check_nowait()
        message = self._encode(obj)
        if self._in_line or not self._put(message):
            raise QueueFull(f"{self!r}: no slot is free: {self._roster.laggards()}")

    @asynccontextmanager
    async def acquire_write(self, timeout: float | None = None) -> AsyncIterator[memoryview]:
        deadline = deadline_after(timeout)
        await self._prepare(deadline)
        await self._enter(deadline)
        try:
            while (slot := self._claim_checked()) is None:
                await self._wait_for_slots(1, deadline)
            chunk = slot.chunk[:]
            self._hold()
            try:
                yield chunk
            finally:
                chunk.release()
            self._check_usable()
            pack_header(slot.header, 0, RAW, 0, 0, 0, self._core.seq, monotonic_ns(), self._chunk_bytes)
            self._commit()
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
            while not self._ring.free(len(messages)):
                await self._wait_for_slots(len(messages), deadline)
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

    def _claim_checked(self) -> Slot | None:
        self._check_usable()
        return self._ring.claim()

    async def _wait_for_slots(self, wanted: int, deadline: float | None) -> None:
        poller = self._poller
        assert poller is not None
        free, core = self._ring.free, self._core
        core.spin_for(wanted)
        self._ring.want(wanted)
        try:
            if await poller.wait(
                lambda: self._refusal is not None or free(wanted),
                core.seq,
                core.published_ns,
                deadline=deadline,
                stall=self._stall(lambda: self._report_laggards(wanted)),
            ):
                self._new_turn()
        except TimeoutError:
            what = "no slot became free" if wanted == 1 else f"{wanted} slots did not become free"
            raise TimeoutError(f"{self!r}: {what}: {self._roster.laggards(wanted)}") from None
        finally:
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

    # Reporting

    def _report_missing(self) -> None:
        logger.warning(
            "%r: waited %g s for readers to attach: %s", self, self._options.stall_warning_s, self._roster.missing()
        )

    def _report_laggards(self, wanted: int) -> None:
        logger.warning(
            "%r: waited %g s to write message %d: not read by %s",
            self,
            self._options.stall_warning_s,
            self._ring.seq,
            self._roster.laggards(wanted),
        )

    def _current_stats(self) -> QueueStats:
        return self._stats(self._ring, -1, self._roster.backlog(), self._roster.alive)

    # Closing (see `End`)

    def _interrupt(self) -> None:
        if self._change is not None and not self._change.done():
            self._change.set_result(None)
        self._wake()

    def _say_goodbye(self) -> None:
        self._ring.set_writer_state(closed=True, pid=os.getpid())
        self._listener.close()

    def _dismantle(self) -> None:
        self._listener.close()
        self._annexes.close()
        self._ring.close()
        self._buffer.close()

    def _abandon(self) -> None:
        self._listener.abandon()


def _checked_ranks(n_reader: int, n_local_reader: int, ranks: Sequence[int] | None) -> tuple[int, ...]:
    check_int("n_reader", n_reader, minimum=1)
    check_int("n_local_reader", n_local_reader, minimum=0)
    if n_local_reader != n_reader:
        raise ValueError(
            f"n_local_reader is {n_local_reader} and n_reader {n_reader}: this release has no readers on other hosts"
        )
    checked = tuple(range(n_local_reader) if ranks is None else ranks)
    if len(checked) != n_local_reader or len(set(checked)) != n_local_reader:
        raise ValueError(f"local_reader_ranks must be {n_local_reader} different ranks, not {ranks!r}")
    for rank in checked:
        if check_int("a rank in local_reader_ranks", rank, minimum=0) >= n_reader:
            raise ValueError(f"local_reader_ranks must be below n_reader ({n_reader}), not {rank}")
    return checked
