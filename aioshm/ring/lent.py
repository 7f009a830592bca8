"""Lent windows: second, writable mappings of a loan's memory, taken back when the block ends.

References to the mapping tell whether the lender kept anything. If so, the pages move to another
range of addresses, the window from then on, and the old range becomes private zeros; no byte is
copied. Where the kernel cannot move pages the next loan makes a new mapping. See
docs/explanation/platform-notes.md, "Read-only mappings".
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from sys import getrefcount
from typing import Final

from aioshm.errors import SharedMemoryError
from aioshm.ring.layout import round_up
from aioshm.ring.mapping import MAP_NORESERVE, address_of, can_move_pages, map_memory, move_pages

_PAGE: Final = mmap.PAGESIZE
_READ_WRITE: Final = mmap.PROT_READ | mmap.PROT_WRITE
_TABLE: Final = _PAGE // 8 * _PAGE  # what a table of pages maps, which moves in one step
_ZEROS: Final = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE


_abandoned: list[_Range] = []
"""A range that may have a hole, in which other threads may have mapped memory: it must never be unmapped."""


class _Range:
    """A range of addresses, unmapped when nothing refers to its memory any more."""

    __slots__ = ("address", "begin", "memory")

    def __init__(self, length: int) -> None:
        spare = _TABLE if length >= _TABLE else 0
        # Over a descriptor, the object would keep a duplicate of that.
        # All arrays over the range hold a reference to it.
        self.memory: mmap.mmap = mmap.mmap(-1, length + spare, _ZEROS, _READ_WRITE)
        # Aligned so that pages move by whole tables of pages.
        address = address_of(self.memory)
        # The same in `memory`.
        self.begin: int = -address % _TABLE if spare else 0
        self.address: int = address + self.begin


class LentWindow:
    """A writable mapping of one range of a file, which keeps no descriptor."""

    def __init__(self, fd: int, start: int, room: int) -> None:
        page = start // _PAGE * _PAGE
        self._length = round_up(start + room, _PAGE) - page
        self._in_page = start - page
        self.room: int = room
        self._left: _Range | None = None  # where the window was before; its arrays may be gone by now
        try:
            self._use(_Range(self._length))
            map_memory(self._range.address, self._length, _READ_WRITE, mmap.MAP_SHARED, fd, page)
        except OSError as error:
            raise SharedMemoryError(error.errno, f"no window of {self._length} bytes: {error.strerror}") from None

    def offset_of(self, part: memoryview) -> int:
        """Return where a view of memory begins in the range, -1 if it is not all in it."""
        offset = address_of(part) - self._range.address - self._in_page
        return offset if 0 <= offset <= self.room - len(part) else -1

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Write bytes into the range."""
        offset += self.begin
        self.memory[offset : offset + len(data)] = data

    def take_back(self) -> bool:
        """Revoke all outside access to the range; return whether the window is reusable."""
        if not self._held():
            return True
        kept = self._range
        moved = self._move()
        _make_zeros(kept.address, self._length)
        return moved

    def close(self) -> None:
        """Leave zeros behind if the lender keeps anything."""
        if self._held():
            with suppress(SharedMemoryError):  # nobody is left to be told
                _make_zeros(self._range.address, self._length)

    def _held(self) -> bool:
        return getrefcount(self.memory) > _UNHELD

    def _move(self) -> bool:
        """Move to another range of addresses; return False where that is impossible."""
        if not can_move_pages():
            return False
        target = self._left
        try:
            if target is None or getrefcount(target.memory) >= _UNHELD:
                target = _Range(self._length)
        except OSError:  # the process has too many mappings
            return False
        try:
            move_pages(self._range.address, self._length, target.address)
        except OSError:
            _abandoned.append(target)
            return False
        self._left = self._range
        self._use(target)
        return True

    def _use(self, target: _Range) -> None:
        self._range = target
        self.memory: mmap.mmap = target.memory
        self.begin: int = target.begin + self._in_page


def _make_zeros(address: int, length: int) -> None:
    """Exchange a mapping for private memory that reads as zeros."""
    try:
        try:
            map_memory(address, length, _READ_WRITE, _ZEROS)
        except OSError:  # RLIMIT_DATA counts memory that is private and writable
            map_memory(address, length, _READ_WRITE, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    except OSError as error:
        text = f"an array that is still in use could not be taken back: {error.strerror}; drop it in the block"
        raise SharedMemoryError(error.errno, text) from None


def _count_unheld() -> int:
    """Return `getrefcount` of the memory of an unheld window, called as above."""
    window = LentWindow.__new__(LentWindow)
    window._in_page = 0
    window._use(_Range(1))
    return getrefcount(window.memory)


_UNHELD: Final = _count_unheld()
"""One reference is the range's, and one the window's, which a range that was left does not have."""
