"""The waker of a parked writer, at a local reader."""

from __future__ import annotations

import asyncio

from aioshm.lifeline.dialer import Lifeline
from aioshm.process.loop_thread import shared_loop
from aioshm.queue.state import EndState
from aioshm.ring import RingReader


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
