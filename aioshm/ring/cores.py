"""The cores of a ring's ends: rare calls in Python, on top of hot calls in C or Python."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from aioshm.config import native_wanted
from aioshm.ring import layout as at
from aioshm.ring import reference
from aioshm.ring.layout import Layout, chunk_at
from aioshm.ring.record import NO_MESSAGE, Chunks, ReaderRecord, WriterRecord
from aioshm.ring.reference import STRONG_ORDER
from aioshm.ring.slot import Slot, Slots

__all__ = [
    "EMPTY",
    "FULL_FENCE",
    "RECHECK_S",
    "SLOW_PATH",
    "STRONG_ORDER",
    "Calls",
    "CopyingCore",
    "ReaderBase",
    "ReaderCore",
    "WriterBase",
    "WriterCore",
    "memory_fence",
    "native_core",
]

RECHECK_S = 0.005
"""How long a parked end sleeps at most where there is no `FULL_FENCE`."""

_WORD = 8  # bytes
_SEQ_AT = 8  # of the sequence number, in a slot's header


native_core: bool = False
if native_wanted():
    with suppress(ImportError):  # it was not built: no compiler, or not for this machine
        importlib.import_module("aioshm.ring._native")
        native_core = True
"""Whether the native core runs."""

FULL_FENCE = native_core or STRONG_ORDER
"""Whether `memory_fence` is a full one, so that no wake-up can be lost."""

if TYPE_CHECKING:
    from aioshm.ring.reference import EMPTY, SLOW_PATH, ReaderBase, WriterBase, memory_fence
elif native_core:
    from aioshm.ring._native import EMPTY, SLOW_PATH, ReaderBase, WriterBase, memory_fence
else:
    from aioshm.ring.reference import EMPTY, SLOW_PATH, ReaderBase, WriterBase, memory_fence

if TYPE_CHECKING:
    _ReaderBase = ReaderBase
    _WriterBase = WriterBase
else:
    _ReaderBase = _WriterBase = object


class WriterControl(_WriterBase):
    """The rare calls of a writer's core: room, memory for chunks, eviction and admission."""

    # A writer receives no trace contexts.
    garbled: int = 0
    in_use: int
    awaited: int

    def __init__(self, layout: Layout, view: memoryview, slots: Slots, /) -> None:
        if len(slots) != layout.slots:
            raise TypeError("slots must be all slots, by index")
        self._slots = slots
        self._layout = layout
        self._record = WriterRecord(layout.sizes, layout.pools)
        self._allocate: Callable[[int, int], object] | None = None
        super().__init__(layout.sizes, layout.pools, view, self._record.memory)

    # Slots and trace contexts

    def claim(self, nbytes: int = 0, /) -> Slot | None:
        """Claim the next slot for ``nbytes``, and a chunk if a slot is too small; return None if there is no room."""
        if not self.claim_slot(nbytes):
            return None
        return self._slots[self.seq % self._layout.slots]

    @property
    def trace(self) -> bytes:
        """The trace context of the next message, where slots have room for one."""
        return bytes(self._record.trace)

    @trace.setter
    def trace(self, trace: bytes) -> None:
        if type(trace) is not bytes:
            raise TypeError("a trace context is bytes")
        if len(trace) != at.TRACE_BYTES:
            raise ValueError(f"a trace context has {at.TRACE_BYTES} bytes")
        self._record.trace[:] = trace

    # Room

    def free(self, slots: int = 1, large: Sequence[int] = (), /) -> bool:
        """Return whether there is room for messages; ``large``: the sizes of those that need a chunk."""
        return self.blocker(slots, large) < 0

    def blocker(self, slots: int = 1, large: Sequence[int] = (), /) -> int:
        """Return the message that all readers must read before `free` is true; -1: there is room."""
        wanted: dict[Chunks, int] = {}
        for nbytes in large:
            chunks = self._record.chunks_for(nbytes)
            wanted[chunks] = wanted.get(chunks, 0) + 1
        amount = self._layout.slots
        if not 1 <= slots <= amount:
            raise ValueError(f"a ring of {amount} slots cannot have {slots} of them free")
        # The message now in the last of these slots. In the first lap the slot is unused, so free unless damaged.
        last = self.seq + slots - 1
        message = last
        if last >= amount:
            message -= amount
        blocker = message
        if self.finished(message):
            blocker = -1
        for chunks, number in wanted.items():
            blocker = max(blocker, self._chunk_blocker(chunks, number))
        return blocker

    def _chunk_blocker(self, chunks: Chunks, wanted: int) -> int:
        """Return the message that all must read before ``wanted`` chunks are free; -1: they are free and allocated."""
        pool = chunks.pool
        if wanted > pool.chunks:
            size = f"{pool.chunks} chunks of {pool.room} bytes"
            raise ValueError(f"a ring of {size} cannot have {wanted} of them free")
        missing = wanted - chunks.n_free
        if missing > 0 and not all(self.finished(chunks.message(nth)) for nth in range(missing)):
            return chunks.message(missing - 1)
        if chunks.allocated < pool.chunks:
            self._allocate_chunks(chunks, wanted)
        return -1

    def spin_for(self, slots: int = 1, large: Sequence[int] = (), /) -> int:
        """Make busy-waits end when this much room is free; return the result of `blocker`."""
        blocker = self.blocker(slots, large)
        self.awaited = NO_MESSAGE
        if blocker >= 0:
            self.awaited = blocker
        return blocker

    # Memory for the chunks of a named segment

    def bind_allocate(self, allocate: Callable[[int, int], object], /) -> None:
        """Mark all chunks as unallocated; ``allocate`` gets an offset and a size in bytes, and allocates memory."""
        self._allocate = allocate
        for chunks in self._record.chunks:
            chunks.allocated = 0

    def _allocate_chunks(self, chunks: Chunks, wanted: int) -> None:
        """Allocate memory until ``wanted`` free chunks have memory."""
        if self._record.claimed is not chunks:
            chunks.reclaim(self.finished)
        first = chunks.allocated
        last = first + wanted - chunks.n_usable
        if last <= first:
            return
        assert self._allocate is not None
        pool = chunks.pool
        self.in_use += 1
        try:
            self._allocate(pool.start + first * pool.stride, (last - first) * pool.stride)
        finally:
            self.in_use -= 1
        chunks.allocated = max(chunks.allocated, last)

    # Eviction and admission

    def evict(self, reader: int, /) -> None:
        """Evict a reader: it counts as having read every message, past and future."""
        layout = self._layout
        view = self._slots.view
        self.check_open()
        self._check_reader(reader)
        begin = layout.flags(0)
        row = layout.flag_bytes
        flags = view[begin : begin + layout.slots * row]
        flags[1 + reader :: row] = bytes([1]) * layout.slots
        self._record.set_unread(reader, 1)
        view[at.READERS_PARKED + reader] = 0

    def admit(self, reader: int, history: int, gone: Callable[[int], object] | None, /) -> int:
        """Admit a reader; return its first message: at most ``history`` back, and none ``gone`` since."""
        self.check_unused()
        self._check_reader(reader)
        if history < 0:
            raise ValueError("there are no fewer than 0 messages")
        self.in_use += 1
        try:
            first = self._oldest_of(history, gone)
        finally:
            self.in_use -= 1
        slots = self._slots
        for seq in range(self.seq - 1, first - 1, -1):
            self._keep_again(seq)
            slots.flags(seq % self._layout.slots)[1 + reader] = 0
        self._record.set_unread(reader, 0)
        slots.view[at.READERS_PARKED + reader] = 0
        return first

    def _check_reader(self, reader: int) -> None:
        if not 0 <= reader < self._layout.n_reader:
            raise IndexError(f"there is no reader {reader}")

    def _oldest_of(self, history: int, gone: Callable[[int], object] | None) -> int:
        """Return the oldest of the last ``history`` messages from which on the ring still has every message."""
        first = self.seq
        while first > 0 and self.seq - first < min(history, self._layout.slots) and self._has(first - 1, gone):
            first -= 1
        return first

    def _has(self, seq: int, gone: Callable[[int], object] | None) -> bool:
        """Return whether a message is still complete in its slot and chunk."""
        index = seq % self._layout.slots
        kind, found, number = self._header(index)
        if self._slots.flags(index)[0] == 0 or found != seq:
            return False
        if kind == at.OVERFLOW_KIND:  # the body lies in an overflow segment, which ``gone`` knows
            return gone is None or not gone(seq)
        if not number:
            return True
        place = chunk_at(self._layout.pools, number - 1)
        return place is not None and self._word(place[0]) == seq + 1

    def _keep_again(self, seq: int) -> None:
        """Take a message's chunk off the free stack, if the chunk is free."""
        kind, _, number = self._header(seq % self._layout.slots)
        if kind == at.OVERFLOW_KIND or not number:
            return
        record = self._record
        for chunks in record.chunks:
            chunks.keep_again(number - 1, seq, claimed=record.claimed is chunks)

    def _header(self, index: int) -> tuple[int, int, int]:
        """Return a message's kind, its sequence number, and 1 + the number of its chunk (0: no chunk)."""
        begin = self._slots.begin(index)
        return self._slots.view[begin], self._word(begin + _SEQ_AT), self._word(begin + at.CHUNK)

    def _word(self, begin: int) -> int:
        return int.from_bytes(self._slots.view[begin : begin + _WORD], "little")


class WriterCore(WriterControl, WriterBase):
    """The core of a writer: `claim` a slot, fill its header and body, `commit` it; or all of that in one call."""


class ReaderControl(_ReaderBase):
    """The rare calls of a reader's core: peeking at slots, releasing retained slots, trace contexts."""

    def __init__(self, layout: Layout, view: memoryview, slots: Slots, reader: int, /) -> None:
        if not 0 <= reader < layout.n_reader:
            raise IndexError(f"there is no reader {reader}")
        if len(slots) != layout.slots:
            raise TypeError("slots must be all slots, by index")
        self._slots = slots
        self._amount = layout.slots
        self._reader = reader
        self._record = ReaderRecord(layout.sizes)
        super().__init__(
            layout.sizes,
            layout.pools,
            view,
            self._record.memory,
            reader,
            layout.reader_line(reader),
            layout.histogram(reader),
        )

    def peek(self) -> Slot | None:
        """Return the slot of the next message; None: there is no message."""
        self.check_unused()
        if not self.ready():
            return None
        return self._slots[self.seq % self._amount]

    def give_back(self, index: int, /) -> bool:
        """Release a slot that `skip` retained, in order; return whether the writer must be woken."""
        self.check_unused()
        if not 0 <= index < self._amount:
            raise IndexError(f"there is no slot {index}")
        memory_fence()  # the writer may reuse the chunk only after it was read
        self._slots.flags(index)[1 + self._reader] = 1
        self.kept = False
        memory_fence()
        return self._slots.view[at.WRITER_PARKED] != 0

    def traces(self, most: int, /) -> list[bytes]:
        """Return up to ``most`` of the latest trace contexts, the oldest first; zeros: a message without one."""
        if most < 0:
            raise OverflowError("there are no fewer than 0 messages")
        return self._record.latest(most)


class ReaderCore(ReaderControl, ReaderBase):
    """The core of a reader: `peek` at the next message, `release` its slot when done; or both in one call."""


class CopyingCore(ReaderControl, reference.ReaderBase):
    """The core of a reader that the writer does not wait for: copies, then checks the copy.

    The reader's flags belong to the writer, which sets the flag on the reader's behalf when a slot
    is needed (it *passes over* the message). A copy is valid if afterwards the slot is written, the
    reader's flag is clear, and the sequence number is the same. Else `take` returns `SLOW_PATH`,
    and `lose` skips the lost messages.
    """

    copies = True

    def __init__(self, layout: Layout, view: memoryview, slots: Slots, reader: int, /) -> None:
        super().__init__(layout, view, slots, reader)
        with view[at.WRITER_LINE : at.WRITER_LINE + at.LINE].cast("Q") as words:
            self._written = words[at.COUNT : at.COUNT + 1]
        self._views.append(self._written)
        self._lost_at = -1
        self._staged = (bytes(at.TRACE_BYTES), 0)  # trace context and size of the next message

    @property
    def slot(self) -> Slot:
        """The slot of the next message."""
        return self._slots[self._index]

    def intact(self) -> bool:
        """Return whether the next message, and any copy made of it before, is valid."""
        return self._is_intact(self.slot, self.seq)

    def lose(self) -> tuple[int, int]:
        """Skip to the oldest message, or halfway if none was read since; return the lost range."""
        first = self.seq
        written = self._written[0]
        seq = max(first + 1, written - self._amount)
        while seq < written and not self._is_intact(self._slots[seq % self._amount], seq):
            seq += 1
        if first == self._lost_at:
            seq = max(seq, (seq + written) // 2)
        self.seq = seq
        self._count[0] = seq
        self._lost_at = seq
        return first, seq - 1

    def was_evicted(self) -> bool:
        """Return False: the writer never waits for this reader."""
        return False

    # As `ReaderCore`

    def peek(self) -> Slot | None:
        self.check_unused()
        if not self.ready():
            return None
        return self.slot

    def release(self) -> bool:
        """Finish with the message; the writer never waits for it."""
        self.check_unused()
        self._finish()
        return False

    def take(self) -> Any:
        return self._own_markers(super().take())

    def receive(self) -> Any:
        return self._own_markers(super().receive())

    def _own_markers(self, obj: Any) -> Any:
        """Return this module's `EMPTY` and `SLOW_PATH`, which the C core defines, for those of the reference."""
        if obj is reference.EMPTY:
            return EMPTY
        if obj is reference.SLOW_PATH:
            return SLOW_PATH
        return obj

    def _wake_peer(self) -> None:
        """Wake nobody: the writer does not wait for this reader."""

    def stage(self) -> None:
        """Copy trace context and size of the next message, before `intact` checks the copy."""
        trace = b""
        if self._sizes.trace_at:
            trace = super()._read_trace()
        self._staged = (trace, super()._read_size())

    def _read_trace(self) -> bytes:
        return self._staged[0]

    def _read_size(self) -> int:
        return self._staged[1]

    def _copy_plain(self) -> bytes | None:
        message = super()._copy_plain()
        self.stage()
        if message is None or not self.intact():
            return None
        return message

    def ready(self) -> bool:
        return self._written[0] > self.seq

    def _finish(self) -> None:
        self._note_taken()
        self._advance()

    def _is_intact(self, slot: Slot, seq: int) -> bool:
        memory_fence()  # after the copy was made
        flags = slot.flags
        return (
            bool(flags[0] and not flags[self._flag])
            and int.from_bytes(slot.header[_SEQ_AT : _SEQ_AT + _WORD], "little") == seq
        )


# The calls of an awaited queue

Call: TypeAlias = Callable[..., Coroutine[Any, Any, Any]]

if TYPE_CHECKING or not native_core:

    def bind_calls(parts: list[Any], *docs: str) -> tuple[Call, Call]:
        """Return `enqueue` and `dequeue` for the core and the slow path in a list, whose items may be exchanged."""

        async def enqueue(obj: Any, timeout: float | None = None) -> None:
            core, slow_path = parts
            outcome = None
            if isinstance(core, WriterBase):
                try:
                    outcome = core.send(obj)
                except Exception as error:
                    outcome = error
                if outcome is None:
                    return
            await slow_path(outcome, obj, timeout)

        async def dequeue(timeout: float | None = None, cancel: Any = None, indefinite: bool = False) -> Any:
            core, slow_path = parts
            outcome = None
            if isinstance(core, ReaderBase):
                try:
                    obj = outcome = core.receive()
                except Exception as error:
                    obj = EMPTY
                    outcome = error
                if obj is not EMPTY and obj is not SLOW_PATH:
                    return obj
            return await slow_path(outcome, timeout, cancel, indefinite)

        enqueue.__doc__ = docs[0]
        dequeue.__doc__ = docs[1]
        return enqueue, dequeue

else:
    from aioshm.ring._native import bind_calls


class Calls:
    """`enqueue` and `dequeue` of an awaited end: a call of the core, or else ``slow_path``.

    The slow path gets the core's result or error (None: no core), then the arguments of the call.
    """

    docs: ClassVar[tuple[str, str]] = "", ""
    """The docstrings of `enqueue` and `dequeue`."""

    def __init__(self, slow_path: Call) -> None:
        self._parts = [None, slow_path]
        self.enqueue: Call
        self.dequeue: Call
        self.enqueue, self.dequeue = bind_calls(self._parts, *self.docs)

    @property
    def core(self) -> Any:
        """The core that is called first; None: the slow path handles all calls."""
        return self._parts[0]

    @core.setter
    def core(self, core: Any) -> None:
        self._parts[0] = core
