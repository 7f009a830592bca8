"""The written pages of private mappings: Linux's ``/proc/self/pagemap``.

See Documentation/admin-guide/mm/pagemap.rst. Linux 6.7 finds such pages in microseconds
(``PAGEMAP_SCAN``); before, this reads 8 bytes for each page.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import struct
from typing import Final

_PAGE: Final = mmap.PAGESIZE

_ENTRY: Final = 8  # bytes for a page
_PRESENT_OR_SWAPPED: Final = 0xC0  # bits 63 and 62, in the last byte of an entry
_OF_FILE: Final = 0x20  # bit 61
_NOT_OWN: Final = bytes(byte for byte in range(256) if not byte & _PRESENT_OR_SWAPPED or byte & _OF_FILE)
"""Last bytes of the entries of pages that are not a private copy."""

_SCAN: Final = 0xC0606610  # _IOWR('f', 16, struct pm_scan_arg)
_SCAN_ARGUMENT: Final = struct.Struct("<12Q")
_IS_FILE: Final = 1 << 2
_IS_PRESENT_OR_SWAPPED: Final = 1 << 3 | 1 << 4


class Pagemap:
    """The pages of this process; its descriptor is opened when first needed."""

    def __init__(self) -> None:
        # -1: not open, or this kernel has no ``PAGEMAP_SCAN``.
        self.fd: int = -1
        self._fd = -1
        self._found = (ctypes.c_uint64 * 3)()  # one struct page_region

    def written(self, address: int, nbytes: int) -> bool:
        """Return whether pages of a private file mapping were written to, or may have been."""
        pages = (nbytes + _PAGE - 1) // _PAGE
        try:
            if self._fd < 0:
                self._fd = self.fd = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
            if self.fd >= 0:
                try:
                    return self._scan(address, address + pages * _PAGE)
                except OSError:  # an older kernel
                    self.fd = -1
            entries = os.pread(self._fd, pages * _ENTRY, address // _PAGE * _ENTRY)
        except OSError:
            return True
        return len(entries) < pages * _ENTRY or bool(entries[_ENTRY - 1 :: _ENTRY].translate(None, _NOT_OWN))

    def _scan(self, start: int, end: int) -> bool:
        """Return whether there is a page that is not the file's."""
        # size, flags, start, end, walk_end, vec, vec_len, max_pages, and the categories: inverted, all of, any of, told
        to_do = 0, start, end, 0, ctypes.addressof(self._found), 1, 1
        argument = bytearray(
            _SCAN_ARGUMENT.pack(_SCAN_ARGUMENT.size, *to_do, _IS_FILE, _IS_FILE, _IS_PRESENT_OR_SWAPPED, 0)
        )
        return bool(fcntl.ioctl(self._fd, _SCAN, argument))

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = self.fd = -1
