"""Mappings at chosen addresses, and their written pages (mmap(2), mremap(2), pagemap.rst)."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from typing import Final

MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0)

_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_MAP_FIXED = 0x10  # the same on Linux and macOS
_MAP_FAILED = ctypes.c_void_p(-1).value
_MREMAP_MAYMOVE = 1
_MREMAP_FIXED = 2
_MREMAP_DONTUNMAP = 4

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,  # off_t
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
if sys.platform == "linux":
    _libc.mremap.restype = ctypes.c_void_p
    _libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]


def map_shared(fd: int, size: int) -> mmap.mmap:
    """Map the beginning of a file, writable, without the duplicate descriptor of ``mmap``."""
    # At first a range of addresses without memory, which the object will unmap. Shared, because private writable
    # memory counts for RLIMIT_DATA (getrlimit(2)).
    mapped = mmap.mmap(-1, size, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | MAP_NORESERVE, _READ_WRITE)
    map_memory(address_of(mapped), size, _READ_WRITE, mmap.MAP_SHARED, fd)
    return mapped


def map_memory(address: int | None, length: int, prot: int, flags: int, fd: int = -1, offset: int = 0) -> int:
    """Map memory, over ``address`` if given; return its address. A failure changes nothing."""
    if address is not None:
        flags |= _MAP_FIXED
    mapped = _libc.mmap(address, length, prot, flags, fd, offset)
    if mapped == _MAP_FAILED:
        raise _last_error()
    return int(mapped)


def move_memory(address: int, length: int, target: int, *, keep: bool = False) -> None:
    """Move a mapping over ``target``; ``keep``: and keep the old range. A failure may unmap ``target``."""
    flags = _MREMAP_MAYMOVE | _MREMAP_FIXED
    if keep:
        flags |= _MREMAP_DONTUNMAP
    if _libc.mremap(address, length, length, flags, target) == _MAP_FAILED:
        raise _last_error()


def unmap_memory(address: int, length: int) -> None:
    """Unmap memory that belongs to no ``mmap`` object."""
    _libc.munmap(address, length)


def _last_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


_PY_BUFFER = ctypes.c_void_p * 11  # not smaller than ``Py_buffer``, which begins with the address


def address_of(memory: mmap.mmap | memoryview) -> int:
    """Return the address of a mapping, or of a view's memory."""
    buffer = _PY_BUFFER()  # from_buffer() of ctypes accepts writable memory only
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(memory), buffer, 0)
    address = buffer[0]
    ctypes.pythonapi.PyBuffer_Release(buffer)
    return address or 0


_PAGE: Final = mmap.PAGESIZE

_ENTRY: Final = 8  # bytes for a page
_PRESENT_OR_SWAPPED: Final = 0xC0  # bits 63 and 62, in the last byte of an entry
_OF_FILE: Final = 0x20  # bit 61
_NOT_OWN: Final = bytes(byte for byte in range(256) if not byte & _PRESENT_OR_SWAPPED or byte & _OF_FILE)
"""Last bytes of the entries of pages that are not a private copy."""


class Pagemap:
    """The pages of this process; its descriptor is opened when first needed."""

    def __init__(self) -> None:
        self._fd = -1

    def written(self, address: int, nbytes: int) -> bool:
        """Return whether pages of a private file mapping were written to, or may have been."""
        pages = (nbytes + _PAGE - 1) // _PAGE
        try:
            if self._fd < 0:
                self._fd = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
            entries = os.pread(self._fd, pages * _ENTRY, address // _PAGE * _ENTRY)
        except OSError:
            return True
        return len(entries) < pages * _ENTRY or bool(entries[_ENTRY - 1 :: _ENTRY].translate(None, _NOT_OWN))

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1
