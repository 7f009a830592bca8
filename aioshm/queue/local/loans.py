"""Memory that a writer loans: of a chunk, of an overflow segment, or, where a copy costs less, of its own.

Loans are seen through windows (``ring/window.py``), one for each chunk and each segment, which are kept: a message
of the same size finds a segment that the readers know, and pages that were touched before.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from math import prod
from operator import index
from typing import Any, Literal, NamedTuple, TypeAlias

from aioshm.arguments import shown
from aioshm.codec import Encoded
from aioshm.codec.base import own_copy
from aioshm.codec.frames import ALIGNMENT, pack_table, parts_of, placed_bytes
from aioshm.errors import SharedMemoryError
from aioshm.queue.local.overflow import OverflowSegments
from aioshm.ring import ShmRingBuffer
from aioshm.ring.layout import CHUNK_HEADER_BYTES, chunk_at, round_up
from aioshm.ring.slot import Slot
from aioshm.ring.window import LoanWindow

Like: TypeAlias = Literal["numpy", "torch"]

IN_PLACE_BYTES = 64 * 1024
"""Smaller loans lie in the process's own memory: a copy takes less time than a view at either end."""

MAIN_BYTES = 1024
"""Room for the main part of a message, which is known only when the block has ended; one that needs more is copied."""


class Placed(NamedTuple):
    """What of a message is to be written behind its buffers, which are in their places."""

    table: int
    tail: bytes  # the table, and the main part unless that is in its place, too
    main_bytes: int  # length of the main part
    n_buffers: int
    copied: int  # how many bytes were not in their places

    @property
    def end(self) -> int:
        """Where the body ends."""
        return self.table + len(self.tail)


class ArraySpec:
    """What array is asked for.

    Raises:
        TypeError, ValueError: An argument is not what it has to be; the text names it.
        ImportError: NumPy or torch is not installed.
    """

    def __init__(self, shape: int | Sequence[int], dtype: Any, like: Like) -> None:
        if like not in ("numpy", "torch"):
            raise ValueError(f"like must be 'numpy' or 'torch', not {shown(like)}")
        self.torch: bool = like == "torch"  # whether it is a tensor
        try:
            lengths: Sequence[Any] = (shape,) if isinstance(shape, int) else tuple(shape)
            if any(isinstance(length, bool) for length in lengths):
                raise TypeError
            self.shape: tuple[int, ...] = tuple(map(index, lengths))
        except TypeError:
            raise TypeError(f"shape must be an int or a sequence of ints, not {shown(shape)}") from None
        if any(length < 0 for length in self.shape):
            raise ValueError(f"shape must have no length below 0, not {shown(shape)}")
        try:
            self.dtype: Any = _torch_dtype(dtype) if self.torch else _numpy_dtype(dtype)
        except ImportError as error:
            raise ImportError(f"like={like!r} needs {like}: pip install 'aioshm[torch]' ({error})") from error
        self.nbytes: int = prod(self.shape) * int(self.dtype.itemsize)

    def over(self, memory: Any, offset: int) -> Any:
        """Return it over memory."""
        if not self.torch:
            import numpy as np

            return np.ndarray(self.shape, self.dtype, memory, offset)
        import torch

        flat = torch.frombuffer(memory, dtype=torch.uint8, count=self.nbytes, offset=offset)
        # Not a view of that one, which would keep it, and with it the memory, for as long as it lives.
        strides = [prod(self.shape[axis + 1 :]) for axis in range(len(self.shape))]
        return torch.empty(0, dtype=self.dtype).set_(flat.untyped_storage(), 0, self.shape, strides)

    def own(self) -> Any:
        """Return it in memory of its own."""
        if self.torch:
            import torch

            return torch.empty(self.shape, dtype=self.dtype)
        import numpy as np

        return np.empty(self.shape, self.dtype)


def _numpy_dtype(dtype: Any) -> Any:
    import numpy as np

    try:
        found = np.dtype(dtype)
    except TypeError as error:
        raise TypeError(f"dtype must be one of NumPy's, not {shown(dtype)}: {error}") from None
    if found.hasobject:
        raise TypeError(f"dtype must be of plain numbers: Python objects cannot lie in shared memory ({shown(dtype)})")
    if not found.itemsize:
        raise TypeError(f"dtype must say how long an element is, not {shown(dtype)}")
    return found


def _torch_dtype(dtype: Any) -> Any:
    import torch

    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype):
        raise TypeError(f"dtype must be one of torch's, or its name, not {shown(dtype)}")
    return found


class Extent:
    """Memory for one message."""

    def __init__(self, window: LoanWindow | None = None, number: int = 0, *, is_segment: bool = False) -> None:
        self.window = window
        self.number = number
        self.is_segment = is_segment
        self.end: int = ALIGNMENT  # of the loaned memory

    def lend(self, spec: ArraySpec) -> Any:
        """Return an array to fill; in its place, if there is room, and if that pays."""
        offset = self._take(spec.nbytes)
        if offset < 0:
            return spec.own()
        assert self.window is not None
        return spec.over(self.window.memory, offset)

    def lend_bytes(self, nbytes: int) -> Any:
        """Return bytes to fill, as `lend` does an array."""
        offset = self._take(nbytes)
        if offset < 0:
            return memoryview(bytearray(nbytes))
        assert self.window is not None
        return memoryview(self.window.memory)[offset : offset + nbytes]

    def _take(self, nbytes: int) -> int:
        """Return where in the window's memory there is room; -1: nowhere."""
        window = self.window
        if window is None or not nbytes or self.end + nbytes > window.room:
            return -1
        offset, self.end = self.end, round_up(self.end + nbytes, ALIGNMENT)
        return window.begin + offset

    def place(self, message: Encoded) -> Placed | None:
        """Find the parts of an encoded message in the window, and copy those that are not; None: it is to be copied."""
        window = self.window
        if window is None:
            return None
        parts, buffers = parts_of(message)
        main_bytes, main = sum(map(len, parts)), -1
        if main_bytes >= IN_PLACE_BYTES and len(parts) == 1 and isinstance(parts[0], memoryview):
            main = window.offset_of(parts[0])
        places, foreign, end = [], [], self.end
        for buffer in buffers:
            offset = window.offset_of(buffer)
            if offset < 0:
                offset = round_up(end, ALIGNMENT)
                end = offset + len(buffer)
                foreign.append((offset, buffer))
            places += [offset, len(buffer)]
        table, copied = round_up(end, ALIGNMENT), sum(len(buffer) for _, buffer in foreign)
        if main < 0:
            copied += main_bytes
        # Where little of it is in its place, the usual way of sending it has the smaller memory.
        tail_bytes = placed_bytes(len(buffers), main_bytes if main < 0 else 0)
        if table + tail_bytes > window.room or table + tail_bytes - copied < IN_PLACE_BYTES:
            return None
        for offset, buffer in foreign:
            window.write(offset, buffer)
        if main >= 0:
            return Placed(table, pack_table(main, places), main_bytes, 0, copied)
        tail = b"".join((pack_table(table + placed_bytes(len(buffers), 0), places), *parts))
        return Placed(table, tail, main_bytes, len(buffers), copied)

    def copied_out(self, message: Encoded) -> Encoded:
        """Return an encoded message without what lies in the window: it may be put where it lies now."""
        window = self.window
        if window is None or isinstance(message, bytes):
            return message
        kept = window.offset_of
        return (
            [bytes(part) if isinstance(part, memoryview) and kept(part) >= 0 else part for part in message[0]],
            [memoryview(own_copy(part)) if kept(part) >= 0 else part for part in message[1]],
        )


class Loans:
    """The windows through which a writer lends memory."""

    def __init__(self, buffer: ShmRingBuffer, segments: OverflowSegments | None) -> None:
        self._buffer = buffer
        self._pools = buffer.layout.pools
        self._chunk_bytes = buffer.layout.max_chunk_bytes
        self._segments = segments
        self._of_chunks: dict[int, LoanWindow] = {}
        self._of_segments: dict[int, LoanWindow] = {}

    def extent(self, slot: Slot, nbytes: int) -> Extent:
        """Return memory for a message of ``nbytes`` in the claimed slot's chunk or a segment, until it is published.

        Without a mapping, the extent has no memory, and the message will be copied.

        Raises:
            SharedMemoryError, OutOfDescriptors: The message needs an overflow segment, and there is none.
        """
        if nbytes <= self._chunk_bytes:
            chunk = slot.chunk
            if chunk is not None:
                with suppress(SharedMemoryError):
                    return Extent(self._of_chunks.get(chunk) or self._open_chunk(chunk), chunk)
        elif self._segments is not None:
            number = self._segments.reserve(nbytes)
            with suppress(SharedMemoryError):
                return Extent(self._segment_window(number), number, is_segment=True)
        return Extent()

    def take_back(self, extent: Extent) -> None:
        """Revoke all access to the loaned memory of an extent. Idempotent.

        Raises:
            SharedMemoryError: The lender keeps something, and its memory could not be exchanged.
        """
        window, extent.window = extent.window, None
        if window is None:
            return
        usable = False
        try:
            usable = window.take_back()
        finally:
            if not usable:
                (self._of_segments if extent.is_segment else self._of_chunks).pop(extent.number, None)

    def _open_chunk(self, chunk: int) -> LoanWindow:
        place = chunk_at(self._pools, chunk)
        assert place is not None
        window = self._of_chunks[chunk] = LoanWindow(self._buffer.fd, place[0] + CHUNK_HEADER_BYTES, place[1])
        return window

    def _segment_window(self, number: int) -> LoanWindow:
        assert self._segments is not None
        segments = self._segments.segments
        segment = segments[number].segment
        window = self._of_segments.get(number)
        if window is None or window.room < segment.size:
            if window is not None:
                window.close()
            window = self._of_segments[number] = LoanWindow(segment.fd, 0, segment.size)
        return window

    def close(self) -> None:
        """Revoke all access to loaned memory. Idempotent."""
        for windows in (self._of_chunks, self._of_segments):
            for window in windows.values():
                window.close()
            windows.clear()
