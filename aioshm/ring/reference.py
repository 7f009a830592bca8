"""The hot calls of a ring's two ends in Python: the specification of the C code in ``core/``, and its stand-in.

Nothing here waits, and nothing is kept that is not the message itself. A message costs a few byte stores, two
comparisons of a slice with constant bytes (whatever the number of readers), and one fence.

**Who may use an end.** An end belongs to one thread and one event loop, which other tasks share. `send` and `receive`,
the two calls that a message normally costs, pass only while the end is ``open`` and some of the ``budget`` is left, on
the thread that called `belong`, while its ``runs()`` is true. An end whose calls block belongs to no thread: the
threads that use it exclude each other. All other methods leave that to their caller.
"""

from __future__ import annotations

import os
import platform
import struct
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from threading import get_ident
from time import monotonic_ns
from typing import Any, Final

from aioshm.ring import layout as at
from aioshm.ring.book import NO_MESSAGE, ReaderBook, WriterBook
from aioshm.ring.layout import Pool, Sizes, chunk_at

EMPTY: Final[Any] = object()
"""There is no message, or the gate is shut."""

SLOW_PATH: Final[Any] = object()
"""There is a message, but not an ordinary one: the caller has to look at the slot."""

DECODINGS = 3
"""A message that cannot be decoded so often is damaged."""

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
_SEQ_AT = 8

STRONG_ORDER = platform.machine().lower() in {"x86_64", "amd64", "i686", "i386", "x86"}
"""Whether stores stay in order among themselves, and loads among themselves."""

_lock = threading.Lock()


def memory_fence() -> None:
    """Full memory fence, by a lock (platform notes: memory ordering; `atomics.FULL_FENCE`)."""
    with _lock:
        pass
    if not STRONG_ORDER:
        with _lock:
            pass


class _End(ABC):
    """The part that both ends share: gate, spinning, parked flags, memory.

    Attributes:
        seq: Sequence number of the next message.
        published_ns: When the latest message was published, by ``time.monotonic_ns()``.
        open: Whether the gate is open.
        budget: Messages that may still pass before the event loop runs.
        budget_ends_ns: When the event loop runs at the latest.
        spin_ns: How long `send` and `receive` spin where they cannot go on at once.
        spin_yields: Whether a spin hands its CPU on between its looks.
        in_use: How many calls run code of others with the memory in their hands.
        kept: Whether a slot was skipped and has not been given back (of a reader).
        damaged: Whether the message that could not be decoded was finished with (of a reader).
        spins, hits, spun_ns: How often this end spun, with success, and for how long in all.
        copied: Bytes that were copied into messages (of a writer), or out of those that were leased (of a reader).
        claimed_bytes: Bytes of the message that the latest claimed slot is for (of a writer), which `commit` counts.
        awaited: The message that all have to read before a spin ends; `NO_MESSAGE`: the next slot's (of a writer).
        garbled: How many messages came with a trace context that is none (of a reader).
    """

    def __init__(self, sizes: Sizes, pools: tuple[Pool, ...], view: memoryview, line: int) -> None:
        if not sizes.slots or len(view) < sizes.total_bytes:
            raise ValueError("the memory is smaller than the layout says, or lies crooked")
        if view.readonly:
            raise BufferError("the memory is read-only")
        self.seq: int = 0
        self.published_ns: int = 0
        self.open: bool = False
        self.budget: int = 0
        self.budget_ends_ns = 0
        self.spin_ns = 0
        self.spin_yields: bool = False
        self.spins: int = 0
        self.hits: int = 0
        self.spun_ns: int = 0
        self.copied: int = 0
        self._thread = -1
        self._runs: Callable[[], object] | None = bool
        self._lock: Any = None
        self._code: Callable[[Any], Any] = bytes
        self._what = 0
        self._raw = False
        self._on_parked: Callable[[], object] | None = None
        self._beside: Callable[..., Any] | None = None
        self._measure: Callable[[Any], int] | None = None
        self._amount = sizes.slots
        self._index = 0
        self._closed = False
        self._view = view[:]
        self._flags = view[sizes.metadata_offset : sizes.total_bytes]
        self._row_bytes = 1 + sizes.n_reader
        self._first, self._stride, self._inline = sizes.header_bytes, sizes.slot_bytes, sizes.inline_bytes
        self._trace_at = sizes.trace_at
        self._pools = pools
        # memory_fence() inline, at half of its cost. No other thread has this lock; it is not waited for because an
        # exception that a signal handler raises between the two calls leaves it taken, and release() alone is a fence.
        self._fence = threading.Lock()
        with view[line : line + at.LINE].cast("Q") as words:
            self._count = words[at.COUNT : at.COUNT + 1]
        self._own = view[line : line + at.LINE]
        self.in_use: int = 0

    def bind(self, code: Callable[[Any], Any], what: int, raw: bool, on_parked: Callable[[], object] | None, /) -> None:
        """Set the codec and the callback for a parked peer, whose errors are only reported."""
        if not 0 <= what < 1 << 64:
            raise OverflowError("what must fit a word of the header")
        self._code, self._what, self._raw, self._on_parked = code, what, raw, on_parked

    def bind_beside(self, beside: Callable[..., Any] | None, measure: Callable[[Any], int] | None = None, /) -> None:
        """Say what handles messages that have buffers beside them, or None: nothing does.

        Args:
            beside: Writer: is called with where a slot begins, what encoding has returned and its sequence number,
                fills that slot with it and returns True, or returns False where it cannot. Reader: is called with where
                the next message's slot begins, and decodes that, or returns `SLOW_PATH`. The core itself publishes and
                releases.
            measure: Writer: returns how many bytes what encoding has returned takes.
        """
        self._beside, self._measure = beside, measure

    def belong(self, runs: Callable[[], object] | None, /) -> None:
        """Belong to this thread, while ``runs()`` is true; None: to any thread."""
        self._thread = get_ident()
        self._runs = runs

    def share(self, lock: Any, /) -> None:
        """Belong to any thread; `send` and `receive_next` acquire this `ProcessLock`."""
        self.belong(None)
        self._lock = lock

    def _acquire(self) -> int | None:
        """Acquire the shared lock; return its owner before, or None: another thread holds it."""
        lock = self._lock
        if lock is None:
            return 0
        me = get_ident()
        before: int = lock.owner
        if before not in (0, me):
            return None
        lock.owner = me
        return before

    def _release(self, before: int) -> None:
        if self._lock is not None:
            self._lock.owner = before or self._lock.next_owner

    def passes(self) -> bool:
        """Return whether the gate (loop, thread, process of this end) lets this thread pass."""
        return self._lets_pass(get_ident())

    def _lets_pass(self, me: int) -> bool:
        if not (self.open and self.budget > 0 and not self.in_use):
            return False
        return self._runs is None or (me == self._thread and bool(self._runs()))

    def spin(self, budget_ns: int, /) -> bool:
        """Spin for at most so many nanoseconds; return whether this end may go on. A long one releases the GIL."""
        if self._may_go_on():
            return True
        if budget_ns <= HELD_SPIN_NS and not self.spin_yields:
            return self._spin(budget_ns)
        self.in_use += 1
        try:
            return self._spin(budget_ns)
        finally:
            self.in_use -= 1

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
        """Release every view of the shared memory; `BufferError` inside of a batch. Idempotent."""
        if self.in_use:
            raise BufferError("the ring is in use")
        self.open = False
        self._closed = True
        for part in (self._view, self._flags, self._count, self._own):
            part.release()

    @abstractmethod
    def _may_go_on(self) -> bool:
        """Return whether this end's message or free slot is there."""

    def check_open(self) -> None:
        """Raise if the ring was closed."""
        if self._closed:
            raise ValueError("the ring was closed")

    def check_unused(self) -> None:
        """Raise if the ring was closed, or is in use: by a spin of another thread, or code that a call here runs."""
        self.check_open()
        if self.in_use:
            raise RuntimeError("the ring is in use: this was called from inside of a batch")

    def _advance(self) -> None:
        self.seq = self._count[0] = self.seq + 1
        index = self._index + 1
        self._index = index if index < self._amount else 0

    def _spend(self, messages: int, now_ns: int) -> None:
        self.budget = self.budget - messages if now_ns < self.budget_ends_ns and messages < self.budget else 0

    def _notify(self) -> None:
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


class WriterBase(_End):
    """The hot calls of a writer's end: claim a slot, publish it; or encode a message, and all of that, in one call."""

    published_ns: int
    copied: int
    in_use: int

    def __init__(self, sizes: Sizes, pools: tuple[Pool, ...], view: memoryview, book: bytearray, /) -> None:
        super().__init__(sizes, pools, view, at.WRITER_LINE)
        self._book = WriterBook(sizes, pools, book)
        self._parked = view[at.READERS_PARKED : at.READERS_PARKED + sizes.n_reader]
        self._ones, self._zeros = memoryview(bytes([1]) * (1 + sizes.n_reader)), bytes(sizes.n_reader)
        self._room = sizes.max_chunk_bytes
        self.claimed_bytes: int = 0
        with view[at.WRITER_LINE : at.WRITER_LINE + at.LINE].cast("Q") as words:
            self._totals = words[at.BYTES // 8 : at.OVERFLOWS // 8 + 1]
        self.awaited: int = NO_MESSAGE

    def finished(self, message: int, /) -> bool:
        """Return whether all have read a message, or its slot has another one."""
        return message + self._amount < self.seq or self._is_free(message % self._amount)

    def claim_slot(self, nbytes: int, /) -> bool:
        """Claim the next slot for so many bytes; return False while a reader still has it, or every such chunk."""
        if self.in_use or self._closed:
            self.check_unused()
        if nbytes < 0:
            raise OverflowError("no message has fewer than 0 bytes")
        return self._claim(nbytes)

    def commit(self) -> bool:
        """Publish the claimed slot; return whether a reader is parked and has to be woken."""
        if self.in_use or self._closed:
            self.check_unused()
        self._publish()
        fence = self._fence
        fence.acquire(False)
        fence.release()
        return self._readers_parked()

    def put(self, message: Any, /) -> bool:
        """Publish what encoding has returned; return False if it is no ordinary message, or while there is no room."""
        if self.in_use or self._closed:
            self.check_unused()
        if type(message) is not bytes:
            if self._beside is None:
                raise TypeError("put() takes bytes")
            return self._put_beside(message)
        size = len(message)
        if size > self._room or not (self._claim(size) or (self._spin_for_room(size) and self._claim(size))):
            return False
        self.published_ns = now = monotonic_ns()
        self._fill(message, now)
        self.budget: int = self.budget - 1 if now < self.budget_ends_ns and self.budget > 1 else 0
        if self.commit():
            self._notify()
        return True

    def put_many(self, messages: list[Any], start: int, /) -> int:
        """Publish messages of a list, from one on, with one fence; return how many.

        It ends at the first one that is not bytes or does not fit the ring, or where there is no room.
        """
        if type(messages) is not list:
            raise TypeError("put_many() takes a list and where to begin")
        self.check_unused()
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
        self._spend(number - start, monotonic_ns())
        memory_fence()
        if self._readers_parked():
            self._notify()
        return number - start

    def send(self, obj: Any, /) -> Any:
        """Encode and publish an object, if the gate lets this thread pass.

        Returns:
            None: It was sent.
            False: The gate is shut; nothing was done.
            Anything else: What encoding it returned; there is no slot, or it is no ordinary message.
        """
        before = self._acquire() if self._lets_pass(get_ident()) else None
        if before is None:
            return False
        try:
            message = obj if self._raw and type(obj) is bytes else self._code(obj)
            if type(message) is not bytes and self._beside is None:
                return message
            return None if self.put(message) else message
        finally:
            self._release(before)

    def _put_beside(self, message: Any) -> bool:
        """Publish a message that is not bytes; return False if it is no ordinary one, or while no slot is free."""
        if self._beside is None or self._measure is None:
            return False
        nbytes = self._measure(message)
        if nbytes < 0:
            raise OverflowError("no message has fewer than 0 bytes")
        self.check_unused()
        if nbytes > self._room or not (self._claim(nbytes) or (self._spin_for_room(nbytes) and self._claim(nbytes))):
            return False
        begin = self._first + self._index * self._stride
        self.in_use += 1
        try:
            if self._beside(begin, message, self.seq) is not True:
                return False
        finally:
            self.in_use -= 1
        self.published_ns = _unpack(self._view, begin)[2]
        self.copied += nbytes
        self._spend(1, monotonic_ns())
        if self.commit():
            self._notify()
        return True

    def close(self) -> None:
        super().close()
        self._totals.release()
        self._parked.release()

    def _readers_parked(self) -> bool:
        places = self._book.places
        return self._parked[:places] != self._zeros[:places]

    def _publish(self) -> None:
        self._put_notes()
        row = self._index * self._row_bytes
        self._clear_flags(row)
        self._announce(row)

    def _clear_flags(self, row: int) -> None:
        places = self._book.places
        self._flags[row + 1 : row + 1 + places] = self._book.unread[:places]

    def _put_notes(self) -> None:
        """Note in the slot how large the message is, where its marker does not say so, and its trace context."""
        start = self._first + self._index * self._stride
        if self._view[start] != at.OVERFLOW_KIND:
            _WORD.pack_into(self._view, start + at.SIZE, self.claimed_bytes)
        if self._trace_at:
            start += self._trace_at
            self._view[start : start + at.TRACE_BYTES] = self._book.trace

    def _announce(self, row: int) -> None:
        chunks = self._book.claimed
        if chunks is not None:
            chunks.take(self.seq)
            self._book.claimed = None
        self._flags[row] = 1  # last: readers may look the moment this is visible
        totals, nbytes = self._totals, self.claimed_bytes
        totals[0] = (totals[0] + nbytes) & _ALL
        if self._view[self._first + self._index * self._stride] == at.OVERFLOW_KIND:
            totals[1] = (totals[1] + 1) & _ALL
        self._advance()

    def _claim(self, nbytes: int) -> bool:
        """Take the next slot, and a chunk if need be; note in its header which."""
        book = self._book
        book.claimed = None
        if not self._is_free(self._index):
            return False
        number = 0
        if nbytes > self._inline:
            chunks = book.chunks_for(nbytes)
            chunks.reclaim(self.finished)
            if not chunks.n_usable:
                return False  # `WriterCore.blocker` allocates memory for a chunk that has none
            book.claimed = chunks
            number = 1 + chunks.top
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
        chunks = self._book.claimed
        number = 0 if chunks is None else 1 + chunks.top
        size = len(message)
        _pack(view, start, self._what, self.seq, now_ns, size, number)
        body = self._chunk_at(number)[0] + at.CHUNK_HEADER_BYTES if number else start + at.SLOT_HEADER_BYTES
        view[body : body + size] = message
        self.copied += size

    def _chunk_at(self, number: int) -> tuple[int, int]:
        place = chunk_at(self._pools, number - 1)
        assert place is not None
        return place

    def _is_free(self, index: int) -> bool:
        row, amount = index * self._row_bytes, 1 + self._book.places
        return self._flags[row : row + amount] == self._ones[:amount] or not self._flags[row]

    def _spin_for_room(self, nbytes: int) -> bool:
        if self.spin_ns <= 0:
            return False
        if nbytes > self._inline and not (chunks := self._book.chunks_for(nbytes)).n_free:
            self.awaited = chunks.message(0)  # the slot is free by then if it is not now: it is an older message's
        try:
            return self.spin(self.spin_ns)
        finally:
            self.awaited = NO_MESSAGE

    def _may_go_on(self) -> bool:
        return self._is_free(self._index) if self.awaited == NO_MESSAGE else self.finished(self.awaited)


class ReaderBase(_End):
    """The hot calls of a reader's end: decode the next message and finish with its slot; or both by hand."""

    published_ns: int
    copied: int
    in_use: int

    def __init__(
        self,
        sizes: Sizes,
        pools: tuple[Pool, ...],
        view: memoryview,
        book: bytearray,
        reader: int,
        line: int,
        histogram: int,
        /,
    ) -> None:
        super().__init__(sizes, pools, view, line)
        self._book = ReaderBook(sizes, book)
        self._flag = 1 + reader
        self.kept: bool = False
        self.garbled: int = 0
        self._copy_max = min(COPY_MAX, sizes.max_chunk_bytes)
        self.damaged: bool = False
        self._rushes = False  # whether messages come in quick succession, so that not each one's latency is counted
        self._finished_ns = 0
        with view[histogram : histogram + 8 * at.LATENCY_BUCKETS] as part:
            self._latencies = part.cast("Q")
        with view[line : line + at.LINE].cast("Q") as words:
            self._latency_ns = words[at.LATENCY_NS // 8 : at.LATENCY_NS // 8 + 1]
            self._bytes_read = words[at.BYTES // 8 : at.BYTES // 8 + 1]
        self._parked = view[at.WRITER_PARKED : at.WRITER_PARKED + 1]

    def ready(self) -> bool:
        """Return whether a message waits."""
        return self._may_go_on()

    def release(self) -> bool:
        """Finish with the slot; return whether the writer is parked and has to be woken."""
        self.check_unused()
        self._finish()
        fence = self._fence
        fence.acquire(False)
        fence.release()
        return self._parked[0] != 0

    def start_at(self, seq: int, /) -> None:
        """Continue at a message, whatever lies before it."""
        self.check_unused()
        if not 0 <= seq < 1 << 64:
            raise OverflowError("no message has this number")
        self.seq = self._count[0] = seq
        self._index = seq % self._amount

    def skip(self) -> None:
        """Continue with the next message, but keep the slot, until `ReaderCore.give_back`."""
        self.check_unused()
        self._note_taken()
        self._advance()
        self.kept = True

    def take(self) -> Any:
        """Return the next message, `EMPTY`, or `SLOW_PATH`.

        It is finished with once it is decoded, or cannot be: the next call returns the one behind it. But where
        decoding was interrupted, by what is no `Exception` or does not come again, the next call returns it.
        """
        self.check_unused()
        if not self._may_go_on():
            return EMPTY
        try:
            obj = self._decode()
        except Exception:
            self.damaged = False
            if not self._fails_again():
                raise
            if self.was_evicted():
                return EMPTY
            self.damaged = True
            self._finish_and_tell()
            raise
        if obj is SLOW_PATH:
            return obj
        if self.was_evicted():
            return EMPTY
        self._finish_and_tell(took=True)
        return obj

    def _fails_again(self) -> bool:
        """Return whether the next message cannot be decoded: what a signal's handler raises does not come again."""
        for _ in range(DECODINGS - 1):
            try:
                self._decode()
            except Exception:
                continue
            return False
        return True

    def was_evicted(self) -> bool:
        """Return whether the writer goes on without this reader: it may have filled the slot again that was read."""
        memory_fence()  # after what was read
        return bool(self._flags[self._index * self._row_bytes + self._flag])

    def taken(self, published_ns: int, /) -> None:
        """Note when the message was published that has just been taken, and how long that is ago."""
        if not 0 <= published_ns < 1 << 64:
            raise OverflowError("no clock shows this")
        self.check_open()
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
        self.budget: int = self.budget - 1 if now < self.budget_ends_ns and self.budget > 1 else 0
        if self.release():
            self._notify()

    def _decode(self) -> Any:
        """Decode the next message, which is there and stays where it is; `SLOW_PATH` if it is no ordinary one."""
        message: Any = self._copy_plain()
        code, arg = self._code, message
        if message is None:
            if self._beside is None:
                return SLOW_PATH
            code, arg = self._beside, self._first + self._index * self._stride
        elif self._raw:
            return message
        self.in_use += 1
        try:
            return code(arg)
        finally:
            self.in_use -= 1

    def receive(self) -> Any:
        """Take the next message, if this thread may receive now; else `EMPTY`."""
        if not self._lets_pass(get_ident()):
            return EMPTY
        return self._take_if_there()

    def receive_into(self, messages: list[Any], /) -> Any:
        """Append the next message to a list, whoever may receive; return None, `EMPTY` or `SLOW_PATH`.

        The native one is a single call, in which no handler of a signal runs once the message is taken.
        """
        if type(messages) is not list:
            raise TypeError("receive_into() takes a list")
        self.check_unused()
        obj = self._take_if_there()
        if obj is EMPTY or obj is SLOW_PATH:
            return obj
        messages.append(obj)
        return None

    def receive_next(self, messages: list[Any], /) -> Any:
        """As `receive_into`, where the end is open and no other thread holds the lock; else return `EMPTY`."""
        before = self._acquire() if self.open else None
        if before is None:
            return EMPTY
        try:
            return self.receive_into(messages)
        finally:
            self._release(before)

    def _take_if_there(self) -> Any:
        # Slots go back in order.
        if self.kept or (not self._may_go_on() and (self.spin_ns <= 0 or not self.spin(self.spin_ns))):
            return EMPTY
        return self.take()

    def take_many(self, most: int, /) -> list[Any]:
        """Return the next messages with one fence: at most so many, at most for the rest of the turn.

        It ends before the first one that is not an ordinary one, and before one that cannot be decoded; if that is
        the first, its error is raised and the next call returns the one behind it.
        """
        self.check_unused()
        batch: list[Any] = []
        failure: BaseException | None = None
        self.in_use += 1
        try:
            while len(batch) < most and self.ready():
                message: Any = self._copy_plain()
                if message is None:
                    break
                try:
                    obj = message if self._raw else self._code(message)
                except BaseException as error:
                    if isinstance(error, Exception) and batch:
                        break  # it is the next call's, which meets the same message again
                    self.damaged = isinstance(error, Exception) and self._fails_again()
                    if self.damaged and self.was_evicted():
                        break
                    failure = error
                    if self.damaged:
                        self._finish()
                    break
                if self.was_evicted():
                    break
                batch.append(obj)
                self._finish()
                if len(batch) % BATCH_LOOKS == 0:
                    self._note_latency(now := monotonic_ns())
                    if now >= self.budget_ends_ns:
                        break
        finally:
            self.in_use -= 1
        now = monotonic_ns()
        if len(batch) % BATCH_LOOKS:
            self._note_latency(now)
        self._spend(len(batch), now)
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
        self.check_unused()
        self._note_trace()

    def _note_trace(self) -> None:
        if self._trace_at and not self._book.is_noted(self.seq):
            self._book.note(self.seq, self._checked_trace(self._read_trace()))

    def _note_taken(self) -> None:
        """Count the bytes of the next message, and note its trace context: it is finished with, or nearly."""
        self._bytes_read[0] = (self._bytes_read[0] + self._read_size()) & _ALL
        self._note_trace()

    def _read_size(self) -> int:
        start = self._first + self._index * self._stride
        overflows = self._view[start] == at.OVERFLOW_KIND
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
    """The calls of an awaited queue, which ask a core first.

    The native ones return a coroutine that takes no frame unless it has to wait.

    Args:
        slow_path: Makes the coroutine that continues where the core could not. Its arguments are the core's answer, its
            exception, or None without a core, and then those of `enqueue` or `dequeue`.

    Attributes:
        core: The core that is asked first; None: there is none, or it is of another make.
    """

    def __init__(self, slow_path: Callable[..., Coroutine[Any, Any, Any]], /) -> None:
        self._slow_path = slow_path
        self.core: WriterBase | ReaderBase | None = None

    async def enqueue(self, obj: Any, timeout: float | None = None) -> None:
        """Send an object to every reader; see `aioshm.MessageQueue.enqueue`."""
        outcome = None
        if isinstance(self.core, WriterBase):
            try:
                outcome = self.core.send(obj)
            except Exception as error:
                outcome = error
            if outcome is None:
                return
        await self._slow_path(outcome, obj, timeout)

    async def dequeue(self, timeout: float | None = None, cancel: Any = None, indefinite: bool = False) -> Any:
        """Receive the next message; see `aioshm.MessageQueue.dequeue`."""
        outcome = None
        if isinstance(self.core, ReaderBase):
            try:
                obj = outcome = self.core.receive()
            except Exception as error:
                obj = SLOW_PATH
                outcome = error
            if obj is not EMPTY and obj is not SLOW_PATH:
                return obj
        return await self._slow_path(outcome, timeout, cancel, indefinite)


class OrderedWriterBase(WriterBase):
    """The writer's end where the processor reorders stores: the same steps with fences between them."""

    def _note(self, number: int) -> None:
        memory_fence()  # seen as not written before anything in it changes, which every reader has finished with
        super()._note(number)

    def _clear_flags(self, row: int) -> None:
        memory_fence()
        super()._clear_flags(row)
        memory_fence()  # the written flag becomes visible after what it announces, the cleared flags included


class OrderedReaderBase(ReaderBase):
    """A reader's end where the processor reorders loads: the same steps with fences between them."""

    def ready(self) -> bool:
        there = super().ready()
        memory_fence()  # the body is read only after the written flag was seen
        return there

    def _copy_plain(self) -> bytes | None:
        memory_fence()
        return super()._copy_plain()

    def _finish(self) -> None:
        memory_fence()  # the slot is given back only after the body was read
        super()._finish()
