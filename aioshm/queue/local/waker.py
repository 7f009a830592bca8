"""Waking a writer that is parked because its ring is full."""

from __future__ import annotations

import asyncio

from aioshm.lifeline.dialer import Lifeline
from aioshm.process.loop_thread import shared_loop
from aioshm.queue.ends.gate import Gate
from aioshm.ring import RingReader


class WriterWaker:
    """Wakes the writer, but not for each slot: it would fill that one and go to sleep again.

    Within one turn of the loop it is woken once, or when half of what lies between the message that it waits for and
    the latest has become free: half of the ring, or half of the chunks of one size.
    """

    def __init__(self, gate: Gate, ring: RingReader, lifeline: Lifeline, loop: asyncio.AbstractEventLoop) -> None:
        self._gate = gate
        self._ring = ring
        self._lifeline = lifeline
        self._loop = loop
        self.pending: bool = False  # whether the loop is to wake the writer after its turn
        self.due: int = 0  # from which message on that is not waited for
        # Whether the ring is unmapped; its reader may live on, with another writer's.
        self.closed: bool = False

    def slot_is_free(self) -> None:
        """Wake the writer now or soon: it is parked, and a slot went back to it."""
        seq = self._ring.core.seq
        if not self.pending:
            self.due = max(0, seq - 1 + self._ring.messages_wanted() // 2)
            if self._gate.on_its_thread:
                self._loop.call_soon(self.wake)
            else:  # a thread has received the message
                shared_loop().post(self.wake)
            self.pending = True  # last: a signal's handler may interrupt this
        if seq >= self.due:
            self.wake()

    def wake(self) -> None:
        """Wake the writer if it can go on."""
        self.pending = False  # first: as above
        if not self.closed and not self._gate.dismantled and self._ring.writer_can_go_on():
            self._ring.writer_parked[0] = 0  # one ring is enough until it wakes
            try:
                self._lifeline.ring()
            except BaseException:  # as above
                self._ring.writer_parked[0] = 1
                raise
