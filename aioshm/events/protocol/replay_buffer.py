"""The last batches that went out, kept for those who missed some. No I/O.

Entries lie in chunks that only ever grow. A client that is being answered holds the chunks it still needs, so
pushing old entries out of the buffer neither disturbs it nor copies anything.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from typing import TypeAlias

Entry: TypeAlias = tuple[int, bytes]

_CHUNK_ENTRIES = 256


class ReplayBuffer:
    """The last ``size`` batches, in rising order of their numbers."""

    def __init__(self, size: int) -> None:
        if size < 0:
            raise ValueError(f"buffer_steps must not be negative, not {size}")
        self._size = size
        self._chunks: deque[list[Entry]] = deque()
        self._count = 0  # entries in all chunks; the first ones may be older than the buffer reaches

    def __len__(self) -> int:
        return min(self._count, self._size)

    def append(self, seq: int, payload: bytes) -> None:
        """Keep one batch more; the oldest goes once there are more than ``size``."""
        if self._size == 0:
            return
        if not self._chunks or len(self._chunks[-1]) == _CHUNK_ENTRIES:
            self._chunks.append([])
        self._chunks[-1].append((seq, payload))
        self._count += 1
        while self._count - len(self._chunks[0]) >= self._size:
            self._count -= len(self._chunks.popleft())

    def since(self, start: int) -> Iterator[Entry]:
        """Return what the buffer holds now from ``start`` on; later appends do not change it."""
        chunks = list(self._chunks)
        if not chunks:
            return iter(())
        skip = max(0, self._count - self._size)
        chunks = [chunk for chunk in chunks if chunk[-1][0] >= start]
        if not chunks:
            return iter(())
        if chunks[0] is not self._chunks[0]:
            skip = 0
        begin = max(skip, bisect_left(chunks[0], start, key=_number))
        return _walk(chunks, begin, len(chunks[-1]))


def _number(entry: Entry) -> int:
    return entry[0]


def _walk(chunks: list[list[Entry]], begin: int, end: int) -> Iterator[Entry]:
    while chunks:
        chunk = chunks.pop(0)  # let go of it once it is done: the client may be slow
        stop = end if not chunks else len(chunk)
        for index in range(begin, stop):
            yield chunk[index]
        begin = 0
