"""The records of a ring's writer and readers: private memory that the native core and Python both read and write.

writer   0   claimed: 1 + the number of the claimed chunk's pool; 0: no chunk   u64
         8   places: 1 + the last reader that was not evicted                   u64
         16  the trace context of the next message                              26 of 32 bytes
         48  unread: the initial reader flags; 1 for evicted readers            n_reader bytes, rounded up to 8
         ... for each pool: chunks freed, taken (totals), allocated             u64 each
             free chunks; messages in taken chunks; chunks of these messages    count x u64 each

reader   0   how many trace contexts were noted                                 u64
         8   the message whose context was noted last, or `NO_MESSAGE`          u64
         16  the trail: a ring of the latest messages' contexts                 TRAIL x 26 bytes, if slots have any
"""

from __future__ import annotations

from array import array
from collections.abc import Callable

from aioshm.ring.layout import TRACE_BYTES, TRAIL, Pool, Sizes, pool_for, round_up

NO_MESSAGE = (1 << 64) - 1
CHUNK_LISTS = 24
UNREAD = 48
TRACES = 16

_CLAIMED = 0
_PLACES = 1
_TRACE = 16
_GIVEN, _TAKEN, _ALLOCATED, _LISTS = range(4)
_NOTED_TRACES = 0
_NOTED = 1


class Chunks:
    """The chunks of one size: a stack of free ones, and a queue of used ones in message order."""

    def __init__(self, number: int, pool: Pool, words: memoryview) -> None:
        self.number = number
        self.pool = pool
        count = pool.chunks
        self._words = words
        self._free = words[_LISTS : _LISTS + count]
        self._messages = words[_LISTS + count : _LISTS + 2 * count]
        self._numbers = words[_LISTS + 2 * count : _LISTS + 3 * count]

    def fill(self) -> None:
        """Mark all chunks as free and allocated; the first chunk will be taken first."""
        pool = self.pool
        for index in range(pool.chunks):
            self._free[index] = pool.first + pool.chunks - 1 - index
        self._words[_ALLOCATED] = pool.chunks

    @property
    def allocated(self) -> int:
        """How many chunks, from the first on, have memory; fewer than all only in a named segment."""
        return self._words[_ALLOCATED]

    @allocated.setter
    def allocated(self, count: int) -> None:
        self._words[_ALLOCATED] = count

    @property
    def n_free(self) -> int:
        return self.pool.chunks - (self._words[_TAKEN] - self._words[_GIVEN])

    @property
    def n_usable(self) -> int:
        """How many free chunks have memory; free chunks without memory are taken last."""
        return max(0, self.n_free - (self.pool.chunks - self.allocated))

    @property
    def top(self) -> int:
        """The free chunk that `take` takes next."""
        return self._free[self.n_free - 1]

    def message(self, nth: int) -> int:
        """Return the message in the nth used chunk, the oldest first."""
        return self._messages[(self._words[_GIVEN] + nth) % self.pool.chunks]

    def take(self, message: int) -> None:
        """Take the next free chunk for a message."""
        at = self._words[_TAKEN] % self.pool.chunks
        self._messages[at] = message
        self._numbers[at] = self.top
        self._words[_TAKEN] += 1

    def reclaim(self, finished: Callable[[int], bool]) -> None:
        """Free the chunks of finished messages. Do not call it while the top chunk is claimed."""
        while self.n_free < self.pool.chunks and finished(self.message(0)):
            self._free[self.n_free] = self._numbers[self._words[_GIVEN] % self.pool.chunks]
            self._words[_GIVEN] += 1

    def keep_again(self, number: int, message: int, *, claimed: bool) -> None:
        """Take a chunk off the free stack for an older message, if the chunk is free and unclaimed."""
        free = self._free[: self.n_free].tolist()
        if number not in free[: len(free) - claimed] or (len(free) < self.pool.chunks and self.message(0) <= message):
            return
        at = (self._words[_GIVEN] - 1) % self.pool.chunks
        self._messages[at] = message
        self._numbers[at] = number
        free.remove(number)
        free.append(number)
        self._free[: len(free)] = memoryview(array("Q", free))
        self._words[_GIVEN] -= 1


class WriterRecord:
    """The record of a writer; ``memory``: that of an existing record."""

    def __init__(self, sizes: Sizes, pools: tuple[Pool, ...], memory: bytearray | None = None) -> None:
        ends = [UNREAD + round_up(sizes.n_reader, 8)]
        for pool in pools:
            ends.append(ends[-1] + CHUNK_LISTS + 3 * 8 * pool.chunks)
        self.memory: bytearray = bytearray(ends[-1]) if memory is None else memory
        view = memoryview(self.memory)
        self._words = view.cast("Q")
        self.trace: memoryview = view[_TRACE : _TRACE + TRACE_BYTES]
        self.unread: memoryview = view[UNREAD : UNREAD + sizes.n_reader]
        self._pools = pools
        # In the order of the pools: by size, the largest first.
        self.chunks: list[Chunks] = [
            Chunks(number, pool, self._words[ends[number] // 8 : ends[number + 1] // 8])
            for number, pool in enumerate(pools)
        ]
        if memory is None:
            self._words[_PLACES] = sizes.n_reader
            for chunks in self.chunks:
                chunks.fill()

    @property
    def places(self) -> int:
        """How many reader flags the writer has to check: up to the last reader that was not evicted."""
        return self._words[_PLACES]

    @property
    def claimed(self) -> Chunks | None:
        """The chunks of which the claimed slot uses the top one; None: the slot uses no chunk."""
        number = self._words[_CLAIMED]
        if not number:
            return None
        return self.chunks[number - 1]

    @claimed.setter
    def claimed(self, chunks: Chunks | None) -> None:
        number = 0
        if chunks is not None:
            number = 1 + chunks.number
        self._words[_CLAIMED] = number

    def set_unread(self, reader: int, flag: int) -> None:
        """Note whether a reader was evicted (1) or reads (0)."""
        self.unread[reader] = flag
        self._words[_PLACES] = self.unread.tobytes().rfind(0) + 1

    def chunks_for(self, nbytes: int) -> Chunks:
        """Return the smallest chunks with room for ``nbytes``; the largest chunks if none have room."""
        if nbytes < 0:
            raise OverflowError("no message has fewer than 0 bytes")
        return self.chunks[self._pools.index(pool_for(self._pools, nbytes))]


class ReaderRecord:
    """The record of a reader: the trace contexts of the latest messages."""

    def __init__(self, sizes: Sizes, memory: bytearray | None = None) -> None:
        trail = 0
        if sizes.trace_at:
            trail = round_up(TRAIL * TRACE_BYTES, 8)
        self.memory: bytearray = bytearray(TRACES + trail) if memory is None else memory
        view = memoryview(self.memory)
        self._words = view.cast("Q")
        self._trail = view[TRACES:]
        if memory is None:
            self._words[_NOTED] = NO_MESSAGE

    def is_noted(self, message: int) -> bool:
        """Return whether the latest noted context is this message's."""
        return self._words[_NOTED] == message

    def note(self, message: int, trace: bytes) -> None:
        """Note a message's trace context."""
        self._words[_NOTED] = message
        begin = TRACE_BYTES * (self._words[_NOTED_TRACES] % TRAIL)
        self._trail[begin : begin + TRACE_BYTES] = trace
        self._words[_NOTED_TRACES] += 1

    def latest(self, most: int) -> list[bytes]:
        """Return the latest ``most`` contexts at most, the oldest first."""
        noted = self._words[_NOTED_TRACES]
        begins = [TRACE_BYTES * (nth % TRAIL) for nth in range(noted - min(most, noted, TRAIL), noted)]
        return [bytes(self._trail[begin : begin + TRACE_BYTES]) for begin in begins]
