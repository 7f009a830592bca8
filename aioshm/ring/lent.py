"""Lent windows: second, writable mappings of what a loan is filled in, replaced by a private copy where it is kept.

The twin of ``window.py`` for the writing end, which says how it is known that memory is held, and how it is exchanged.
What differs: a lent window shows the segment itself, so what is written to it is in the message at once. When its block
ends, whatever still reaches the window must not reach the message any more. Mapping the window anew for each loan would
cost a page fault for every page that is filled, several times the rest of sending a large message; so a window stays,
and what reaches it is taken away from it:

* an array that one local variable alone refers to, the caller's, becomes read-only; a tensor loses its memory, a
  memoryview is released;
* where anything else refers to the window, what it shows is exchanged for a private copy, and the next loan gets a new
  window.

That the one reference is a variable is looked up in the caller's frame: it might as well be that of a tensor over the
array, which does not care whether the array is read-only.
"""

from __future__ import annotations

import mmap
import weakref
from contextlib import suppress
from inspect import CO_OPTIMIZED
from sys import getrefcount
from types import FrameType
from typing import Any, Final

from aioshm.errors import SharedMemoryError
from aioshm.ring.layout import round_up
from aioshm.ring.mapping import MAP_NORESERVE, address_of, map_memory
from aioshm.ring.window import make_private

_PAGE: Final = mmap.PAGESIZE
CALLERS: Final = 4
"""In how many frames the caller's variable is looked for."""

_READ_WRITE: Final = mmap.PROT_READ | mmap.PROT_WRITE


class LentWindow:
    """A writable mapping of one range of a file.

    Args:
        fd: The file's descriptor, which is not needed any more afterwards.
        start: Where the range begins.
        room: Its length.

    Attributes:
        room: As above.
        memory: The mapping, which begins up to a page before the range; what is made over it holds a reference to it.
        begin: Where the range begins in it.
        address: Where the range is in this process.
        template: A shape, a dtype, and such an array over the range, which the core lends views of; or None.
        quiet: Arrays over it that were taken back, and are read-only by now.

    Raises:
        SharedMemoryError: The process has too many mappings.
    """

    __slots__ = ("address", "begin", "memory", "quiet", "room", "template")  # the core looks at them for each loan

    def __init__(self, fd: int, start: int, room: int) -> None:
        page = start // _PAGE * _PAGE
        length = round_up(start + room, _PAGE) - page
        try:
            # Anonymous at first: over a descriptor, the object would keep a duplicate of that.
            memory = mmap.mmap(-1, length, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE, _READ_WRITE)
            map_memory(address_of(memory), length, _READ_WRITE, mmap.MAP_SHARED, fd, page)
        except OSError as error:
            raise SharedMemoryError(error.errno, f"no window of {length} bytes: {error.strerror}") from None
        self.room: int = room
        self.begin: int = start - page
        self.memory: mmap.mmap = memory
        self.address: int = address_of(memory) + self.begin
        self.template: tuple[Any, Any, Any] | None = None
        self.quiet: list[weakref.ref[Any]] = []

    def offset_of(self, part: memoryview) -> int:
        """Return where a view of memory begins in the range, -1 if it is not all in it."""
        offset = address_of(part) - self.address
        return offset if 0 <= offset <= self.room - len(part) else -1

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Write bytes into the range."""
        offset += self.begin
        self.memory[offset : offset + len(data)] = data

    def take_back(self, lent: list[Any], nbytes: int, frame: FrameType | None) -> bool:
        """Let nothing that was lent reach the range any more; return whether the window can be used again.

        Args:
            lent: The arrays, tensors and memoryviews over it that were given to the caller; emptied. Nothing but this
                list and the caller may refer to them.
            nbytes: How much of the range they are in; what lies behind reads as zeros in a private copy.
            frame: Of the caller, if that is known.

        Raises:
            SharedMemoryError: There is no memory for a private copy: what is still held reads as zeros now.
        """
        if self.quiet:
            self.quiet = [reader for reader in self.quiet if reader() is not None]
        lone, quiet, named = True, [], []
        for i in range(len(lent)):
            count = getrefcount(lent[i])
            lone = lone and count <= _LONE
            if count == _LONE:
                named.append(id(lent[i]))
        if lone and named:
            lone = _has_variables(frame, named)
        while lone and lent:
            each = lent.pop()
            if hasattr(each, "flags"):
                each.flags.writeable = False
                quiet.append(weakref.ref(each))
            else:
                lone = _emptied(each)
            del each
        lent.clear()
        if lone and self._holders() <= len(self.quiet) + len(quiet):
            self.quiet += quiet
            return True
        for reader in quiet:
            array = reader()
            if array is not None:
                array.flags.writeable = True  # a copy of its own, as the rest is
            del array
        self._make_private(nbytes)
        return False

    def close(self) -> None:
        """Leave a private copy behind if the window is held."""
        if self._holders():
            with suppress(SharedMemoryError):  # zeros, then
                self._make_private(self.room)

    def _holders(self) -> int:
        """Return how much there is over the memory, but for the template: arrays, and what else refers to either."""
        holders = getrefcount(self.memory) - _UNHELD
        if self.template is not None:
            holders += getrefcount(self.template[2]) - _UNHELD - 1  # which has a reference to the memory itself
        return holders

    def _make_private(self, nbytes: int) -> None:
        address, length = address_of(self.memory), len(self.memory)
        try:
            make_private(address, length, self.begin, nbytes)
        except SharedMemoryError:
            with suppress(OSError):  # it takes no more room than what is there
                map_memory(address, length, _READ_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
            raise


def _has_variables(frame: FrameType | None, objects: list[int]) -> bool:
    """Return whether each of these objects, by its id, is what a local variable refers to.

    Args:
        frame: Where to look; after that, in those that have called it: there may be an exit stack in between.
        objects: Their ids.
    """
    missing = set(objects)
    for _ in range(CALLERS):
        if frame is None:
            break
        variables = frame.f_locals
        missing.difference_update(map(id, variables.values()))
        if frame.f_code.co_flags & CO_OPTIMIZED and type(variables) is dict:
            variables.clear()  # before CPython 3.13 it is a copy that the frame keeps, and with it what it refers to
        if not missing:
            return True
        frame = frame.f_back
    return False


def _emptied(each: Any) -> bool:
    """Take its memory away from a tensor or a memoryview; return whether that could be done."""
    try:
        if isinstance(each, memoryview):
            each.release()
        else:
            each.set_()
    except (BufferError, RuntimeError):  # there are arrays over it, or it is a part of a graph by now
        return False
    return True


class _Sample:
    """What a window is for counting references."""

    def __init__(self) -> None:
        self.memory: mmap.mmap = mmap.mmap(-1, 1)


def _count_unheld() -> int:
    """Return what `getrefcount` says of a mapping that only its window holds, asked as above."""
    sample = _Sample()
    return getrefcount(sample.memory)


def _count_lone() -> int:
    """Return what `getrefcount` says of what one name of the caller's refers to, asked as above."""
    name = _Sample()
    lent = [name]
    i = 0
    return getrefcount(lent[i])


_UNHELD: Final = _count_unheld()
_LONE: Final = _count_lone()
