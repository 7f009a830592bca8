"""Windows: mappings through which leases and loans see a message's memory.

The writer overwrites a chunk after its slot is released. If a view is still held when its lease
ends, private memory with the same bytes replaces the mapping at the same addresses. References of
the ``mmap`` object show whether a view is held, so the end of a lease *drops* its own view. A
loan's mapping is writable: if the lender kept an array, the pages move to another range of
addresses, and private zeros replace the old range.

See docs/explanation/platform-notes.md, "Views that keep memory mapped" and "Read-only mappings".
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import warnings
import weakref
from contextlib import suppress
from resource import RUSAGE_SELF, getrusage
from sys import getrefcount
from typing import Final, TypeVar

from aioshm.errors import HandleError, SharedMemoryError
from aioshm.ring.layout import CHUNK_HEADER_BYTES, Layout, chunk_at, round_up
from aioshm.ring.mapping import (
    MAP_NORESERVE,
    Pagemap,
    address_of,
    map_memory,
    move_memory,
    unmap_memory,
)

Mapping = TypeVar("Mapping", bound=mmap.mmap)

_PAGE: Final = mmap.PAGESIZE


class Mapped:
    """A mapping to which only this object refers, unless views of it are held."""

    def __init__(self, memory: mmap.mmap) -> None:
        self.memory = memory
        self.address: int = address_of(memory)

    def is_held(self) -> bool:
        """Return whether a view of the mapping is held."""
        return self._references() > _UNHELD

    def _references(self) -> int:
        return getrefcount(self.memory)


_UNHELD: Final = Mapped(mmap.mmap(-1, 1))._references()


class Window(Mapped):
    """The mapping of one chunk. All views of a leased message refer to it."""

    def __init__(self, memory: mmap.mmap, begin: int, room: int) -> None:
        super().__init__(memory)
        self.begin = begin  # of the message, in the mapping
        self.room = room  # for the message
        self.faults = -1  # of this process, at a time when the program had not written to the window


class Windows:
    """The windows of one reader, for one thread at a time; keeps a descriptor of its own."""

    def __init__(self, fd: int, layout: Layout) -> None:
        self._fd = -1
        self.windows: dict[int, Window] = {}  # by chunk
        self._faults = -1  # of this process, when a window was last checked: asking again would take longer
        self.pagemap: Pagemap = Pagemap()
        self._pools = layout.pools
        try:
            size = os.fstat(fd).st_size
            if size < layout.total_bytes:  # looked at beyond its end, it would be a SIGBUS
                raise HandleError(f"the segment has {size} bytes, its layout needs {layout.total_bytes}")
            self._fd = os.dup(fd)
        except OSError as error:
            raise SharedMemoryError(error.errno, f"no windows into descriptor {fd}: {error.strerror}") from None
        _open_windows.add(self)

    def view(self, chunk: int, nbytes: int) -> memoryview:
        """Return a read-only view of the beginning of a chunk, through the chunk's window."""
        window = self.windows.get(chunk) or self._open(chunk)
        if not 0 <= nbytes <= window.room:
            raise ValueError(f"a view must have 0 to {window.room} bytes, not {nbytes}")
        window.faults = self._faults
        # From the mapping anew each time: a view that was kept would be one reference for all leases together.
        return memoryview(window.memory)[window.begin : window.begin + nbytes].toreadonly()

    def held(self, chunk: int) -> bool:
        """Return whether a view of a chunk is held."""
        window = self.windows.get(chunk)
        return window is not None and window.is_held()

    def settle(self, chunk: int, nbytes: int) -> bool:
        """Make the window of a held view private, before the slot is released; return whether held.

        The caller drops its own views first. After an error the views still show the message:
        settle again later.
        """
        window = self.windows.get(chunk)
        if window is None:
            return False
        held = window.is_held()
        if held:
            if not 0 <= nbytes <= window.room:
                raise ValueError(f"a view has 0 to {window.room} bytes, not {nbytes}")
            make_private(window, window.begin, nbytes)
        if held or self._written(window, nbytes):
            self.windows.pop(chunk, None)  # the holders of views unmap it; a thread that forks may have been here
        return held

    def copy_held(self) -> None:
        """Copy every chunk with views; without memory for that, forked children may see the views change."""
        for chunk in filter(self.held, list(self.windows)):
            with suppress(SharedMemoryError):
                self.settle(chunk, self.windows[chunk].room)

    def close(self) -> None:
        """Unmap windows without views, copy chunks with views. Idempotent, also after errors."""
        for chunk in list(self.windows):
            self.settle(chunk, self.windows[chunk].room)
        self.windows.clear()
        self.pagemap.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            try:
                warnings.warn(f"windows into descriptor {self._fd} were not closed", ResourceWarning, 2, self)
            finally:  # the warning may be an error
                self.close()

    def _open(self, chunk: int) -> Window:
        place = chunk_at(self._pools, chunk)
        if place is None:
            raise ValueError(f"there is no chunk {chunk}")
        if self._fd < 0:
            raise SharedMemoryError("the windows were closed")
        start = place[0] + CHUNK_HEADER_BYTES
        room = place[1]
        page = start // _PAGE * _PAGE
        length = round_up(start + room, _PAGE) - page
        try:
            window = Window(map_private(mmap.mmap, self._fd, length, page), start - page, room)
        except OSError as error:
            raise SharedMemoryError(error.errno, f"no window of {length} bytes: {error.strerror}") from None
        self.windows[chunk] = window
        return window

    def _written(self, window: Window, nbytes: int) -> bool:
        """Return whether a window was written to since it was last viewed, or may have been."""
        if not COPY_ON_WRITE:
            return False
        usage = getrusage(RUSAGE_SELF)
        self._faults = usage.ru_minflt + usage.ru_majflt
        if window.faults == self._faults:  # every first write to a page is a fault
            return False
        return self.pagemap.written(window.address, window.begin + nbytes)


_open_windows: weakref.WeakSet[Windows] = weakref.WeakSet()


def _before_fork() -> None:
    """Copy held chunks: views of a child would show what the writer writes once this process ends the leases."""
    for windows in list(_open_windows):
        windows.copy_held()


os.register_at_fork(before=_before_fork)


def map_private(kind: type[Mapping], fd: int, length: int, start: int = 0) -> Mapping:
    """Map a part of a file copy-on-write where the system can, in an object of this class."""
    # Anonymous at first: over a descriptor, the object would keep a duplicate of that.
    mapped = kind(-1, length, _PRIVATE, _PROTECTION)
    map_memory(address_of(mapped), length, _PROTECTION, _SHARING, fd, start)
    return mapped


def make_private(mapped: Mapped, start: int, nbytes: int) -> None:
    """Replace a mapping by private memory with the same ``nbytes`` from ``start`` on, and zeros elsewhere."""
    try:
        _exchange(mapped.address, len(mapped.memory), start, nbytes)
    except OSError as error:
        raise SharedMemoryError(
            error.errno,
            f"no copy of {nbytes} bytes that are still in use could be made: {error.strerror}; drop what was leased",
        ) from None


# Not reserved: of a large chunk, only what the message fills will ever be touched.
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE

COPY_ON_WRITE: Final = sys.platform == "linux"
"""Whether a private mapping shows later writes to the file, but for pages that were written through the mapping. POSIX
leaves that open."""

_PROTECTION: Final = _READ_WRITE if COPY_ON_WRITE else mmap.PROT_READ
_SHARING: Final = mmap.MAP_PRIVATE | MAP_NORESERVE if COPY_ON_WRITE else mmap.MAP_SHARED


def _move_over(address: int, length: int, start: int, nbytes: int) -> None:
    """Fill private memory elsewhere, then mremap(2) it to the window: a concurrent read sees either, or waits."""
    copy = map_memory(None, length, _READ_WRITE, _PRIVATE)
    ctypes.memmove(copy + start, address + start, nbytes)
    try:
        move_memory(copy, length, address)
    except OSError:
        unmap_memory(copy, length)
        raise


def _map_over(address: int, length: int, start: int, nbytes: int) -> None:
    """Map private memory onto the window, then fill it: a concurrent read may see zeros."""
    copy = ctypes.string_at(address + start, nbytes)
    map_memory(address, length, _READ_WRITE, _PRIVATE)
    ctypes.memmove(address + start, copy, nbytes)


_exchange = _move_over if sys.platform == "linux" else _map_over


# Loans

_TABLE: Final = _PAGE // 8 * _PAGE  # what a table of pages maps, which moves in one step

_moves_pages = sys.platform == "linux"
"""Whether mremap(2) keeps the old range of pages that move: from Linux 5.13 on, until it fails."""

_abandoned: list[_Range] = []
"""The range of that failure: other threads may have mapped memory in a hole of it. Never unmapped."""


class _Range(Mapped):
    """A range of addresses, unmapped when nothing refers to its memory any more."""

    def __init__(self, length: int) -> None:
        spare = 0
        if length >= _TABLE:
            spare = _TABLE
        # Over a descriptor, the object would keep a duplicate of that.
        super().__init__(mmap.mmap(-1, length + spare, _PRIVATE, _READ_WRITE))
        # Aligned so that pages move by whole tables of pages.
        self.begin: int = -self.address % max(spare, 1)
        self.address += self.begin


class LoanWindow:
    """A writable mapping of one range of a file, which keeps no descriptor."""

    def __init__(self, fd: int, start: int, room: int) -> None:
        page = start // _PAGE * _PAGE
        self._length = round_up(start + room, _PAGE) - page
        self._in_page = start - page
        self.room: int = room
        self._left: _Range | None = None  # where the window was before; its arrays may be gone by now
        try:
            self._range = _Range(self._length)
            map_memory(self._range.address, self._length, _READ_WRITE, mmap.MAP_SHARED, fd, page)
        except OSError as error:
            raise SharedMemoryError(error.errno, f"no window of {self._length} bytes: {error.strerror}") from None

    @property
    def memory(self) -> mmap.mmap:
        """The memory that the range lies in; arrays over it hold a reference."""
        return self._range.memory

    @property
    def begin(self) -> int:
        """Where the range begins in its memory."""
        return self._range.begin + self._in_page

    def offset_of(self, part: memoryview) -> int:
        """Return where a view of memory begins in the range, -1 if it is not all in it."""
        offset = address_of(part) - self._range.address - self._in_page
        if not 0 <= offset <= self.room - len(part):
            return -1
        return offset

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Write bytes into the range."""
        offset += self.begin
        self.memory[offset : offset + len(data)] = data

    def take_back(self) -> bool:
        """Revoke all outside access to the range; return whether the window is reusable."""
        if not self._range.is_held():
            return True
        kept = self._range
        moved = self._move()
        _make_zeros(kept.address, self._length)
        return moved

    def close(self) -> None:
        """Leave zeros behind if the lender keeps anything."""
        if self._range.is_held():
            with suppress(SharedMemoryError):  # nobody is left to handle the error
                _make_zeros(self._range.address, self._length)

    def _move(self) -> bool:
        """Move to another range of addresses; return False where that is impossible."""
        global _moves_pages
        if not _moves_pages:
            return False
        target = self._left
        try:
            if target is None or target.is_held():
                target = _Range(self._length)
        except OSError:  # the process has too many mappings
            return False
        try:
            move_memory(self._range.address, self._length, target.address, keep=True)
        except OSError:
            _moves_pages = False
            _abandoned.append(target)
            return False
        self._left = self._range
        self._range = target
        return True


def _make_zeros(address: int, length: int) -> None:
    """Exchange a mapping for private memory that reads as zeros."""
    try:
        try:
            map_memory(address, length, _READ_WRITE, _PRIVATE)
        except OSError:  # RLIMIT_DATA counts memory that is private and writable
            map_memory(address, length, _READ_WRITE, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    except OSError as error:
        text = f"an array that is still in use could not be taken back: {error.strerror}; drop it in the block"
        raise SharedMemoryError(error.errno, text) from None
