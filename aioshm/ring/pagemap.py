"""Which pages of private mappings this process has written to: Linux's ``/proc/self/pagemap``.

See Documentation/admin-guide/mm/pagemap.rst. Since Linux 6.7 it answers the question itself (``PAGEMAP_SCAN``), in
microseconds whatever the range's size is; before, all entries have to be read, 8 bytes for a page of 4 KiB.
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
    """The pages of this process; its descriptor is opened when it is first needed.

    Attributes:
        fd: That descriptor; -1: it was not opened yet, or closed, or this kernel only gives all entries.
    """

    def __init__(self) -> None:
        self.fd: int = -1
        self._fd = -1
        self._found = (ctypes.c_uint64 * 3)()  # one struct page_region

    def written(self, address: int, nbytes: int) -> bool:
        """Return whether pages of a private mapping of a file were written to, or may have been.

        Args:
            address: Where the mapping begins.
            nbytes: How much of it to look at.
        """
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
