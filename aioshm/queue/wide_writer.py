"""The writer's end of a queue some of whose readers, or all, are on other hosts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from aioshm.codec import Codec, Encoded
from aioshm.codec.frames import INLINE, RAW, body_bytes
from aioshm.codec.pickle5 import PickleCodec
from aioshm.config import Options
from aioshm.errors import AioshmError, PeerDied, UnsafePayload
from aioshm.queue.end import BLOCKING_TURN_NS
from aioshm.queue.handle import RemoteAddress
from aioshm.queue.remote_peers import RemotePeers
from aioshm.queue.stats import QueueStats
from aioshm.queue.wire import HEAD_BYTES
from aioshm.queue.writer import Writer
from aioshm.ring.slot import Slot
from aioshm.wait.line import settle

ZEROMQ_POLL_S = 0.002
"""How often a full window looks whether ZeroMQ has let go of what was sent; it tells nobody."""


class WideWriter(Writer):
    """Sends through the ring to the local readers and over the network to the others, what was encoded once."""

    _blocking_turn_ns = BLOCKING_TURN_NS

    def _open_remote(self, ranks: tuple[int, ...]) -> None:
        check_safety(self._codec, self._options.secure, self._options)
        queue_id = self._buffer.queue_id
        self._remote = RemotePeers(
            self._name, ranks, queue_id, self._token, self._connect_ip, self._options, self._changed
        )
        self._someone_here = bool(self._roster.ranks)
        self.send = self._send

    # The readers, wherever they are

    def _remote_address(self) -> RemoteAddress:
        return self._remote.address

    def _listen(self, loop: asyncio.AbstractEventLoop) -> None:
        super()._listen(loop)
        self._remote.start(loop)

    def _complete(self) -> bool:
        return super()._complete() and self._remote.complete

    def _all_there(self) -> bool:
        self._remote.look()
        return super()._all_there()

    def _alive(self) -> int:
        return super()._alive() + self._remote.alive

    def _missing(self) -> list[str]:
        return super()._missing() + self._remote.missing()

    def _departed(self) -> dict[int, str]:
        return {**super()._departed(), **self._remote.left}

    def _take_death(self) -> PeerDied | None:
        return super()._take_death() or self._remote.take_death()

    def _laggards(self, slots: int = 1) -> str:
        # The window holds back, too, whom the ring would not.
        there = self._remote.laggards() if self._full(slots) else []
        return ", ".join([*self._roster.laggards(slots), *there])

    def _trouble(self) -> Callable[[], AioshmError] | None:
        return super()._trouble() or self._remote.trouble

    def _go(self) -> None:
        super()._go()
        self._remote.go()

    # Sending

    def _parts(self, messages: list[Encoded]) -> list[list[Encoded]]:
        parts = []
        for part in super()._parts(messages):
            while part:
                count = self._remote.part([self._size(message) for message in part])
                parts.append(part[:count])
                part = part[count:]
        return parts

    def _has_room(self, messages: Sequence[Encoded]) -> bool:
        return self._remote_room(messages) and super()._has_room(messages)

    def _remote_room(self, messages: Sequence[Encoded]) -> bool:
        return self._remote.room(len(messages), sum(map(self._size, messages)))

    def _full(self, slots: int = 1) -> bool:
        """Return whether the window holds back what is not sent, whatever its size: it does where the ring does not."""
        return not self._remote.room(slots, 0) or self._ring.free(slots)

    def _why_full(self) -> str:
        return "the window of the remote readers is full" if self._full() else super()._why_full()

    async def _wait_for_room(self, messages: Sequence[Encoded], deadline: float | None) -> None:
        if self._remote_room(messages):
            await super()._wait_for_room(messages, deadline)
        else:
            await self._wait_for_window(lambda: self._remote_room(messages), deadline)

    async def _wait_for_chunk(self, deadline: float | None) -> None:
        if self._remote.room(1, HEAD_BYTES + self._chunk_bytes):
            await super()._wait_for_chunk(deadline)
        else:
            await self._wait_for_window(lambda: self._remote.room(1, HEAD_BYTES + self._chunk_bytes), deadline)

    async def _wait_for_window(self, look: Callable[[], bool], deadline: float | None) -> None:
        """Wait until the remote readers have finished with enough."""
        stall = self._stall_of_writing(1)
        assert self._loop is not None
        try:
            while self._refusal is None and not look():
                timer = None
                self._change = change = self._loop.create_future()
                if self._remote.waits_for_zeromq():
                    timer = self._loop.call_later(ZEROMQ_POLL_S, self._interrupt)
                try:
                    await settle(change, deadline=deadline, stall=stall)
                finally:
                    if timer is not None:
                        timer.cancel()
        except BaseException as error:
            stall.pause()
            if not isinstance(error, TimeoutError):
                raise
            laggards = ", ".join(self._remote.laggards())
            raise TimeoutError(f"{self!r}: the window of the remote readers is full: {laggards}") from None
        stall.pause()
        self._new_turn()

    def _claim_checked(self) -> Slot | None:
        self._check_usable()  # also while the window is full, which nothing else would end
        return super()._claim_checked() if self._remote.room(1, HEAD_BYTES + self._chunk_bytes) else None

    def _send(self, obj: Any) -> Any:
        """Encode and publish an object if nothing forbids it; return what `WriterCore.send` does."""
        if not self._core.passes():
            return False
        message = self._encode(obj)
        return None if self._put(message) else message

    def _put_all(self, messages: list[Encoded]) -> None:
        for message in messages:
            sent = self._publish(message)
            assert sent  # there is room

    def _put(self, message: Encoded) -> bool:
        if not self._remote.room(1, self._size(message)):
            return False
        return self._publish(message)

    def _publish(self, message: Encoded) -> bool:
        """Publish a message that the window has room for, or return False if no slot is free."""
        if isinstance(message, bytes):
            parts: Sequence[bytes | memoryview] = (message,)
            buffers: Sequence[memoryview] = ()
        else:
            parts, buffers = message
        size = self._message_bytes(parts, buffers)
        if not self._ring.free():
            return False
        # First what may fail: then either all readers get it, or none.
        outgoing = self._remote.outbox.pack(INLINE, self._code, self._core.seq, parts, buffers, size)
        if not self._someone_here:
            message = b""  # only to be counted
        if not super()._put(message):
            self._remote.outbox.let_go([outgoing])
            return False
        self._remote.publish(outgoing)
        return True

    def _put_raw(self, slot: Slot) -> None:
        content = [bytes(slot.chunk)]
        outgoing = self._remote.outbox.pack(RAW, 0, self._core.seq, content, (), self._chunk_bytes)
        super()._put_raw(slot)
        self._remote.publish(outgoing)

    @staticmethod
    def _size(message: Encoded) -> int:
        """Return what a message takes of the window."""
        if isinstance(message, bytes):
            return HEAD_BYTES + len(message)
        parts, buffers = message
        return HEAD_BYTES + body_bytes(sum(map(len, parts)), [len(buffer) for buffer in buffers])

    # Telling about itself, closing (see `End`)

    def _current_stats(self) -> QueueStats:
        backlog = max(self._roster.backlog(), self._remote.backlog())
        return msgspec.structs.replace(
            self._stats(self._ring, -1, backlog, self._alive()),
            kept=self._remote.kept,
            kept_bytes=self._remote.kept_bytes,
            resent=self._remote.resent,
        )

    def _say_goodbye(self) -> None:
        super()._say_goodbye()
        self._remote.say_goodbye()

    def _dismantle(self) -> None:
        super()._dismantle()
        if not self._remote.delivering:
            self._remote.close_now()

    def _finished(self) -> bool:
        return not self._remote.delivering

    async def _finish(self) -> None:
        await self._remote.wait_closed()


def check_safety(codec: Codec, encrypted: bool, options: Options) -> None:
    """Refuse to pickle over connections that anybody can write to.

    Raises:
        UnsafePayload: That is what would happen.
    """
    if isinstance(codec, PickleCodec) and not encrypted and not options.allow_insecure_pickle:
        raise UnsafePayload(
            "options.secure is False, so whoever reaches the port could run code by what they send: "
            "use codec='msgpack' or 'raw', or options.allow_insecure_pickle=True where nobody else does"
        )
