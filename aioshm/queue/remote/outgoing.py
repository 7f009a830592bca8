"""Messages on their way to remote readers, as the writer keeps them: encoded once, sent as often as need be."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import suppress
from time import monotonic_ns

import zmq

from aioshm.codec.frames import HEADER, write_body
from aioshm.queue.remote.wire import ADDRESS_BYTES, BODY_APART, ONE_FRAME_BYTES, TRACED

IDLE_BYTES = 64 << 20
"""So much memory is kept to be filled again: touching fresh memory costs more than the copy."""


class Outgoing:
    """One message.

    Attributes:
        head: The first frame, without whom it is for.
        body: The second frame, if there is one.
        nbytes: Of both.
    """

    __slots__ = ("body", "head", "memory", "nbytes", "trackers")

    def __init__(self, head: bytes, body: bytes | memoryview | None, memory: mmap.mmap | None) -> None:
        self.head: bytes = head
        self.body: bytes | memoryview | None = body
        self.memory: mmap.mmap | None = memory
        self.nbytes: int = ADDRESS_BYTES + len(head) + (0 if body is None else len(body))
        self.trackers: list[zmq.MessageTracker] = []

    def used(self) -> bool:
        """Return whether ZeroMQ still reads the body."""
        if self.trackers:
            self.trackers = [tracker for tracker in self.trackers if not tracker.done]
        return bool(self.trackers)


class Outbox:
    """Makes messages, and takes their memory back.

    Attributes:
        nbytes: Size of those that were let go of while ZeroMQ still reads them.
    """

    def __init__(self) -> None:
        self._idle: list[mmap.mmap] = []
        self._used: list[Outgoing] = []
        self.nbytes: int = 0

    def pack(
        self,
        kind: int,
        codec: int,
        seq: int,
        parts: Sequence[bytes | memoryview],
        buffers: Sequence[memoryview],
        size: int,
        trace: bytes = b"",
    ) -> Outgoing:
        """Return a message with a copy of all that the caller may change.

        Args:
            kind: For its header.
            codec: For its header.
            seq: Its sequence number.
            parts: The main part in pieces.
            buffers: The out-of-band buffers.
            size: Of the body that `write_body` makes of them.
            trace: Its trace context, if it has one.
        """
        apart = size > ONE_FRAME_BYTES
        main_bytes, flags = sum(map(len, parts)), (BODY_APART if apart else 0) | (TRACED if trace else 0)
        header = HEADER.pack(kind, codec, flags, len(buffers), seq, monotonic_ns(), main_bytes) + trace
        if not apart:
            if not buffers:
                return Outgoing(b"".join((header, *parts)), None, None)
            gathered = bytearray(len(header) + size)
            gathered[: len(header)] = header
            write_body(memoryview(gathered)[len(header) :], parts, buffers)
            return Outgoing(bytes(gathered), None, None)
        if len(parts) == 1 and not buffers and type(parts[0]) is bytes:
            return Outgoing(header, parts[0], None)
        memory = self._memory(size)
        body = memoryview(memory)[:size]
        write_body(body, parts, buffers)
        return Outgoing(header, body, memory)

    def let_go(self, messages: Sequence[Outgoing]) -> None:
        """Take back what need not be sent any more."""
        for message in messages:
            if message.used():
                self._used.append(message)
                self.nbytes += message.nbytes
            else:
                self._recycle(message)

    def tidy(self) -> None:
        """Look which of the messages that were let go of ZeroMQ does not read any more."""
        if self._used:
            used, self._used = self._used, []
            self.nbytes = 0
            self.let_go(used)

    def _memory(self, size: int) -> mmap.mmap:
        fitting = min((each for each in self._idle if len(each) >= size), key=len, default=None)
        if fitting is not None and len(fitting) <= 4 * size:
            self._idle.remove(fitting)
            return fitting
        memory = mmap.mmap(-1, size)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without them
                memory.madvise(mmap.MADV_HUGEPAGE)
        return memory

    def _recycle(self, message: Outgoing) -> None:
        memory, message.memory, message.body = message.memory, None, None
        if memory is None or len(memory) > IDLE_BYTES:
            return
        self._idle.append(memory)
        while sum(map(len, self._idle)) > IDLE_BYTES:
            self._idle.pop(0)
