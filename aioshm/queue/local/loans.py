"""Memory that a writer loans: a window over a chunk or a segment, or private memory if small."""

from __future__ import annotations

from collections.abc import Sequence
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
"""Smaller loans lie in private memory: a copy takes less time than a window."""

MAIN_BYTES = 1024
"""Room for the main part of a message, whose size is known when the block ends; a larger main part is copied."""


class Placed(NamedTuple):
    """The part of a message that is written behind the buffers, which were filled in place."""

    table: int
    tail: bytes  # the table, then the main part unless it was filled in place
    main_bytes: int  # length of the main part
    n_buffers: int
    copied: int  # bytes that were not filled in place

    @property
    def end(self) -> int:
        """Where the body ends."""
        return self.table + len(self.tail)


class ArraySpec:
    """The shape, dtype and kind of a loaned array, checked."""

    def __init__(self, shape: int | Sequence[int], dtype: Any, like: Like) -> None:
        if like not in ("numpy", "torch"):
            raise ValueError(f"like must be 'numpy' or 'torch', not {shown(like)}")
        self.torch: bool = like == "torch"
        try:
            if isinstance(shape, int):
                shape = (shape,)
            lengths: Sequence[Any] = tuple(shape)
            if any(isinstance(length, bool) for length in lengths):
                raise TypeError
            self.shape: tuple[int, ...] = tuple(map(index, lengths))
        except TypeError:
            raise TypeError(f"shape must be an int or a sequence of ints, not {shown(shape)}") from None
        if any(length < 0 for length in self.shape):
            raise ValueError(f"shape must have no length below 0, not {shown(shape)}")
        try:
            make_dtype = _numpy_dtype
            if self.torch:
                make_dtype = _torch_dtype
            self.dtype: Any = make_dtype(dtype)
        except ImportError as error:
            raise ImportError(f"like={like!r} needs {like}: pip install 'aioshm[torch]' ({error})") from error
        self.nbytes: int = prod(self.shape) * int(self.dtype.itemsize)

    def over(self, memory: Any, offset: int) -> Any:
        """Return the array over memory."""
        if not self.torch:
            import numpy as np

            return np.ndarray(self.shape, self.dtype, memory, offset)
        import torch

        flat = torch.frombuffer(memory, dtype=torch.uint8, count=self.nbytes, offset=offset)
        # No view of ``flat``: the view would keep ``flat``, and with it the memory, alive.
        strides = [prod(self.shape[axis + 1 :]) for axis in range(len(self.shape))]
        return torch.empty(0, dtype=self.dtype).set_(flat.untyped_storage(), 0, self.shape, strides)

    def own(self) -> Any:
        """Return the array in private memory."""
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
        raise TypeError(f"dtype must be a NumPy dtype, not {shown(dtype)}: {error}") from None
    if found.hasobject:
        raise TypeError(f"dtype must be of plain numbers: Python objects cannot lie in shared memory ({shown(dtype)})")
    if not found.itemsize:
        raise TypeError(f"dtype must have a fixed item size, not {shown(dtype)}")
    return found


def _torch_dtype(dtype: Any) -> Any:
    import torch

    found = dtype
    if isinstance(dtype, str):
        found = getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype or its name, not {shown(dtype)}")
    return found


class Extent:
    """Memory for one message."""

    def __init__(self, window: LoanWindow | None = None, number: int = 0, *, is_segment: bool = False) -> None:
        self.window = window
        self.number = number
        self.is_segment = is_segment
        self.end: int = ALIGNMENT  # end of the loaned part

    def lend(self, spec: ArraySpec) -> Any:
        """Return an array to fill: in the window if there is room, else in private memory."""
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
        """Return the offset in the window's memory of a free range; -1: no room."""
        window = self.window
        if window is None or not nbytes or self.end + nbytes > window.room:
            return -1
        offset = self.end
        self.end = round_up(offset + nbytes, ALIGNMENT)
        return window.begin + offset

    def place(self, message: Encoded) -> Placed | None:
        """Complete an encoded message in the window: copy the parts that lie elsewhere; None: send a copy instead."""
        window = self.window
        if window is None:
            return None
        parts, buffers = parts_of(message)
        main_bytes = sum(map(len, parts))
        main = -1  # offset of the main part; -1: not filled in place
        if main_bytes >= IN_PLACE_BYTES and len(parts) == 1 and isinstance(parts[0], memoryview):
            main = window.offset_of(parts[0])
        places = []
        foreign = []
        end = self.end
        for buffer in buffers:
            offset = window.offset_of(buffer)
            if offset < 0:
                offset = round_up(end, ALIGNMENT)
                end = offset + len(buffer)
                foreign.append((offset, buffer))
            places += [offset, len(buffer)]
        table = round_up(end, ALIGNMENT)
        copied = sum(len(buffer) for _, buffer in foreign)
        tail_bytes = placed_bytes(len(buffers), 0)
        if main < 0:
            copied += main_bytes
            tail_bytes += main_bytes
        # A message of which little was filled in place needs less memory when it is sent as a copy.
        if table + tail_bytes > window.room or table + tail_bytes - copied < IN_PLACE_BYTES:
            return None
        for offset, buffer in foreign:
            window.write(offset, buffer)
        if main >= 0:
            return Placed(table, pack_table(main, places), main_bytes, 0, copied)
        tail = b"".join((pack_table(table + placed_bytes(len(buffers), 0), places), *parts))
        return Placed(table, tail, main_bytes, len(buffers), copied)

    def copied_out(self, message: Encoded) -> Encoded:
        """Return an encoded message with private copies of the parts in the window."""
        window = self.window
        if window is None or isinstance(message, bytes):
            return message
        parts = list(message[0])
        for number, part in enumerate(parts):
            if isinstance(part, memoryview) and window.offset_of(part) >= 0:
                parts[number] = bytes(part)
        buffers = list(message[1])
        for number, buffer in enumerate(buffers):
            if window.offset_of(buffer) >= 0:
                buffers[number] = memoryview(own_copy(buffer))
        return parts, buffers


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
        """Return memory in the claimed slot's chunk or a segment; an empty extent is copied."""
        if nbytes <= self._chunk_bytes:
            chunk = slot.chunk
            if chunk is None:
                return Extent()
            try:
                return Extent(self._of_chunks.get(chunk) or self._open_chunk(chunk), chunk)
            except SharedMemoryError:
                return Extent()
        if self._segments is None:
            return Extent()
        number = self._segments.reserve(nbytes)
        try:
            return Extent(self._segment_window(number), number, is_segment=True)
        except SharedMemoryError:
            return Extent()

    def take_back(self, extent: Extent) -> None:
        """Revoke the lender's access to an extent; exchange memory that is still in use. Idempotent."""
        window = extent.window
        extent.window = None
        if window is None:
            return
        windows = self._of_chunks
        if extent.is_segment:
            windows = self._of_segments
        usable = False
        try:
            usable = window.take_back()
        finally:
            if not usable:
                windows.pop(extent.number, None)

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
