"""The hot path of a ring in Python: the twin of ``core/*.c``, and its reference in the tests.

Nothing here waits, and nothing is kept that is not the message itself. What a message costs is a few byte stores, two
comparisons of a slice with constant bytes (whatever the number of readers), and one fence.

**The gate.** An end belongs to one thread and one event loop, which other tasks share. `send` and `receive`, the two
calls that a message normally costs, pass only while the gate is ``open`` and some of the ``turn`` is left, on the
thread that called `belong`, while its ``runs()`` is true. An end whose calls block belongs to whichever thread uses it:
they pass on any thread while no other one is the ``user``. All other methods leave that to their caller.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from threading import get_ident
from time import monotonic_ns
from typing import Any, Final, NoReturn, Self

from aioshm.process.interrupts import from_handler
from aioshm.ring import layout as at
from aioshm.ring.layout import Layout, Pool, chunk_at, pool_for
from aioshm.ring.slot import Slot, Slots

NOTHING: Final[Any] = object()
"""There is no message, or the gate is shut."""

ELSEWHERE: Final[Any] = object()
"""There is a message, but not an ordinary one: the caller has to look at the slot."""

COPY_MAX = 65536
"""Larger messages are no ordinary ones: they are decoded in place."""

BATCH_LOOKS = 8  # between two readings of the clock
RUSH_NS = 20_000  # between two messages: they come in quick succession
_ALL = (1 << 64) - 1
HELD_SPIN_NS = 50_000  # a longer spin keeps the memory from being closed meanwhile, and its end from being used
_WORDS = struct.Struct("<5Q")  # of a slot's header: what is in it, sequence number, time of publishing, bytes, chunk
_pack = _WORDS.pack_into
_unpack = _WORDS.unpack_from
_WORD = struct.Struct("<Q")
_OVERFLOW = 2  # the first byte of the header of a message that lies elsewhere, see codec/frames.py
_SEQ_AT = 8

STRONG_ORDER = platform.machine().lower() in {"x86_64", "amd64", "i686", "i386", "x86"}
"""Whether stores stay in order among themselves, and loads among themselves."""

_lock = threading.Lock()


def memory_fence() -> None:
    """Full memory fence: let no earlier load or store pass a later one.

    The twin's lock round trip holds a locked instruction, which is a full fence on x86. Elsewhere it orders as acquire
    and release only: what comes before it may still change places with what comes after it, both within. With two of
    them that is over: AArch64 lets no acquire pass a release before it (Arm ARM, B2.3, barrier-ordered-before). Other
    processors may; see `atomics.FULL_FENCE`.
    """
    with _lock:
        pass
    if not STRONG_ORDER:
        with _lock:
            pass


class _Core(ABC):
    """The part that both ends share: gate, spinning, parked flags, memory.

    Attributes:
        seq: Sequence number of the next message.
        published_ns: When the latest message was published, by ``time.monotonic_ns()``.
        open: Whether the gate is open.
        turn: Messages that may still pass before the event loop has to have its turn.
        turn_ends_ns: When that is at the latest.
        user: The thread that is using an end that any thread may use, 0 if none is; see ``queue/blocking/turns.py``.
        quiet: Whether `send` and `receive` set ``owes`` instead of telling a parked end, which a signal's handler could
            interrupt halfway.
        owes: Whether the other end has to be told that it may go on.
        due: Before which message that is not set: the other end is to be told later anyway.
        spin_ns: How long `send` and `receive` spin where they cannot go on at once.
        spin_yields: Whether a spin hands its CPU on between its looks.
        kept: Whether a slot was skipped and has not been given back (of a reader).
        spins, hits, spun_ns: How often this end spun, with success, and for how long in all.
        copied: Bytes that were copied into messages (of a writer), or out of those that were leased (of a reader).
        claimed_bytes: Bytes of the message that the latest claimed slot is for (of a writer), which `commit` counts.
        trace: The trace context that the next message goes out with, as `layout.TRACE` has it (of a writer).
        garbled: How many messages came with a trace context that is none (of a reader).
    """

    def __init__(self, layout: Layout, view: memoryview, slots: Slots, line: int) -> None:
        if len(slots) != layout.slots:
            raise TypeError("slots must be all slots, by index")
        if not slots or len(view) < layout.total_bytes:
            raise ValueError("the memory is smaller than the layout says, or lies crooked")
        if view.readonly:
            raise BufferError("the memory is read-only")
        self.seq: int = 0
        self.published_ns: int = 0
        self.open: bool = False
        self.turn: int = 0
        self.turn_ends_ns = 0
        self.spin_ns = 0
        self.spin_yields: bool = False
        self.spins: int = 0
        self.hits: int = 0
        self.spun_ns: int = 0
        self.copied: int = 0
        self.garbled: int = 0
        self._thread = -1
        self.user: int = 0
        self._runs: Callable[[], object] | None = bool
        self._code: Callable[[Any], Any] = bytes
        self._what = 0
        self._raw = False
        self._on_parked: Callable[[], object] | None = None
        self._beside: Callable[..., Any] | None = None
        self._measure: Callable[[Any], int] | None = None
        self._slots = slots
        self._amount = layout.slots
        self._index = 0
        self._closed = False
        self._view = view[:]
        self._flags = view[layout.metadata_offset : layout.total_bytes]
        self._row_bytes = layout.flag_bytes
        self._first, self._stride, self._inline = layout.header_bytes, layout.slot_bytes, layout.inline_bytes
        self._trace_at = layout.trace_at
        self._pools = layout.pools
        # memory_fence() inline, at half of its cost. No other thread has this lock; it is not waited for because an
        # exception that a signal handler raises between the two calls leaves it taken, and release() alone is a fence.
        self._fence = threading.Lock()
        with view[line : line + at.LINE].cast("Q") as words:
            self._count = words[at.COUNT : at.COUNT + 1]
        self._own = view[line : line + at.LINE]
        self._in_use = 0
        self.kept: bool = False
        self.quiet: bool = False
        self._hushed = False
        self.owes: bool = False
        self.due: int = 0

    def bind(self, code: Callable[[Any], Any], what: int, raw: bool, on_parked: Callable[[], object] | None, /) -> None:
        """Say how messages are coded, and whom to tell that the other end sleeps.

        Args:
            code: Writer: object to bytes, or to something else that `send` passes on. Reader: bytes to object.
            what: The first word in the header of an ordinary message.
            raw: Whether bytes stand for themselves.
            on_parked: Called when a message has passed and the other end is parked; its errors are only reported.
        """
        if not 0 <= what < 1 << 64:
            raise OverflowError("what must fit a word of the header")
        self._code, self._what, self._raw, self._on_parked = code, what, raw, on_parked

    def bind_beside(self, beside: Callable[..., Any] | None, measure: Callable[[Any], int] | None = None, /) -> None:
        """Say what handles messages that have buffers beside them, or None: nothing does.

        Args:
            beside: Writer: is called with where a slot begins, what encoding has returned and its sequence number,
                fills that slot with it and returns True, or returns False where it cannot. Reader: is called with where
                the next message's slot begins, and decodes that, or returns `ELSEWHERE`. The core itself publishes and
                releases.
            measure: Writer: returns how many bytes what encoding has returned takes.
        """
        self._beside, self._measure = beside, measure

    def belong(self, runs: Callable[[], object] | None, /) -> None:
        """Belong to this thread, while ``runs()`` is true; None: to whichever uses it, which at first is this one."""
        self._thread = self.user = get_ident()
        self._runs = runs

    def passes(self) -> bool:
        """Return whether the gate (loop, thread, process of this end) lets this thread pass."""
        return self._lets_pass(get_ident())

    def _lets_pass(self, me: int) -> bool:
        if not (self.open and self.turn > 0 and not self._in_use):
            return False
        if self._runs is None:
            return self.user in (0, me)
        return me == self._thread and bool(self._runs())

    def spin(self, budget_ns: int, /) -> bool:
        """Spin for at most so many nanoseconds; return whether this end may go on. A long one releases the GIL."""
        if self._may_go_on():
            return True
        if budget_ns <= HELD_SPIN_NS and not self.spin_yields:
            return self._spin(budget_ns)
        self._in_use += 1
        try:
            return self._spin(budget_ns)
        finally:
            self._in_use -= 1

    def _spin(self, budget_ns: int) -> bool:
        self._own[at.SPINNING] = 1
        try:
            return self._look_until(budget_ns)
        finally:
            self._own[at.SPINNING] = 0

    def _look_until(self, budget_ns: int) -> bool:
        began = now = monotonic_ns()
        self.spins += 1
        may_go_on = self._may_go_on
        while now - began < budget_ns:
            for _ in range(BATCH_LOOKS):
                if may_go_on():
                    self.hits += 1
                    self.spun_ns += monotonic_ns() - began
                    return True
            if self.spin_yields:
                os.sched_yield()
            now = monotonic_ns()
        self.spun_ns += now - began
        return False

    def close(self) -> None:
        """Release every view of the shared memory. Idempotent.

        Raises:
            BufferError: Called from inside of a batch, or of a spin in another thread.
        """
        if self._in_use:
            raise BufferError("the ring is in use")
        self.open = False
        self._closed = True
        for part in (self._view, self._flags, self._count, self._own):
            part.release()

    @abstractmethod
    def _may_go_on(self) -> bool:
        """Return whether this end's message or free slot is there."""

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("the ring was closed")

    def _check_unused(self) -> None:
        self._check_open()
        if self._in_use:
            raise RuntimeError("the ring is in use: this was called from inside of a batch")

    def _advance(self) -> None:
        self.seq = self._count[0] = self.seq + 1
        index = self._index + 1
        self._index = index if index < self._amount else 0

    def _count_turn(self, messages: int, now_ns: int) -> None:
        self.turn = self.turn - messages if now_ns < self.turn_ends_ns and messages < self.turn else 0

    def _notify(self) -> None:
        if self._hushed:
            self.owes = self.owes or self.seq >= self.due
            return
        if self._on_parked is None:
            return
        try:
            self._on_parked()
        except BaseException as error:  # whatever it is, the message has passed
            _Unraisable(error)


class _Unraisable:
    """Lets Python report an error that cannot be raised, in the way in which it reports those of ``__del__``."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __del__(self) -> None:
        raise self._error


class _Chunks:
    """The chunks of one size, as the writer keeps them.

    Attributes:
        free: Numbers of those that are free, the one that became free last at the end.
        used: Message and chunk of those that are not, in the order of the messages.
        allocated: How many, from the first on, have memory: all of them, but for a named segment.
    """

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.free = list(range(pool.first + pool.chunks - 1, pool.first - 1, -1))
        self.used: deque[tuple[int, int]] = deque()
        self.allocated = pool.chunks

    def usable(self) -> int:
        """Return how many free chunks have memory; the others are the last ones to be taken."""
        return max(0, len(self.free) - (self.pool.chunks - self.allocated))


class WriterCore(_Core):
    """The writer's end: `claim` a slot, fill its header and body, `commit` it; or all of that in one call."""

    published_ns: int
    copied: int

    def __init__(self, layout: Layout, view: memoryview, slots: Slots, /) -> None:
        super().__init__(layout, view, slots, at.WRITER_LINE)
        self._parked = view[at.READERS_PARKED : at.READERS_PARKED + layout.n_reader]
        self._unread = bytearray(layout.n_reader)
        self._count_places()
        self._room = layout.max_chunk_bytes
        self._chunks = {pool: _Chunks(pool) for pool in self._pools}
        self._claimed: tuple[_Chunks, int] | None = None  # the chunk of the slot that is claimed
        self.claimed_bytes: int = 0
        with view[at.WRITER_LINE : at.WRITER_LINE + at.LINE].cast("Q") as words:
            self._totals = words[at.BYTES // 8 : at.OVERFLOWS // 8 + 1]
        self._awaited = -1
        self._trace = bytes(at.TRACE_BYTES)
        self._allocate: Callable[[int, int], object] | None = None

    def bind_allocate(self, allocate: Callable[[int, int], object], /) -> None:
        """Set the callable that allocates memory for chunks, which have none; it gets their offset and bytes."""
        self._allocate = allocate
        for chunks in self._chunks.values():
            chunks.allocated = 0

    @property
    def trace(self) -> bytes:
        """The trace context that the next message goes out with, where slots have any."""
        return self._trace

    @trace.setter
    def trace(self, trace: bytes) -> None:
        if type(trace) is not bytes:
            raise TypeError("a trace context is bytes")
        if len(trace) != at.TRACE_BYTES:
            raise ValueError(f"a trace context has {at.TRACE_BYTES} bytes")
        self._trace = trace

    # Room

    def free(self, slots: int = 1, large: Sequence[int] = (), /) -> bool:
        """Return whether there is room for so many messages.

        Args:
            slots: How many.
            large: The sizes of those that do not fit a slot, in any order.
        """
        return self.blocker(slots, large) < 0

    def blocker(self, slots: int = 1, large: Sequence[int] = (), /) -> int:
        """Return which message has to be read by all before there is room for so many, or -1: there is room.

        Messages are read in order, so that one stands for all before it. The arguments are those of `free`.

        Raises:
            SharedMemoryError: A chunk of a named segment needs memory, and there is none.
        """
        wanted: dict[Pool, int] = {}
        for nbytes in large:
            pool = self._pool_for(nbytes)
            wanted[pool] = wanted.get(pool, 0) + 1
        self._check_open()
        if not 1 <= slots <= self._amount:
            raise ValueError(f"a ring of {self._amount} slots cannot have {slots} of them free")
        last = (self._index + slots - 1) % self._amount
        # The message that the last of these slots has; before the first lap there is none, and damage holds it up.
        blocker = -1 if self._is_free(last) else max(last, self.seq + slots - 1 - self._amount)
        for pool, amount in wanted.items():
            if amount > pool.chunks:
                chunks = f"{pool.chunks} chunks of {pool.room} bytes"
                raise ValueError(f"a ring of {chunks} cannot have {amount} of them free")
            kept = self._chunks[pool]
            self._reclaim(kept)
            missing = amount - len(kept.free)
            if missing > 0:
                blocker = max(blocker, kept.used[missing - 1][0])
            else:
                self._allocate_chunks(kept, amount)
        return blocker

    def _allocate_chunks(self, chunks: _Chunks, wanted: int) -> None:
        """Allocate memory for free chunks, until so many have it."""
        usable = chunks.usable()
        if wanted <= usable:
            return
        assert self._allocate is not None
        pool, first = chunks.pool, chunks.allocated
        last = first + wanted - usable
        self._in_use += 1
        try:
            self._allocate(pool.start + first * pool.stride, (last - first) * pool.stride)
        finally:
            self._in_use -= 1
        chunks.allocated = max(chunks.allocated, last)

    def spin_for(self, slots: int = 1, large: Sequence[int] = (), /) -> int:
        """Let spins wait for room for so many messages, as it is now; return what `blocker` does."""
        blocker = self.blocker(slots, large)
        self._awaited = blocker
        return blocker

    def claim(self, nbytes: int = 0, /) -> Slot | None:
        """Return the next slot for writing so many bytes, or None while some reader still has it, or every such chunk.

        A slot that was claimed and is never committed stays invisible and can be claimed again. Where the message is
        larger than a chunk, it lies elsewhere, but takes one all the same, so that there are not too many of them.
        """
        if self._in_use or self._closed:
            self._check_unused()
        if nbytes < 0:
            raise OverflowError("no message has fewer than 0 bytes")
        if not self._claim(nbytes):
            return None
        return self._slots[self._index]

    def commit(self) -> bool:
        """Publish the claimed slot; return whether a reader is parked and has to be woken."""
        if self._in_use or self._closed:
            self._check_unused()
        self._publish()
        fence = self._fence
        fence.acquire(False)
        fence.release()
        return self._parked_here != self._nobody

    def put(self, message: bytes, /) -> bool:
        """Publish an encoded message that fits the ring; return False if it does not, or while there is no room."""
        if self._in_use or self._closed:
            self._check_unused()
        if type(message) is not bytes:
            raise TypeError("put() takes bytes")
        size = len(message)
        if size > self._room or not (self._claim(size) or (self._spin_for_room(size) and self._claim(size))):
            return False
        self.published_ns = now = monotonic_ns()
        self._fill(message, now)
        self.turn: int = self.turn - 1 if now < self.turn_ends_ns and self.turn > 1 else 0
        if self.commit():
            self._notify()
        return True

    def put_many(self, messages: list[Any], start: int, /) -> int:
        """Publish messages of a list, from one on, with one fence; return how many.

        It ends at the first one that is not bytes or does not fit the ring, or where there is no room.
        """
        if type(messages) is not list:
            raise TypeError("put_many() takes a list and where to begin")
        self._check_unused()
        if start < 0:
            raise ValueError("put_many() cannot begin before the list does")
        now = monotonic_ns()
        number = start
        while number < len(messages):
            message = messages[number]
            if type(message) is not bytes or len(message) > self._room or not self._claim(len(message)):
                break
            self._fill(message, now)
            self._publish()
            number += 1
        if number == start:
            return 0
        self.published_ns = now
        self._count_turn(number - start, monotonic_ns())
        memory_fence()
        if self._parked_here != self._nobody:
            self._notify()
        return number - start

    def send(self, obj: Any, /) -> Any:
        """Encode and publish an object, if the gate lets this thread pass.

        Returns:
            None: It was sent.
            False: The gate is shut; nothing was done.
            Anything else: What encoding it returned; there is no slot, or it is no ordinary message.
        """
        me = get_ident()
        if not self._lets_pass(me):
            return False
        before, self.user = self.user, me  # without a call since it passed: other threads run only where one is
        self._hushed = self.quiet
        try:
            message = obj if self._raw and type(obj) is bytes else self._code(obj)
            sent = self.put(message) if type(message) is bytes else self._put_beside(message)
            return None if sent else message
        finally:
            self.user: int = before
            self._hushed = False

    def _put_beside(self, message: Any) -> bool:
        """Publish a message that is not bytes; return False if it is no ordinary one, or while no slot is free."""
        if self._beside is None or self._measure is None:
            return False
        nbytes = self._measure(message)
        if nbytes < 0:
            raise OverflowError("no message has fewer than 0 bytes")
        self._check_unused()
        if nbytes > self._room or not (self._claim(nbytes) or (self._spin_for_room(nbytes) and self._claim(nbytes))):
            return False
        begin = self._first + self._index * self._stride
        self._in_use += 1
        try:
            if self._beside(begin, message, self.seq) is not True:
                return False
        finally:
            self._in_use -= 1
        self.published_ns = _unpack(self._view, begin)[2]
        self.copied += nbytes
        self._count_turn(1, monotonic_ns())
        if self.commit():
            self._notify()
        return True

    def evict(self, reader: int, /) -> None:
        """Evict a reader: it counts as having read every message, past and future."""
        self._check_open()
        if not 0 <= reader < len(self._unread):
            raise IndexError(f"there is no reader {reader}")
        self._unread[reader] = 1
        for row in range(0, self._amount * self._row_bytes, self._row_bytes):
            self._flags[row + 1 + reader] = 1
        self._parked[reader] = 0
        self._count_places()

    def _count_places(self) -> None:
        """Look no further than to the last reader that was not evicted: the flags behind it stay 1."""
        places = self._unread.rfind(0) + 1
        self._parked_here = self._parked[:places]
        self._nobody, self._cleared = bytes(places), bytes(self._unread[:places])
        self._read_by_all = bytes([1]) * (1 + places)

    def admit(self, reader: int, history: int, gone: Callable[[int], object] | None, /) -> int:
        """Admit a reader to the place of one that was evicted; return the number of its first message.

        Args:
            reader: Which.
            history: How many of the latest messages come first, if the ring still has them all.
            gone: Says of a message that lies elsewhere (see ``codec/frames.py``) whether it is not to be had any more.
        """
        self._check_unused()
        if not 0 <= reader < len(self._unread):
            raise IndexError(f"there is no reader {reader}")
        if history < 0:
            raise ValueError("there are no fewer than 0 messages")
        self._in_use += 1
        try:
            first = self._oldest_of(history, gone)
        finally:
            self._in_use -= 1
        for seq in range(self.seq - 1, first - 1, -1):
            self._keep_again(seq)
            self._flags[seq % self._amount * self._row_bytes + 1 + reader] = 0
        self._unread[reader] = self._parked[reader] = 0
        self._count_places()
        return first

    def _oldest_of(self, history: int, gone: Callable[[int], object] | None) -> int:
        """Return from which message on, of so many, slot and chunk still have each."""
        first = self.seq
        while first > 0 and self.seq - first < min(history, self._amount) and self._has(first - 1, gone):
            first -= 1
        return first

    def _has(self, seq: int, gone: Callable[[int], object] | None) -> bool:
        index = seq % self._amount
        what, found, _, _, number = _unpack(self._view, self._first + index * self._stride)
        if self._flags[index * self._row_bytes] == 0 or found != seq:
            return False
        if what & 0xFF == _OVERFLOW:  # its slot names no chunk, though it has one
            return gone is None or not gone(seq)
        place = chunk_at(self._pools, number - 1) if number else None
        return not number or (place is not None and _WORD.unpack_from(self._view, place[0])[0] == seq + 1)

    def _keep_again(self, seq: int) -> None:
        """Take the chunk of a message out of the free ones again, if it is one of them."""
        what, _, _, _, number = _unpack(self._view, self._first + seq % self._amount * self._stride)
        if what & 0xFF == _OVERFLOW:
            return
        for pool, chunks in self._chunks.items():
            if pool.first < number <= pool.first + pool.chunks and (not chunks.used or chunks.used[0][0] > seq):
                claimed = self._claimed is not None and self._claimed[0] is chunks  # whose chunk stays the last one
                if number - 1 in chunks.free[: len(chunks.free) - claimed]:
                    chunks.free.remove(number - 1)
                    chunks.used.appendleft((seq, number - 1))

    def close(self) -> None:
        super().close()
        self._totals.release()
        self._parked_here.release()
        self._parked.release()

    def _publish(self) -> None:
        self._put_notes()
        flags, row, cleared = self._flags, self._index * self._row_bytes, self._cleared
        flags[row + 1 : row + 1 + len(cleared)] = cleared
        self._announce(row)

    def _put_notes(self) -> None:
        """Note in the slot how large the message is, where its marker does not say so, and its trace context."""
        start = self._first + self._index * self._stride
        if self._view[start] != _OVERFLOW:
            _WORD.pack_into(self._view, start + at.SIZE, self.claimed_bytes)
        if self._trace_at:
            start += self._trace_at
            self._view[start : start + at.TRACE_BYTES] = self._trace

    def _announce(self, row: int) -> None:
        if self._claimed is not None:
            self._use_claimed(*self._claimed)
            self._claimed = None
        self._flags[row] = 1  # last: readers may look the moment this is visible
        totals, nbytes = self._totals, self.claimed_bytes
        totals[0] = (totals[0] + nbytes) & _ALL
        if self._view[self._first + self._index * self._stride] == _OVERFLOW:
            totals[1] = (totals[1] + 1) & _ALL
        self._advance()

    def _claim(self, nbytes: int) -> bool:
        """Take the next slot, and a chunk if need be; note in its header which."""
        if self._claimed is not None:
            self._unclaim()
        if not self._is_free(self._index):
            return False
        number = 0
        if nbytes > self._inline:
            chunks = self._chunks[self._pool_for(nbytes)]
            self._reclaim(chunks)
            if not chunks.usable():
                return False  # `blocker` allocates memory for a chunk that has none
            chunk = chunks.free[-1]
            self._claimed = chunks, chunk
            number = 1 + chunk
        self._flags[self._index * self._row_bytes] = 0
        self.claimed_bytes = nbytes
        self._note(number)
        return True

    def _note(self, number: int) -> None:
        view, start = self._view, self._first + self._index * self._stride
        _WORD.pack_into(view, start + _SEQ_AT, self.seq)
        _WORD.pack_into(view, start + at.CHUNK, number)
        if number:
            _WORD.pack_into(view, self._chunk_at(number)[0], self.seq + 1)

    def _fill(self, message: bytes, now_ns: int) -> None:
        """Fill the claimed slot, or its chunk."""
        view, start = self._view, self._first + self._index * self._stride
        number = 0 if self._claimed is None else 1 + self._claimed[1]
        size = len(message)
        _pack(view, start, self._what, self.seq, now_ns, size, number)
        body = self._chunk_at(number)[0] + at.CHUNK_HEADER_BYTES if number else start + at.SLOT_HEADER_BYTES
        view[body : body + size] = message
        self.copied += size

    def _chunk_at(self, number: int) -> tuple[int, int]:
        place = chunk_at(self._pools, number - 1)
        assert place is not None
        return place

    def _pool_for(self, nbytes: int) -> Pool:
        if nbytes < 0:
            raise OverflowError("no message has fewer than 0 bytes")
        return pool_for(self._pools, nbytes)

    def _use_claimed(self, chunks: _Chunks, chunk: int) -> None:
        """Note that a chunk is in use; interrupted by a signal's handler, it can be undone."""
        chunks.used.append((self.seq, chunk))
        assert chunks.free[-1] == chunk
        del chunks.free[-1]

    def _unclaim(self) -> None:
        """Forget a slot that was claimed and never committed."""
        assert self._claimed is not None
        chunks, chunk = self._claimed
        if chunks.used and chunks.used[-1] == (self.seq, chunk):
            chunks.used.pop()
        if chunk not in chunks.free:
            chunks.free.append(chunk)
        self._claimed = None

    def _reclaim(self, chunks: _Chunks) -> None:
        """Take back the chunks whose messages were read by all."""
        used, oldest = chunks.used, self.seq - self._amount - 1
        while used and (used[0][0] <= oldest or self._is_free(used[0][0] % self._amount)):
            free, chunk = chunks.free, used.popleft()[1]
            claimed = self._claimed is not None and self._claimed[0] is chunks  # whose chunk stays the last one
            free.insert(len(free) - 1 if claimed else len(free), chunk)

    def _is_free(self, index: int) -> bool:
        flags, row = self._flags, index * self._row_bytes
        read_by_all = self._read_by_all
        return flags[row : row + len(read_by_all)] == read_by_all or not flags[row]

    def _spin_for_room(self, nbytes: int) -> bool:
        if self.spin_ns <= 0:
            return False
        self._awaited = self.blocker(1, (nbytes,) if nbytes > self._inline else ())
        try:
            return self.spin(self.spin_ns)
        finally:
            self._awaited = -1

    def _may_go_on(self) -> bool:
        awaited = self._awaited
        if awaited < 0:
            return self._is_free(self._index)
        return awaited <= self.seq - self._amount - 1 or self._is_free(awaited % self._amount)


class ReaderCore(_Core):
    """A reader's end: `peek` at the next message, `release` it when done with its slot; or both in one call."""

    kept: bool
    published_ns: int
    copied: int
    garbled: int

    def __init__(self, layout: Layout, view: memoryview, slots: Slots, reader: int, /) -> None:
        if not 0 <= reader < layout.n_reader:
            raise IndexError(f"there is no reader {reader}")
        super().__init__(layout, view, slots, layout.reader_line(reader))
        self._flag = 1 + reader
        self._copy_max = min(COPY_MAX, layout.max_chunk_bytes)
        self._undelivered: list[Any] | None = None
        self._rushes = False  # whether messages come in quick succession, so that not each one's latency is counted
        self._finished_ns = 0
        histogram = layout.histogram(reader)
        with view[histogram : histogram + 8 * at.LATENCY_BUCKETS] as part:
            self._latencies = part.cast("Q")
        with view[layout.reader_line(reader) : layout.reader_line(reader) + at.LINE].cast("Q") as words:
            self._latency_ns = words[at.LATENCY_NS // 8 : at.LATENCY_NS // 8 + 1]
            self._bytes_read = words[at.BYTES // 8 : at.BYTES // 8 + 1]
        self._parked = view[at.WRITER_PARKED : at.WRITER_PARKED + 1]
        self._trail: deque[bytes] = deque(maxlen=at.TRAIL)
        self._noted = -1  # the message whose trace context was noted last

    def ready(self) -> bool:
        """Return whether a message waits."""
        return self._may_go_on()

    def peek(self) -> Slot | None:
        """Return the slot of the next message, or None."""
        self._check_unused()
        return self._slots[self._index] if self._may_go_on() else None

    def release(self) -> bool:
        """Finish with the slot; return whether the writer is parked and has to be woken."""
        self._check_unused()
        self._finish()
        fence = self._fence
        fence.acquire(False)
        fence.release()
        return self._parked[0] != 0

    def start_at(self, seq: int, /) -> None:
        """Go on at a message, whatever lies before it."""
        self._check_unused()
        if not 0 <= seq < 1 << 64:
            raise OverflowError("no message has this number")
        self.seq = self._count[0] = seq
        self._index = seq % self._amount

    def skip(self) -> None:
        """Go on to the next message, but keep the slot, until `give_back`."""
        self._check_unused()
        self._note_taken()
        self._advance()
        self.kept = True

    def give_back(self, index: int, /) -> bool:
        """Finish with a kept slot; return whether the writer is parked and has to be woken.

        Slots have to be given back in order, before any later one is released.
        """
        self._check_unused()
        if not 0 <= index < self._amount:
            raise IndexError(f"there is no slot {index}")
        memory_fence()  # only after the chunk was read
        self._flags[index * self._row_bytes + self._flag] = 1
        self.kept = False
        memory_fence()
        return self._parked[0] != 0

    def take(self) -> Any:
        """Return the next message, `NOTHING`, or `ELSEWHERE`.

        It is finished with once it is decoded, or cannot be: the next call returns the one behind it. But where
        decoding was interrupted by a signal's handler, or by what is no `Exception`, the next call returns it.
        """
        self._check_unused()
        if not self._may_go_on():
            return NOTHING
        try:
            obj = self._decode()
        except Exception as error:
            if not from_handler(error):
                if self.was_evicted():
                    return NOTHING
                self._finish_and_tell()
            raise
        if obj is ELSEWHERE:
            return obj
        if self.was_evicted():
            return NOTHING
        self._finish_and_tell(took=True)
        return obj

    def was_evicted(self) -> bool:
        """Return whether the writer goes on without this reader: it may have filled the slot again that was read."""
        memory_fence()  # after what was read
        return bool(self._flags[self._index * self._row_bytes + self._flag])

    def taken(self, published_ns: int, /) -> None:
        """Note when the message was published that has just been taken, and how long that is ago."""
        if not 0 <= published_ns < 1 << 64:
            raise OverflowError("no clock shows this")
        self._check_open()
        self.published_ns = published_ns
        self._note_latency(monotonic_ns())

    def _counts(self) -> bool:
        """Return whether the next message is one of those whose latency is counted."""
        return not self._rushes or self.seq % at.LATENCY_EVERY == 0

    def _note_latency(self, now_ns: int) -> None:
        latency = (now_ns - self.published_ns) & _ALL
        if latency > _ALL >> 1:  # published after now: damage
            latency = 0
        bucket = min(max(latency.bit_length() - at.LATENCY_FIRST_BIT, 0), at.LATENCY_BUCKETS - 1)
        self._latencies[bucket] = (self._latencies[bucket] + 1) & _ALL
        self._latency_ns[0] = (self._latency_ns[0] + latency) & _ALL

    def _finish_and_tell(self, *, took: bool = False) -> None:
        now = monotonic_ns()
        self._rushes = now - self._finished_ns < RUSH_NS
        self._finished_ns = now
        if took and self._counts():
            self._note_latency(now)
        self.turn: int = self.turn - 1 if now < self.turn_ends_ns and self.turn > 1 else 0
        if self.release():
            self._notify()

    def _decode(self) -> Any:
        """Decode the next message, which is there and stays where it is; `ELSEWHERE` if it is no ordinary one."""
        message: Any = self._copy_plain()
        code, arg = self._code, message
        if message is None:
            if self._beside is None:
                return ELSEWHERE
            code, arg = self._beside, self._first + self._index * self._stride
        elif self._raw:
            return message
        self._in_use += 1
        try:
            return code(arg)
        finally:
            self._in_use -= 1

    @property
    def next(self) -> Any:
        """What `receive` returns; the native core's is taken without a call, so that nothing comes in between.

        `ELSEWHERE` if there are undelivered messages; see `bind_undelivered`.
        """
        undelivered = self._undelivered
        if undelivered:
            return ELSEWHERE
        obj = self.receive()
        if not self.owes or undelivered is None or obj is NOTHING or obj is ELSEWHERE:
            return obj
        undelivered.append(obj)
        return ELSEWHERE

    def bind_undelivered(self, undelivered: list[Any], /) -> None:
        """Say where messages are that were received, but that no call has returned yet.

        They come first, so `next` takes none while there are some; and where the other end has to be told before a
        message is returned, `next` puts it there, so that telling may be interrupted.

        Raises:
            TypeError: Not a list.
        """
        if type(undelivered) is not list:
            raise TypeError("what was not delivered is in a list")
        self._undelivered = undelivered

    def receive(self) -> Any:
        """Take the next message, if the gate lets this thread pass; else `NOTHING`."""
        me = get_ident()
        if self.kept or not self._lets_pass(me):  # slots go back in order
            return NOTHING
        before, self.user = self.user, me  # as in `send`
        self._hushed = self.quiet
        try:
            if not self._may_go_on() and (self.spin_ns <= 0 or not self.spin(self.spin_ns)):
                return NOTHING
            return self.take()
        finally:
            self.user: int = before
            self._hushed = False

    def take_many(self, most: int, /) -> list[Any]:
        """Return the next messages with one fence: at most so many, at most for the rest of the turn.

        It ends before the first one that is not an ordinary one, and before one that cannot be decoded; if that is
        the first, its error is raised and the next call returns the one behind it.
        """
        self._check_unused()
        batch: list[Any] = []
        failure: BaseException | None = None
        self._in_use += 1
        try:
            while len(batch) < most and self.ready():
                message: Any = self._copy_plain()
                if message is None:
                    break
                try:
                    obj = message if self._raw else self._code(message)
                except BaseException as error:
                    if isinstance(error, Exception) and (batch or self.was_evicted()):
                        break  # it is the next call's, which meets the same message again
                    failure = error
                    if not batch and isinstance(error, Exception) and not from_handler(error):
                        self._finish()
                    break
                if self.was_evicted():
                    break
                batch.append(obj)
                self._finish()
                if len(batch) % BATCH_LOOKS == 0:
                    self._note_latency(now := monotonic_ns())
                    if now >= self.turn_ends_ns:
                        break
        finally:
            self._in_use -= 1
        now = monotonic_ns()
        if len(batch) % BATCH_LOOKS:
            self._note_latency(now)
        self._count_turn(len(batch), now)
        memory_fence()
        if self._parked[0]:
            self._notify()
        if failure is not None:
            raise failure
        return batch

    def close(self) -> None:
        super().close()
        for part in (self._parked, self._latencies, self._latency_ns, self._bytes_read):
            part.release()

    def _finish(self) -> None:
        self._note_taken()
        self._flags[self._index * self._row_bytes + self._flag] = 1
        self._advance()

    # Trace contexts

    def note_trace(self) -> None:
        """Note the trace context of the next message, which is there, as of one that a block has."""
        self._check_unused()
        self._note_trace()

    def traces(self, most: int, /) -> list[bytes]:
        """Return the trace contexts of the messages that were taken last, the latest last: at most so many.

        Zeros stand for none, and for what is none; `layout.TRAIL` are kept.
        """
        if most < 0:
            raise OverflowError("there are no fewer than 0 messages")
        return list(self._trail)[-most:] if most else []

    def _note_trace(self) -> None:
        if self._trace_at and self._noted != self.seq:
            self._noted = self.seq
            self._trail.append(self._checked_trace(self._read_trace()))

    def _note_taken(self) -> None:
        """Count the bytes of the next message, and note its trace context: it is finished with, or nearly."""
        self._bytes_read[0] = (self._bytes_read[0] + self._read_size()) & _ALL
        self._note_trace()

    def _read_size(self) -> int:
        start = self._first + self._index * self._stride
        overflows = self._view[start] == _OVERFLOW
        return int(_WORD.unpack_from(self._view, start + (at.OVERFLOW_SIZE if overflows else at.SIZE))[0])

    def _read_trace(self) -> bytes:
        start = self._first + self._index * self._stride + self._trace_at
        return bytes(self._view[start : start + at.TRACE_BYTES])

    def _checked_trace(self, trace: bytes) -> bytes:
        is_there, _, trace_id, span_id = at.TRACE.unpack(trace)
        if is_there == 1 and any(trace_id) and any(span_id):
            return trace
        self.garbled += is_there != 0
        return bytes(at.TRACE_BYTES)

    def _copy_plain(self) -> bytes | None:
        view, start = self._view, self._first + self._index * self._stride
        what, seq, at_ns, size, number = _unpack(view, start)
        if what != self._what or seq != self.seq or size > self._copy_max:
            return None
        room = self._inline
        if number:
            place = chunk_at(self._pools, number - 1)
            if place is None or _WORD.unpack_from(view, place[0])[0] != seq + 1:
                return None
            start, room = place
        if size > room:
            return None
        self.published_ns = at_ns
        start += at.SLOT_HEADER_BYTES  # as many as a chunk's header has
        return bytes(view[start : start + size])

    def _may_go_on(self) -> bool:
        # In this order: what is cleared already and written still, from the lap before, is just being published.
        flags, row = self._flags, self._index * self._row_bytes
        return not flags[row + self._flag] and flags[row] != 0


class Calls:
    """The calls of an awaited queue that a core answers at once where it can.

    The native ones return what is a coroutine to everybody that has it, but takes no frame where it need not wait.
    To iterate over them is to receive; what they make the coroutines of says when that ends.

    Args:
        rest: Makes the coroutine that goes on where the core could not: of what is sent, what `WriterCore.send` has
            answered (False without a core), and the timeout; or of what `dequeue` was called with.
        whole: Makes the coroutine of a `dequeue` that has no core to ask; None: ``rest`` does.
        fail: Raises the error that `ReaderCore.receive` has raised, as callers are to see it; None: as it is.

    Attributes:
        core: The core that is asked first; None: there is none, or it is of another make.
    """

    def __init__(
        self,
        rest: Callable[..., Coroutine[Any, Any, Any]],
        whole: Callable[..., Coroutine[Any, Any, Any]] | None = None,
        fail: Callable[[Exception], NoReturn] | None = None,
        /,
    ) -> None:
        self._rest = rest
        self._whole = whole or rest
        self._fail = fail
        self.core: WriterCore | ReaderCore | None = None

    async def enqueue(self, obj: Any, timeout: float | None = None) -> None:
        """Send an object to every reader; see `aioshm.MessageQueue.enqueue`."""
        message = self.core.send(obj) if isinstance(self.core, WriterCore) else False
        if message is not None:
            await self._rest(obj, message, timeout)

    async def dequeue(self, timeout: float | None = None, cancel: Any = None, indefinite: bool = False) -> Any:
        """Receive the next message; see `aioshm.MessageQueue.dequeue`."""
        if not isinstance(self.core, ReaderCore):
            return await self._whole(timeout, cancel, indefinite)
        try:
            obj = self.core.receive()
        except Exception as error:
            if self._fail is None:
                raise
            self._fail(error)
        return await self._rest(timeout, cancel, indefinite) if obj is NOTHING or obj is ELSEWHERE else obj

    def __aiter__(self) -> Self:
        return self

    def __anext__(self) -> Coroutine[Any, Any, Any]:
        return self.dequeue()

    async def aclose(self) -> None:
        """End an iteration: the queue stays open."""


class OrderedWriterCore(WriterCore):
    """The writer's end where the processor reorders stores: the same steps with fences between them."""

    def _note(self, number: int) -> None:
        memory_fence()  # seen as not written before anything in it changes, which every reader has finished with
        super()._note(number)

    def _publish(self) -> None:
        self._put_notes()
        memory_fence()
        row, cleared = self._index * self._row_bytes, self._cleared
        self._flags[row + 1 : row + 1 + len(cleared)] = cleared
        memory_fence()  # the written flag becomes visible after what it announces, the cleared flags included
        self._announce(row)


class OrderedReaderCore(ReaderCore):
    """A reader's end where the processor reorders loads: the same steps with fences between them."""

    def peek(self) -> Slot | None:
        slot = super().peek()
        memory_fence()  # the body is read only after the written flag was seen
        return slot

    def _copy_plain(self) -> bytes | None:
        memory_fence()
        return super()._copy_plain()

    def _finish(self) -> None:
        memory_fence()  # the slot is given back only after the body was read
        super()._finish()


# Timers. Python has them from 3.13 on.

if sys.platform == "linux":
    _libc = ctypes.CDLL(None, use_errno=True)
    _CLOCK_MONOTONIC = 1
    _TFD_TIMER_ABSTIME = 1

    class _ItimerSpec(ctypes.Structure):
        _fields_ = (("interval", ctypes.c_long * 2), ("value", ctypes.c_long * 2))

    def timerfd_create() -> int:
        """Return the descriptor of a new timer on CLOCK_MONOTONIC, nonblocking and closed on exec."""
        fd = int(_libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC))
        if fd < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return fd

    def timerfd_settime(fd: int, at_ns: int, /) -> None:
        """Let a timer ring at a moment of CLOCK_MONOTONIC, in nanoseconds; 0 disarms it."""
        if not -1 << 31 <= fd < 1 << 31:
            raise OverflowError("no descriptor is that large")
        seconds, nanoseconds = divmod(1 if at_ns < 0 else at_ns, 1_000_000_000)
        when = _ItimerSpec((0, 0), (seconds, nanoseconds))
        if _libc.timerfd_settime(fd, _TFD_TIMER_ABSTIME, ctypes.byref(when), None) < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
