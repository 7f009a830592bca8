"""Messages of remote queues: at the writer encoded, kept and sent again; at the reader joined from parts."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import suppress
from time import monotonic_ns
from typing import TYPE_CHECKING, Self

import msgspec

from aioshm.codec import Encoded
from aioshm.codec.base import OwnMemory
from aioshm.codec.frames import HEADER, message_bytes, write_body
from aioshm.config import Options
from aioshm.queue.remote import wire
from aioshm.queue.remote.window import Outgoing, SendWindow
from aioshm.ring.layout import TRACE_BYTES

if TYPE_CHECKING:
    from aioshm.queue.remote.sockets import WriterSockets


class MessageMemory(mmap.mmap, OwnMemory):
    """Anonymous memory of one message, with huge pages where the kernel has them; raises OSError without memory."""

    def __new__(cls, nbytes: int) -> Self:
        memory = super().__new__(cls, -1, nbytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without huge pages
                memory.madvise(mmap.MADV_HUGEPAGE)
        return memory


def pack(
    kind: int,
    codec: int,
    seq: int,
    parts: Sequence[bytes | memoryview],
    buffers: Sequence[memoryview],
    size: int,
    trace: bytes = b"",
) -> Outgoing:
    """Return a message with a copy of all mutable memory."""
    flags = 0
    if size > wire.ONE_FRAME_BYTES:
        flags |= wire.BODY_APART
    if trace:
        flags |= wire.TRACED
    main_bytes = sum(map(len, parts))
    header = HEADER.pack(kind, codec, flags, len(buffers), seq, monotonic_ns(), main_bytes) + trace
    if size <= wire.ONE_FRAME_BYTES:
        if not buffers:
            return Outgoing(b"".join((header, *parts)))
        gathered = bytearray(len(header) + size)
        gathered[: len(header)] = header
        write_body(memoryview(gathered)[len(header) :], parts, buffers)
        return Outgoing(bytes(gathered))
    if len(parts) == 1 and not buffers and type(parts[0]) is bytes:
        return Outgoing(header, parts[0])
    body = memoryview(MessageMemory(size))
    write_body(body, parts, buffers)
    return Outgoing(header, body)


class Flow:
    """Sends messages to remote readers, within the window."""

    pack = staticmethod(pack)

    def __init__(self, sockets: WriterSockets, topic: bytes, options: Options) -> None:
        self._sockets = sockets
        self._topic = topic
        self._everyone = wire.address(topic)
        self.window: SendWindow = SendWindow(options.remote_window, options.remote_window_bytes, options.remote_history)
        self.resent: int = 0
        self._head_bytes = wire.HEAD_BYTES + TRACE_BYTES * options.trace_context

    def room(self, messages: int, nbytes: int) -> bool:
        """Return whether there is room for so many more messages."""
        return self.window.room(messages, nbytes)

    def window_bytes(self, *sizes: int) -> int:
        """Return the most bytes of the window that messages of these sizes take."""
        return sum(sizes) + self._head_bytes * len(sizes)

    def parts(self, messages: list[Encoded]) -> list[list[Encoded]]:
        """Divide messages into runs that fit an empty window."""
        parts = []
        while messages:
            sizes = [self.window_bytes(message_bytes(message)) for message in messages]
            count = self.window.part(sizes)
            parts.append(messages[:count])
            messages = messages[count:]
        return parts

    def publish(self, message: Outgoing) -> None:
        """Send the next message to every reader."""
        self.window.sent(message)
        if self.window.readers:
            self._transmit(self._everyone, message)

    def resend(self, rank: int, first: int) -> None:
        """Send the messages from ``first`` on to one reader again; raise `WireError` if it was never sent."""
        address = wire.address(self._topic, rank)
        for message in self.window.resend(rank, first):
            self.resent += 1
            self._transmit(address, message)

    def _transmit(self, address: bytes, message: Outgoing) -> None:
        for head, body in wire.parts(address + message.head, message.body):
            self._sockets.publish(head, body)


class Assembly:
    """Joins the parts of a message, which arrive in order; a new connection begins an incomplete message again."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._memory: MessageMemory | None = None
        self._seq = 0
        self._filled = 0

    def add(self, part: wire.Data) -> wire.Data | None:
        """Add the next part; return the message when complete. Raise `WireError` above the limit."""
        if part.offset == 0:
            self.clear()
            if part.total > self._max_bytes:
                raise wire.WireError(f"a message of {part.total} bytes, more than {self._max_bytes}")
            self._memory = MessageMemory(part.total)
            self._seq = part.seq
        memory = self._memory
        if memory is None or (part.seq, part.offset, part.total) != (self._seq, self._filled, len(memory)):
            self.clear()  # an earlier connection carried the first parts
            return None
        self._filled += len(part.body)
        memory[part.offset : self._filled] = part.body
        if self._filled < part.total:
            return None
        self.clear()
        return msgspec.structs.replace(part, body=memoryview(memory), offset=0)

    def clear(self) -> None:
        """Drop an incomplete message."""
        self._memory = None
        self._filled = 0
