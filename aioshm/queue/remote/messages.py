"""Messages of remote queues: packed by the writer; joined from parts and decoded by the reader."""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import monotonic_ns
from typing import Any, Self

import msgspec

from aioshm.codec import Codec, cannot_decode, loads_of, view_of
from aioshm.codec.base import OwnMemory, own_copy
from aioshm.codec.frames import HEADER, INLINE, RAW, split_body, write_body
from aioshm.errors import CODE_ERRORS, AioshmError, CodecError, SharedMemoryError
from aioshm.queue.remote import wire
from aioshm.queue.remote.window import Outgoing
from aioshm.queue.tracing import NO_TRACE, is_trace
from aioshm.ring.layout import TRAIL

COPY_BYTES = 16 * 1024
"""Longer messages are decoded in place."""


class MessageMemory(mmap.mmap, OwnMemory):
    """Anonymous memory of one message, with huge pages where the kernel has them; raises OSError without memory."""

    def __new__(cls, nbytes: int) -> Self:
        memory = super().__new__(cls, -1, nbytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without huge pages
                memory.madvise(mmap.MADV_HUGEPAGE)
        return memory


def memory_of(seq: int, nbytes: int) -> MessageMemory:
    """Return new memory for a message, or raise `SharedMemoryError` if there is not enough."""
    try:
        return MessageMemory(nbytes)
    except OSError as error:
        text = (
            f"message {seq} of {nbytes} bytes does not fit into memory: raise the limits of this process (ulimit -v) "
            "or of its container (memory)"
        )
        raise SharedMemoryError(error.errno, text) from None


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
    body = memoryview(memory_of(seq, size))
    write_body(body, parts, buffers)
    return Outgoing(header, body)


class Assembly:
    """Joins the parts of a message, which arrive in order; a new connection begins an incomplete message again.

    Raises:
        SharedMemoryError: There is no memory for the message.
    """

    def __init__(self) -> None:
        self._memory: MessageMemory | None = None
        self._seq = 0
        self._filled = 0

    def add(self, part: wire.Data) -> wire.Data | None:
        """Add the next part; return the message when complete."""
        if part.offset == 0:
            self.clear()
            if len(part.body) == part.total:
                return part
            self._memory = memory_of(part.seq, part.total)
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


class Decoder:
    """Decodes received messages, and remembers the trace contexts of the latest."""

    def __init__(self, codec: Codec, raw_message: Callable[[memoryview], bytearray], *, traced: bool) -> None:
        self._codec = codec
        self._raw_message = raw_message
        self._loads = loads_of(codec)
        self._view = view_of(codec)
        self._trail: deque[bytes] = deque(maxlen=TRAIL if traced else 0)
        self._noted = -1  # number of the message whose trace context was remembered last

    def decode(self, data: wire.Data) -> Any:
        """Return a message's object, or raise `CodecError`."""
        if data.kind == RAW:
            return self._raw_message(data.body)
        self._check_codec(data)
        try:
            if data.n_buffers or data.main_bytes > COPY_BYTES:
                return self._codec.decode(*split_body(data.body, data.n_buffers, data.main_bytes))
            return self._loads(bytes(data.body))
        except AioshmError:
            raise
        except CODE_ERRORS as error:
            raise cannot_decode(error, self._codec.name) from error

    def view(self, data: wire.Data) -> Any:
        """Return a message's object, decoded in place and read-only, or raise `CodecError`."""
        body = data.body
        if data.n_buffers:
            body = memoryview(own_copy(body))  # ZeroMQ's memory may be unaligned
        body = body.toreadonly()
        if data.kind == RAW:
            return body
        self._check_codec(data)
        try:
            return self._view(*split_body(body, data.n_buffers, data.main_bytes))
        except AioshmError:
            raise
        except Exception as error:
            raise cannot_decode(error, self._codec.name) from error

    def _check_codec(self, data: wire.Data) -> None:
        if data.kind != INLINE or data.codec != self._codec.code:
            raise CodecError(
                f"message {data.seq} has codec {data.codec}, the queue has {self._codec.code} ({self._codec.name!r})"
            )

    def note_trace(self, data: wire.Data) -> bool:
        """Remember a message's trace context, once; return whether it is garbled."""
        if self._noted == data.seq:
            return False
        self._noted = data.seq
        trace = data.trace or NO_TRACE
        garbled = trace != NO_TRACE and not is_trace(trace)
        self._trail.append(NO_TRACE if garbled else trace)
        return garbled

    def traces(self, most: int) -> list[bytes]:
        """Return the trace contexts of the latest messages, the latest last."""
        return list(self._trail)[-most:] if most else []
