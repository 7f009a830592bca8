"""A local reader's end as far as slots go: to wait for the next one, find what belongs to it, and give it back."""

from __future__ import annotations

import asyncio
import logging
import os
from abc import ABC
from collections.abc import Sequence
from time import monotonic_ns

from aioshm.codec import Codec
from aioshm.config import Options
from aioshm.errors import AioshmError, CorruptSlot, MessagesLost, PeerDied
from aioshm.process.limits import out_of_descriptors, shortage
from aioshm.queue.annexes import unpack_marker
from aioshm.queue.handle import Handle
from aioshm.queue.leases import Leases
from aioshm.queue.local_end import LocalEnd
from aioshm.ring.slot import Slot
from aioshm.wait.blocking import NEVER_NS, BlockingPoller
from aioshm.wait.line import settle
from aioshm.wait.stall import seconds

logger = logging.getLogger("aioshm.queue")


class LocalSlots(LocalEnd, ABC):
    """Knows which slot is next, and nothing of what is in it but an annex' marker."""

    def __init__(self, handle: Handle, rank: int, codec: str | Codec | None, options: Options | None) -> None:
        super().__init__(handle, rank, codec, options)
        self._leases: Leases | None = None
        self._waking = False
        self._wake_at = 0

    def _reopen(self) -> None:
        super()._reopen()
        if self._leases is not None and self._leases.pending:
            self._core.open = False  # it has to be settled before the next message is read

    def _dismantle(self) -> None:
        if self._leases is not None:
            self._leases.close()
        super()._dismantle()

    @property
    def _seq(self) -> int:
        return self._core.seq

    # Waiting

    async def _line_up(self, deadline: float | None, cancel: asyncio.Event | None, *, leasing: bool = False) -> None:
        """Wait until it is this task's turn to read, which lasts until `_leave`."""
        if not self._ready:
            await self._become_ready(deadline, cancel)
        self._check_usable()
        await self._yield_turn()
        await self._enter(deadline, cancel)
        if self._leases is not None and not leasing:
            try:
                self._leases.settle()
            except BaseException:
                self._leave()
                raise

    async def _next_slot(self, deadline: float | None, cancel: asyncio.Event | None, indefinite: bool) -> Slot:
        assert self._poller is not None
        while True:
            self._check_usable()
            gone = self._writer_gone  # before looking: what was published before the writer went is then seen
            slot = self._ring.peek()
            if slot is not None:
                return slot
            if gone is not None:
                raise gone()
            stall = None if indefinite else self._stall_of_reading()
            if isinstance(self._poller, BlockingPoller):
                self._poller.leaves = self.leaves
            try:
                if await self._poller.wait(
                    self._may_go_on,
                    self._seq,
                    self._core.published_ns,
                    deadline=deadline,
                    cancel=cancel,
                    stall=stall,
                ):
                    self._new_turn()
            except TimeoutError:
                raise TimeoutError(f"{self!r}: message {self._seq} did not come in time") from None
            finally:
                if stall is not None:
                    stall.pause()
                self._core.spin_ns, self.linger_ns = self._poller.inline_spin_ns, self._poller.linger_ns

    def linger(self, left: float | None) -> bool:
        core = self._core
        if not core.passes():  # as it does now and then, so that the loop has its turn
            return False
        if self._waking:  # which the loop was to do
            self._wake_writer()
        began = now = monotonic_ns()
        until_ns: float = now + self.linger_ns
        if isinstance(left, (int, float)):
            until_ns = min(until_ns, now + left * 1e9)
        while core.open and now < until_ns:
            os.sched_yield()
            if core.ready() or (core.spin_ns > 0 and core.spin(core.spin_ns)):
                return True
            now = monotonic_ns()
        if isinstance(self._poller, BlockingPoller):
            self._poller.lingered(began)
        return False

    def watch(self, left: float | None) -> None:
        poller, core = self._poller, self._core
        assert isinstance(poller, BlockingPoller)
        until_ns = NEVER_NS if left is None else monotonic_ns() + int(left * 1e9)
        poller.watch(lambda: core.ready() or not core.open, until_ns)

    def _may_go_on(self) -> bool:
        return self._refusal is not None or self._writer_gone is not None or self._ring.ready()

    # Annexes

    def _is_marker(self, slot: Slot, seq: int) -> bool:
        return seq == self._seq and unpack_marker(slot.header, self._lifeline.welcome.secret, seq) is not None

    def _annex_body(self, slot: Slot) -> memoryview | None:
        """Return what lies in the annex that a marker names; None if that has not arrived yet.

        Raises:
            OutOfDescriptors: There is no room for it now; the writer's passing it stays in the socket.
        """
        marker = unpack_marker(slot.header, self._lifeline.welcome.secret, self._seq)
        if marker is None:  # damaged while this waited
            raise CorruptSlot(self._seq, self._seq)
        number, size = marker
        body = self._annexes.body(number, size, self._seq)
        if body is None:
            self._lifeline.look()  # it was passed before the message was published
            body = self._annexes.body(number, size, self._seq)
            if body is None and self._lifeline.holds_back:
                what = f"message {self._seq} of {size} bytes"
                raise shortage(what) or out_of_descriptors(what)
        if body is not None:
            self._overflows += 1
        return body

    async def _body(
        self, slot: Slot, deadline: float | None, cancel: asyncio.Event | None, indefinite: bool
    ) -> memoryview:
        """Return what lies in the annex that a marker names, which the caller has to release."""
        try:
            while (body := self._annex_body(slot)) is None:
                await self._annex(deadline, cancel, indefinite)
        except CorruptSlot:
            self._release()
            raise
        return body

    async def _annex(self, deadline: float | None, cancel: asyncio.Event | None, indefinite: bool) -> None:
        """Wait for an annex, or for any other news."""
        self._check_usable()
        if self._writer_gone is not None:
            raise self._annex_lost()
        assert self._loop is not None
        self._news = news = self._loop.create_future()
        stall = None if indefinite else self._inquiry()
        try:
            await settle(news, deadline=deadline, cancel=cancel, stall=stall)
        except TimeoutError:
            raise TimeoutError(f"{self!r}: the annex of message {self._seq} did not come in time") from None
        self._check_usable()

    def _annex_lost(self) -> AioshmError:
        if self._lifeline.said_goodbye or self._ring.writer_closed():
            return MessagesLost(self._seq, self._ring.messages_written() - 1)
        return PeerDied(-1, self._lifeline.welcome.pid, "writer", f"with the annex of message {self._seq}")

    # Giving slots back

    def _leases_of_this(self) -> Leases:
        if self._leases is None:
            assert self._attachment is not None
            assert self._loop is not None
            self._leases = Leases(
                self._attachment.segment_fd, self._ring.layout, self._core, self._loop, self._writer_waits
            )
        return self._leases

    def _release(self, published_ns: int = 0) -> None:
        core = self._core
        if published_ns:
            core.published_ns = published_ns
        core.turn = core.turn - 1 if monotonic_ns() < core.turn_ends_ns else 0
        if core.release():
            self._writer_waits()

    def _writer_waits(self) -> None:
        """Wake the writer, but not for each slot: it would fill that one and go to sleep again.

        Within one turn of the loop it is woken once, or when half of the ring has become free.
        """
        assert self._loop is not None
        if not self._waking:
            self._wake_at = self._core.seq - 1 + self._handle.max_chunks // 2
            self._loop.call_soon(self._wake_writer)
            self._waking = True  # last: a signal's handler may interrupt this
        if self._core.seq >= self._wake_at:
            self._wake_writer()

    def _wake_writer(self) -> None:
        self._waking = False
        if not self._dismantled and self._ring.writer_can_go_on():
            self._ring.writer_parked[0] = 0  # one ring is enough until it wakes
            try:
                self._lifeline.ring()
            except BaseException:  # as above
                self._ring.writer_parked[0] = 1
                raise

    def tell_parked(self) -> None:
        self._writer_waits()

    # Reporting

    def _report_waiting(self, waited_s: float) -> None:
        if not self._ready:
            self._report_not_ready(waited_s)
            return
        level, about = self._findings()
        what = "message"
        if self._ring.ready():
            level, what = logging.WARNING, "the annex of message"  # which was sent before
        elif level < logging.WARNING and self._ring.writer_parked[0] and (others := self._ring.laggards()):
            level, about = logging.WARNING, f"{about}, because the writer waits for {self._named(others)}"
        logger.log(
            level, "%r, rank %d: waited %s for %s %d: %s", self, self._rank, seconds(waited_s), what, self._seq, about
        )

    def _named(self, readers: Sequence[int]) -> str:
        pids, ranks = self._ring.reader_pids(), self._handle.local_reader_ranks
        return ", ".join(f"rank {ranks[reader]} (pid {pids[reader]})" for reader in readers) + " to read"
