"""The hot calls of both ends in Python: the specification of the C code, and its substitute."""

from __future__ import annotations

import os
import platform
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from threading import Lock, get_ident
from time import monotonic_ns
from typing import Any, Final

from aioshm.errors import CODE_ERRORS
from aioshm.ring import layout as at
from aioshm.ring.layout import Pool, Sizes, chunk_at
from aioshm.ring.record import NO_MESSAGE, ReaderRecord, WriterRecord

EMPTY: Final[Any] = object()  # there is no message, or this thread may not receive now
SLOW_PATH: Final[Any] = object()  # there is a message, but not an ordinary one: the caller has to look at the slot

DECODINGS = 3  # a message that fails to decode this often is damaged
COPY_MAX = 65536  # larger messages are decoded where they lie
BATCH_LOOKS = 8  # between two readings of the clock
RUSH_NS = 20_000  # between two messages: they come in quick succession
HELD_SPIN_NS = 50_000  # during a longer spin the ring can neither be closed nor used

_ALL = (1 << 64) - 1
_HEAD = struct.Struct("<4Q")  # of a slot's header: kind, sequence number, time of publishing, bytes
_WORDS = struct.Struct("<5Q")  # then the chunk
_WORD = struct.Struct("<Q")

STRONG_ORDER = platform.machine().lower() in {"x86_64", "amd64", "i686", "i386", "x86"}
"""Whether stores stay in order among themselves, and loads among themselves."""


def memory_fence() -> None:
    """Full memory fence, by a lock (platform notes: memory ordering; `cores.FULL_FENCE`)."""
    lock = Lock()  # a new one: the exception of a signal handler may leave it taken
    with lock:
        pass
    if not STRONG_ORDER:
        with lock:
            pass


class _End(ABC):
    """The part that both ends share: who may use it, spinning, memory."""

    reorders: bool = not STRONG_ORDER  # whether loads and stores need fences between them

    def __init__(self, sizes: Sizes, pools: tuple[Pool, ...], view: memoryview, line: int, parked: memoryview) -> None:
        if not sizes.slots or len(view) < sizes.total_bytes:
            raise ValueError("the memory is smaller than the layout says, or is misaligned")
        if view.readonly:
            raise BufferError("the memory is read-only")
        self.open: bool = False  # whether `send` and `receive` pass
        self.seq: int = 0  # of the next message
        self.published_ns: int = 0  # when the latest message was published
        self.budget: int = 0  # messages that may pass before the event loop runs
        self.budget_ends_ns: int = 0  # when the event loop runs at the latest
        self.in_use: int = 0  # calls that run code of others, which must not close the memory or call again
        self.spin_ns: int = 0  # how long `send` and `receive` spin where they cannot continue
        self.spin_yields: bool = False  # whether a spin yields its CPU between two polls
        self.spins: int = 0
        self.hits: int = 0  # spins that ended with success
        self.spun_ns: int = 0
        self.copied: int = 0  # bytes copied into messages, or out of leased ones
        self.bind(bytes, 0, False, None)
        self.bind_out_of_band(None)
        self._thread = -1
        self._runs: Callable[[], object] | None = bool
        self._lock: Any = None
        self._sizes = sizes
        self._pools = pools
        self._closed = False
        self._view = view[:]
        self._flags = view[sizes.metadata_offset : sizes.total_bytes]
        self._row_bytes = 1 + sizes.n_reader
        self._own = view[line : line + at.LINE]
        self._count = self._own.cast("Q")  # and the other words of the line
        self._parked = parked
        self._views = [self._view, self._flags, self._count, self._own, parked]  # to be released

    def bind(self, code: Callable[[Any], Any], what: int, raw: bool, on_parked: Callable[[], object] | None, /) -> None:
        """Set the codec, the header word of its messages, whether bytes are sent unencoded, and how to wake a peer."""
        if not 0 <= what < 1 << 64:
            raise OverflowError("what must fit a word of the header")
        self._code, self._what, self._raw, self._on_parked = code, what, raw, on_parked

    def bind_out_of_band(self, code: Callable[..., Any] | None, measure: Callable[[Any], int] | None = None, /) -> None:
        """Set the functions that write or read a message with out-of-band buffers, and count its bytes."""
        self._out_of_band: Any = code
        self._measure: Any = measure

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
        if self._lock is None:
            return 0
        before: int = self._lock.owner
        if before not in (0, get_ident()):
            return None
        self._lock.owner = get_ident()
        return before

    def _release(self, before: int) -> None:
        if self._lock is not None:
            self._lock.owner = before or self._lock.next_owner

    def passes(self) -> bool:
        """Return whether this thread may send or receive now."""
        if not (self.open and self.budget > 0 and not self.in_use):
            return False
        return self._runs is None or (get_ident() == self._thread and bool(self._runs()))

    def spin(self, budget_ns: int, /) -> bool:
        """Spin for at most so many nanoseconds; return whether this end may continue. A long spin releases the GIL."""
        if self.ready():
            return True
        releases = budget_ns > HELD_SPIN_NS or self.spin_yields
        self.in_use += releases
        self._own[at.SPINNING] = 1
        self.spins += 1
        hit = False
        began = now = monotonic_ns()
        try:
            while not hit and now - began < budget_ns:
                hit = any(self.ready() for _ in range(BATCH_LOOKS))
                if not hit and self.spin_yields:
                    os.sched_yield()
                now = monotonic_ns()
        finally:
            self._own[at.SPINNING] = 0
            self.in_use -= releases
            self.hits += hit
            self.spun_ns += now - began
        return hit

    def close(self) -> None:
        """Release every view of the shared memory; `BufferError` inside of a batch. Idempotent."""
        if self.in_use:
            raise BufferError("the ring is in use")
        self.open = False
        self._closed = True
        for view in self._views:
            view.release()

    @abstractmethod
    def ready(self) -> bool:
        """Return whether this end's message or free slot is there."""

    def _order(self) -> None:
        if self.reorders:
            memory_fence()

    def _peer_parked(self) -> bool:
        """Return whether the peer, or a reader that counts, has to be woken."""
        memory_fence()
        return any(self._parked)

    def check_open(self) -> None:
        if self._closed:
            raise ValueError("the ring was closed")

    def check_unused(self) -> None:
        """Raise if the ring was closed, or is in use: by a spin of another thread, or a call whose codec calls this."""
        self.check_open()
        if self.in_use:
            raise RuntimeError("the ring is in use: this was called from inside of a batch")

    @property
    def _index(self) -> int:
        return self.seq % self._sizes.slots

    def _slot(self) -> int:
        """Return the offset of the next message's slot."""
        return self._sizes.header_bytes + self._index * self._sizes.slot_bytes

    def _add(self, offset: int, amount: int) -> None:
        """Add to a word of this end's line."""
        self._count[offset // 8] = (self._count[offset // 8] + amount) & _ALL

    def _advance(self) -> None:
        self.seq = self._count[0] = self.seq + 1

    def _spend(self, messages: int, now_ns: int) -> None:
        self.budget = self.budget - messages if now_ns < self.budget_ends_ns and messages < self.budget else 0

    def _wake_peer(self) -> None:
        if not self._peer_parked() or self._on_parked is None:
            return
        try:
            self._on_parked()
        except BaseException as error:  # whatever it is, the message has passed
            _Unraisable(error)


class _Unraisable:
    """Lets Python report an error that cannot be raised, as it reports those of ``__del__``."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __del__(self) -> None:
        raise self._error


class WriterBase(_End):
    """The hot calls of a writer's end: claim a slot and publish it; or encode, claim and publish in one call."""

    published_ns: int
    in_use: int
    copied: int

    def __init__(self, sizes: Sizes, pools: tuple[Pool, ...], view: memoryview, record: bytearray, /) -> None:
        parked = view[at.READERS_PARKED : at.READERS_PARKED + sizes.n_reader]
        super().__init__(sizes, pools, view, at.WRITER_LINE, parked)
        self._record = WriterRecord(sizes, pools, record)
        self._ones = memoryview(bytes([1]) * self._row_bytes)
        self.claimed_bytes: int = 0  # of the message that the claimed slot is for
        self.awaited: int = NO_MESSAGE  # the message that all read before a spin ends; NO_MESSAGE: the next slot's

    def _peer_parked(self) -> bool:
        memory_fence()
        return any(self._parked[: self._record.places])

    def finished(self, message: int, /) -> bool:
        """Return whether all have read a message, or its slot has another one."""
        return message + self._sizes.slots < self.seq or self._is_free(message % self._sizes.slots)

    def claim_slot(self, nbytes: int, /) -> bool:
        """Claim the next slot for so many bytes; return False while a reader has it, or every such chunk."""
        self.check_unused()
        return self._claim(nbytes)

    def commit(self) -> bool:
        """Publish the claimed slot; return whether a reader is parked and has to be woken."""
        self.check_unused()
        self._publish()
        return self._peer_parked()

    def put(self, message: Any, /) -> bool:
        """Publish what encoding returned; return False if it is no ordinary message, or there is no room."""
        self.check_unused()
        if type(message) is not bytes:
            return self._put_out_of_band(message)
        if not self._claim_spinning(len(message)):
            return False
        self.published_ns = now = monotonic_ns()
        self._fill(message, now)
        self._publish()
        self._spend(1, now)
        self._wake_peer()
        return True

    def put_many(self, messages: list[Any], start: int, /) -> int:
        """Publish messages of a list from ``start`` on, while they are ordinary and find room; return how many."""
        if type(messages) is not list:
            raise TypeError("put_many() takes a list and where to begin")
        self.check_unused()
        if start < 0:
            raise ValueError("put_many() cannot begin before the list does")
        now = monotonic_ns()
        amount = 0
        for message in messages[start:]:
            if type(message) is not bytes or len(message) > self._sizes.max_chunk_bytes:
                break
            if not self._claim(len(message)):
                break
            self._fill(message, now)
            self._publish()
            amount += 1
        if amount:
            self.published_ns = now
            self._spend(amount, monotonic_ns())
            self._wake_peer()
        return amount

    def send(self, obj: Any, /) -> Any:
        """Encode and publish an object; return None, False if this thread may not send now, or the unsent message."""
        before = self._acquire() if self.passes() else None
        if before is None:
            return False
        try:
            message = obj if self._raw and type(obj) is bytes else self._code(obj)
            if type(message) is not bytes and self._out_of_band is None:
                return message
            return None if self.put(message) else message
        finally:
            self._release(before)

    def _put_out_of_band(self, message: Any) -> bool:
        """Publish a message that is not bytes; return False if it is no ordinary one, or no slot is free."""
        if self._out_of_band is None:
            raise TypeError("put() takes bytes")
        nbytes = self._measure(message)
        self.check_unused()
        if not self._claim_spinning(nbytes):
            return False
        self.in_use += 1
        try:
            if self._out_of_band(self._slot(), message, self.seq) is not True:
                return False
        finally:
            self.in_use -= 1
        self.published_ns = _WORDS.unpack_from(self._view, self._slot())[2]
        self.copied += nbytes
        self._publish()
        self._spend(1, monotonic_ns())
        self._wake_peer()
        return True

    # Claiming

    def _claim(self, nbytes: int) -> bool:
        """Take the next slot, and a chunk if need be; note in its header which."""
        if nbytes < 0:
            raise OverflowError("no message has fewer than 0 bytes")
        record, view, start = self._record, self._view, self._slot()
        record.claimed = None
        if not self._is_free(self._index):
            return False
        number = 0
        if nbytes > self._sizes.inline_bytes:
            chunks = record.chunks_for(nbytes)
            chunks.reclaim(self.finished)
            if not chunks.n_usable:
                return False  # `WriterControl.blocker` allocates memory for a chunk that has none
            record.claimed = chunks
            number = 1 + chunks.top
        place = chunk_at(self._pools, number - 1)
        self._flags[self._index * self._row_bytes] = 0
        self._order()  # seen as not written before anything in it changes, which every reader has finished with
        self.claimed_bytes = nbytes
        _WORD.pack_into(view, start + _WORD.size, self.seq)
        _WORD.pack_into(view, start + at.CHUNK, number)
        self._body = start + at.SLOT_HEADER_BYTES
        if place is not None:
            _WORD.pack_into(view, place[0], self.seq + 1)
            self._body = place[0] + at.CHUNK_HEADER_BYTES
        return True

    def _claim_spinning(self, nbytes: int) -> bool:
        """Claim the next slot, after a spin if need be; return False if there is no room, now or ever."""
        if nbytes > self._sizes.max_chunk_bytes:
            return False
        if self._claim(nbytes):
            return True
        if self.spin_ns <= 0:
            return False
        if nbytes > self._sizes.inline_bytes and not (chunks := self._record.chunks_for(nbytes)).n_free:
            self.awaited = chunks.message(0)  # the slot is free by then if it is not now: it is an older message's
        try:
            return self.spin(self.spin_ns) and self._claim(nbytes)
        finally:
            self.awaited = NO_MESSAGE

    def _fill(self, message: bytes, now_ns: int) -> None:
        size = len(message)
        _HEAD.pack_into(self._view, self._slot(), self._what, self.seq, now_ns, size)
        self._view[self._body : self._body + size] = message
        self.copied += size

    def _is_free(self, index: int) -> bool:
        row, amount = index * self._row_bytes, 1 + self._record.places
        return self._flags[row : row + amount] == self._ones[:amount] or not self._flags[row]

    def ready(self) -> bool:
        """Return whether the slot that this end waits for is free."""
        return self._is_free(self._index) if self.awaited == NO_MESSAGE else self.finished(self.awaited)

    def _publish(self) -> None:
        record, start, row = self._record, self._slot(), self._index * self._row_bytes
        overflows = self._view[start] == at.OVERFLOW_KIND
        if not overflows:  # an overflow message's marker has its size
            _WORD.pack_into(self._view, start + at.SIZE, self.claimed_bytes)
        if self._sizes.trace_at:
            trace = start + self._sizes.trace_at
            self._view[trace : trace + at.TRACE_BYTES] = record.trace
        self._order()
        self._flags[row + 1 : row + 1 + record.places] = record.unread[: record.places]
        self._order()  # the written flag becomes visible after what it announces, the cleared flags included
        if record.claimed is not None:
            record.claimed.take(self.seq)
            record.claimed = None
        self._flags[row] = 1  # last: readers may look the moment this is visible
        self._add(at.BYTES, self.claimed_bytes)
        if overflows:
            self._add(at.OVERFLOWS, 1)
        self._advance()


class ReaderBase(_End):
    """The hot calls of a reader's end: decode the next message and finish with its slot; or both by hand."""

    published_ns: int
    in_use: int

    def __init__(
        self,
        sizes: Sizes,
        pools: tuple[Pool, ...],
        view: memoryview,
        record: bytearray,
        reader: int,
        line: int,
        histogram: int,
        /,
    ) -> None:
        super().__init__(sizes, pools, view, line, view[at.WRITER_PARKED : at.WRITER_PARKED + 1])
        self._record = ReaderRecord(sizes, record)
        self._flag = 1 + reader
        self.kept: bool = False  # whether a slot was skipped and has not been given back
        self.garbled: int = 0  # messages with an invalid trace context
        self.damaged: bool = False  # whether the message that could not be decoded was finished with
        self._finished_ns = 0
        with view[histogram : histogram + 8 * at.LATENCY_BUCKETS] as part:
            self._latencies = part.cast("Q")
        self._views.append(self._latencies)

    def release(self) -> bool:
        """Finish with the slot; return whether the writer is parked and has to be woken."""
        self.check_unused()
        self._finish()
        return self._peer_parked()

    def start_at(self, seq: int, /) -> None:
        """Continue at a message, whatever lies before it."""
        self.check_unused()
        if not 0 <= seq < 1 << 64:
            raise OverflowError("no message has this number")
        self.seq = self._count[0] = seq

    def skip(self) -> None:
        """Continue with the next message, but keep the slot, until `ReaderControl.give_back`."""
        self.check_unused()
        self._note_taken()
        self._advance()
        self.kept = True

    def take(self) -> Any:
        """Return the next message, `EMPTY`, or `SLOW_PATH`; finish with the message, also if it cannot be decoded."""
        self.check_unused()
        if not self.ready():
            return EMPTY
        try:
            obj = self._decode()
        except Exception:
            fails = self._fails_again()
            if fails and self.was_evicted():
                return EMPTY
            self.damaged = fails
            if fails:
                self._finish_and_wake(took=False)
            raise  # a signal handler may have raised: the next call returns the same message
        if obj is SLOW_PATH:
            return obj
        if self.was_evicted():
            return EMPTY
        self._finish_and_wake(took=True)
        return obj

    def receive(self) -> Any:
        """Take the next message, if this thread may receive now; else `EMPTY`."""
        return self._take_if_there() if self.passes() else EMPTY

    def receive_into(self, messages: list[Any], /) -> Any:
        """Append the next message to a list, whoever may receive; return None, `EMPTY` or `SLOW_PATH`."""
        if type(messages) is not list:
            raise TypeError("receive_into() takes a list")
        self.check_unused()
        obj = self._take_if_there()
        if obj is EMPTY or obj is SLOW_PATH:
            return obj
        messages.append(obj)
        return None

    def receive_next(self, messages: list[Any], /) -> Any:
        """Do as `receive_into` where the end is open and no other thread holds the lock; else return `EMPTY`."""
        before = self._acquire() if self.open else None
        if before is None:
            return EMPTY
        try:
            return self.receive_into(messages)
        finally:
            self._release(before)

    def take_many(self, most: int, /) -> list[Any]:
        """Return at most ``most`` of the next messages, with one fence, until the budget or what is ordinary ends."""
        self.check_unused()
        batch: list[Any] = []
        self.in_use += 1
        try:
            while len(batch) < most and self.ready():
                message: Any = self._copy_plain()
                if message is None:
                    break
                try:
                    obj = message if self._raw else self._load(message)
                except Exception:
                    if batch:
                        break  # the next call meets the same message again
                    fails = self._fails_again()
                    if fails and self.was_evicted():
                        break
                    self.damaged = fails
                    if fails:
                        self._finish()
                    raise
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
            self._wake_peer()
        return batch

    def _take_if_there(self) -> Any:
        if self.kept:  # slots go back in order
            return EMPTY
        if self.spin_ns > 0:
            self.spin(self.spin_ns)
        return self.take()

    def _decode(self) -> Any:
        """Decode the next message, which stays where it is; `SLOW_PATH` if it is no ordinary one."""
        message: Any = self._copy_plain()
        if message is not None and self._raw:
            return message
        if message is None and self._out_of_band is None:
            return SLOW_PATH
        self.in_use += 1
        try:
            return self._out_of_band(self._slot()) if message is None else self._load(message)
        finally:
            self.in_use -= 1

    def _load(self, message: bytes) -> Any:
        """Decode a message. A `CancelledError` of the message's own code becomes another error."""
        try:
            return self._code(message)
        except CODE_ERRORS as error:
            if isinstance(error, Exception):
                raise
            raise RuntimeError(repr(error)) from error

    def _copy_plain(self) -> bytes | None:
        view, start, room = self._view, self._slot(), self._sizes.inline_bytes
        what, seq, at_ns, size, number = _WORDS.unpack_from(view, start)
        if what != self._what or seq != self.seq or size > COPY_MAX:
            return None
        if number:
            place = chunk_at(self._pools, number - 1)
            if place is None or _WORD.unpack_from(view, place[0])[0] != seq + 1:
                return None
            start, room = place
        if size > room:
            return None
        self.published_ns = at_ns
        start += at.SLOT_HEADER_BYTES  # as many as a chunk's header has
        message = bytes(view[start : start + size])
        return None if self.was_evicted() else message  # a torn message is not to be decoded

    def _fails_again(self) -> bool:
        """Return whether the next message cannot be decoded: an error of a signal handler does not recur."""
        for _ in range(DECODINGS - 1):
            with suppress(Exception):
                self._decode()
                return False
        return True

    def was_evicted(self) -> bool:
        """Return whether the writer did not wait for this reader: it may have refilled the slot that was read."""
        memory_fence()  # after what was read
        passed_over: bool = self._flags[self._index * self._row_bytes + self._flag] != 0
        self._order()  # whoever sees the flag cleared for a later message sees that message's number, too
        return passed_over or _HEAD.unpack_from(self._view, self._slot())[1] != self.seq

    def ready(self) -> bool:
        # In this order: a slot that is cleared already and still written, from the lap before, is being published.
        flags, row = self._flags, self._index * self._row_bytes
        there = not flags[row + self._flag] and flags[row] != 0
        self._order()  # the body is read only after the written flag was seen
        return there

    def _finish_and_wake(self, *, took: bool) -> None:
        now = monotonic_ns()
        rushes = now - self._finished_ns < RUSH_NS  # then only some latencies are counted
        self._finished_ns = now
        if took and (not rushes or self.seq % at.LATENCY_EVERY == 0):
            self._note_latency(now)
        self._spend(1, now)
        self._finish()
        self._wake_peer()

    def _finish(self) -> None:
        self._order()  # the slot is given back only after the body was read
        self._note_taken()
        self._flags[self._index * self._row_bytes + self._flag] = 1
        self._advance()

    def taken(self, published_ns: int, /) -> None:
        """Note when the message was published that has just been taken, and count its latency."""
        self.check_open()
        self.published_ns = published_ns
        self._note_latency(monotonic_ns())

    def _note_latency(self, now_ns: int) -> None:
        latency = (now_ns - self.published_ns) & _ALL
        if latency > _ALL >> 1:  # published after now: damage
            latency = 0
        bucket = min(max(latency.bit_length() - at.LATENCY_FIRST_BIT, 0), at.LATENCY_BUCKETS - 1)
        self._latencies[bucket] = (self._latencies[bucket] + 1) & _ALL
        self._add(at.LATENCY_NS, latency)

    def note_trace(self) -> None:
        """Note the trace context of the next message, once."""
        if not self._sizes.trace_at or self._record.is_noted(self.seq):
            return
        trace = self._read_trace()
        is_there, _, trace_id, span_id = at.TRACE.unpack(trace)
        if not (is_there == 1 and any(trace_id) and any(span_id)):
            self.garbled += is_there != 0
            trace = bytes(at.TRACE_BYTES)
        self._record.note(self.seq, trace)

    def _note_taken(self) -> None:
        """Count the bytes of the next message, and note its trace context: the reader is done with it, or nearly."""
        self._add(at.BYTES, self._read_size())
        self.note_trace()

    def _read_size(self) -> int:
        start = self._slot()
        start += at.OVERFLOW_SIZE if self._view[start] == at.OVERFLOW_KIND else at.SIZE
        return int(_WORD.unpack_from(self._view, start)[0])

    def _read_trace(self) -> bytes:
        start = self._slot() + self._sizes.trace_at
        return bytes(self._view[start : start + at.TRACE_BYTES])
