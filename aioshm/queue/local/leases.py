"""Leased chunks of one reader: what a message is seen through, and when its slot goes back to the writer.

When a lease's block ends, the name after ``as`` usually still refers to the message, until the next round of the loop
binds it anew. Making a copy for it each time would cost more than not leasing at all. So a large message that is still
held gets a short respite: its slot goes back, with or without a copy, at the end of the next lease, before anything
else is read, or after `RESPITE_S`, whatever comes first.

A loop that waits for the next message in time has no chance to let go of this one. So while a call waits the respite
goes on, unless the writer waits for room: what is kept is one slot and one chunk at most, so that only messages sent in
one go that need every chunk can miss it. That is looked at ever less often, for a reader that sleeps is to stay asleep:
the writer waits no longer for it than this reader had waited for a message, and `LONGEST_RESPITE_S` at most.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aioshm.ring.cores import ReaderCore
from aioshm.ring.layout import Layout
from aioshm.ring.window import Windows

RESPITE_S = 0.010
LONGEST_RESPITE_S = 0.16
VIEW_BYTES = 512 * 1024
"""Smaller messages are leased as a copy: a view, and finding out whether it is still held, takes as long as copying
that much."""


class Leases:
    """Hands out views of chunks, and gives their slots back."""

    def __init__(
        self,
        fd: int,
        layout: Layout,
        core: ReaderCore,
        loop: asyncio.AbstractEventLoop,
        writer_waits: Callable[[], object],
        may_keep: Callable[[], bool],
    ) -> None:
        self.windows: Windows = Windows(fd, layout)
        self._respites = layout.max_chunks > 2
        self._core = core
        self._loop = loop
        self._writer_waits = writer_waits
        self._may_keep = may_keep
        self._retained: tuple[int, int, int] | None = None  # chunk, slot, bytes
        self._retained_at = 0.0
        self._respite_s = RESPITE_S
        self._timer: asyncio.TimerHandle | None = None

    def end(self, chunk: int, index: int, nbytes: int) -> None:
        """Give the next message's slot back, or soon.

        Raises:
            SharedMemoryError: Views of it are still held and there is no memory for a copy; the slot is kept.
        """
        self.settle()
        if self._respites and self.windows.held(chunk):
            self._core.skip()
            self._retained = chunk, index, nbytes
            self._retained_at = self._loop.time()
            if self._timer is not None and self._respite_s > RESPITE_S:  # that of one that was waited after
                self._timer.cancel()
                self._timer = None
            self._respite_s = RESPITE_S
            if self._timer is None:  # one for many leases: a timer for each would take as long as the rest
                self._timer = self._loop.call_later(RESPITE_S, self._respite_ends)
            return
        self._free(chunk, nbytes)
        if self._core.release():
            self._writer_waits()

    def settle(self) -> None:
        """Give back what is still kept.

        Raises:
            SharedMemoryError: As `end`.
        """
        if self._retained is None:
            return
        chunk, index, nbytes = self._retained
        self._free(chunk, nbytes)
        self._retained = None
        if self._core.give_back(index):
            self._writer_waits()

    def _respite_ends(self) -> None:
        self._timer = None
        if self._retained is None:
            return
        left = self._retained_at + self._respite_s - self._loop.time()
        if left <= 0 and self._may_keep():
            left = min(self._respite_s, LONGEST_RESPITE_S)
            self._respite_s += left
        if left > 0:
            self._timer = self._loop.call_later(left, self._respite_ends)
        else:
            self.settle()

    def _free(self, chunk: int, nbytes: int) -> None:
        """Let nothing that is still held show the chunk any more."""
        if self.windows.settle(chunk, nbytes):
            self._core.copied += nbytes

    def close(self) -> None:
        """Leave a copy behind under every view that is still held. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._retained = None
        self.windows.close()
