"""Leased chunks of one reader: their windows, and the release of their slots, which may wake the writer.

The slot of a message that is held after its block is retained until the next lease ends, or anything
else is read, or for `RESPITE_S`; longer while a call waits and the writer does not.
"""

from __future__ import annotations

import asyncio

from aioshm.lifeline.dialer import Lifeline
from aioshm.process.loop_thread import shared_loop
from aioshm.queue.state import EndState
from aioshm.ring import RingReader, ShmRingBuffer
from aioshm.ring.window import Windows

RESPITE_S = 0.010
LONGEST_RESPITE_S = 0.16
VIEW_BYTES = 512 * 1024
"""Smaller messages are leased as a copy, which takes no longer than a view and the check whether the view is held."""


class WriterWaker:
    """Wakes the writer once per turn of the loop, or when half of the slots that it needs are free."""

    def __init__(self, state: EndState, ring: RingReader, lifeline: Lifeline, loop: asyncio.AbstractEventLoop) -> None:
        self._state = state
        self._ring = ring
        self._lifeline = lifeline
        self._loop = loop
        self.pending: bool = False  # whether the loop will call `wake`
        self.due: int = 0  # from this message on, the writer is woken at once
        # Whether the ring is unmapped; the reader may continue with another writer.
        self.closed: bool = False

    def slot_is_free(self) -> None:
        """Wake the parked writer now or soon, after a slot was released."""
        seq = self._ring.seq
        if not self.pending:
            self.due = max(0, seq - 1 + self._ring.messages_wanted() // 2)
            if self._state.on_its_thread:
                self._loop.call_soon(self.wake)
            else:  # a thread has received the message
                shared_loop().post(self.wake)
            self.pending = True  # last: a signal handler may interrupt this method
        if seq >= self.due:
            self.wake()

    def wake(self) -> None:
        """Wake the writer if it can continue."""
        self.pending = False  # first: as above
        if not self.closed and not self._state.dismantled and self._ring.writer_can_go_on():
            self._ring.writer_parked[0] = 0  # one wake-up is enough until the writer runs
            try:
                self._lifeline.ring()
            except BaseException:  # as above
                self._ring.writer_parked[0] = 1
                raise


class Leases:
    """Views of chunks, and the slot that is retained for the latest view."""

    def __init__(self, state: EndState, buffer: ShmRingBuffer, ring: RingReader, waker: WriterWaker) -> None:
        self.windows: Windows = Windows(buffer.fd, ring.layout)
        self._may_retain = ring.layout.max_chunks > 2
        self._state = state
        self._ring = ring
        self._waker = waker
        self._retained: tuple[int, int, int] | None = None  # chunk, slot, bytes
        self._retained_at = 0.0
        self._respite_s = RESPITE_S
        self._timer: asyncio.TimerHandle | None = None

    def end(self, chunk: int, index: int, nbytes: int) -> None:
        """Release the next message's slot, or retain it while the program holds a view."""
        self.settle()
        if self._may_retain and self.windows.held(chunk):
            self._ring.skip()
            self._retain(chunk, index, nbytes)
            return
        self._free(chunk, nbytes)
        if self._ring.release():
            self._waker.slot_is_free()

    def settle(self) -> None:
        """Release the retained slot."""
        if self._retained is None:
            return
        chunk, index, nbytes = self._retained
        self._free(chunk, nbytes)
        self._retained = None
        if self._ring.give_back(index):
            self._waker.slot_is_free()

    def _retain(self, chunk: int, index: int, nbytes: int) -> None:
        loop = self._state.loop
        assert loop is not None
        self._retained = chunk, index, nbytes
        self._retained_at = loop.time()
        if self._timer is not None and self._respite_s > RESPITE_S:  # prolonged for an earlier message
            self._timer.cancel()
            self._timer = None
        self._respite_s = RESPITE_S
        if self._timer is None:  # one for many leases: a timer for each would take as long as a whole lease
            self._timer = loop.call_later(RESPITE_S, self._respite_ends)

    def _respite_ends(self) -> None:
        self._timer = None
        loop = self._state.loop
        if self._retained is None or loop is None:
            return
        left = self._retained_at + self._respite_s - loop.time()
        if left <= 0 and self._is_waiting():
            left = min(self._respite_s, LONGEST_RESPITE_S)
            self._respite_s += left
        if left > 0:
            self._timer = loop.call_later(left, self._respite_ends)
        else:
            self.settle()

    def _is_waiting(self) -> bool:
        """Return whether a call waits for a message, and the writer does not wait for the retained slot."""
        if not self._state.waits:
            return False
        # With a message there, the call ends now, and the slot is released at the end of the next block.
        ring = self._ring
        return self._ring.ready() or not ring.writer_parked[0] or ring.messages_wanted() > 1

    def _free(self, chunk: int, nbytes: int) -> None:
        """Make sure that no held view shows the chunk."""
        if self.windows.settle(chunk, nbytes):
            self._ring.copied += nbytes

    def close(self) -> None:
        """Copy every view that is still held. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._retained = None
        self.windows.close()
