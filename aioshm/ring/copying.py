"""The core of a reader that the writer does not wait for: copies a message, then checks the copy.

The reader's flags are the writer's: when the writer needs a slot, it sets the flag on the reader's
behalf (it *passes over* the message), so both never store to one byte. A copy is whole if
afterwards the slot's written flag is up, the reader's flag is down, and the sequence number is the
same; else the message is lost. Python only, for slow readers.
"""

from __future__ import annotations

import struct
from typing import Any

from aioshm.ring import layout as at
from aioshm.ring import reference
from aioshm.ring.cores import EMPTY, SLOW_PATH, ReaderControl, memory_fence
from aioshm.ring.layout import Layout
from aioshm.ring.slot import Slot, Slots

_SEQ = struct.Struct("<Q")
_SEQ_AT = 8  # in a slot's header


class CopyingCore(ReaderControl, reference.ReaderBase):
    """A reader's end that copies; `SLOW_PATH` also means that the next message is lost, which `lose` finds out."""

    copies = True

    def __init__(self, layout: Layout, view: memoryview, slots: Slots, reader: int, /) -> None:
        super().__init__(layout, view, slots, reader)
        with view[at.WRITER_LINE : at.WRITER_LINE + at.LINE].cast("Q") as words:
            self._written = words[at.COUNT : at.COUNT + 1]
        self._views.append(self._written)
        self._lost_at = -1
        self._staged = bytes(at.TRACE_BYTES), 0

    @property
    def slot(self) -> Slot:
        """The slot of the next message."""
        return self._slots[self._index]

    def intact(self) -> bool:
        """Return whether the next message is whole, and so is whatever was copied of it before."""
        return self._is_intact(self.slot, self.seq)

    def lose(self) -> tuple[int, int]:
        """Skip to the oldest message, or halfway if none was read since; return the lost range."""
        first, written, slots, amount = self.seq, self._written[0], self._slots, self._amount
        seq = max(first + 1, written - amount)
        while seq < written and not self._is_intact(slots[seq % amount], seq):
            seq += 1
        if first == self._lost_at:
            seq = max(seq, (seq + written) // 2)
        self.seq = self._count[0] = self._lost_at = seq
        return first, seq - 1

    def was_evicted(self) -> bool:
        """Return False: the writer never waits for this reader."""
        return False

    # As `ReaderCore`

    def peek(self) -> Slot | None:
        self.check_unused()
        return self.slot if self.ready() else None

    def release(self) -> bool:
        """Finish with the message; the writer never waits for it."""
        self.check_unused()
        self._finish()
        return False

    def take(self) -> Any:
        obj = super().take()
        return EMPTY if obj is reference.EMPTY else SLOW_PATH if obj is reference.SLOW_PATH else obj

    def receive(self) -> Any:
        obj = super().receive()
        return EMPTY if obj is reference.EMPTY else obj

    def _wake_peer(self) -> None: ...

    def stage(self) -> None:
        """Copy trace context and size of the next message, before `intact` checks the copy."""
        self._staged = super()._read_trace() if self._sizes.trace_at else b"", super()._read_size()

    def _read_trace(self) -> bytes:
        return self._staged[0]

    def _read_size(self) -> int:
        return self._staged[1]

    def _copy_plain(self) -> bytes | None:
        message = super()._copy_plain()
        self.stage()
        return message if message is not None and self.intact() else None

    def ready(self) -> bool:
        return self._written[0] > self.seq

    def _finish(self) -> None:
        self._note_taken()
        self._advance()

    def _is_intact(self, slot: Slot, seq: int) -> bool:
        memory_fence()  # the copy was made before this looks
        flags = slot.flags
        return bool(flags[0] and not flags[self._flag]) and _SEQ.unpack_from(slot.header, _SEQ_AT)[0] == seq
