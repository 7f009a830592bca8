"""The readers on the writer's host: the ring that they read, where they attach, and what wakes them."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Callable, Sequence
from time import monotonic_ns

from aioshm.codec import Encoded
from aioshm.codec.frames import INLINE, OVERFLOW, PLACED, RAW, pack_header, pack_place, write_body
from aioshm.config import Options
from aioshm.errors import AioshmError, OutOfDescriptors, PeerDied
from aioshm.lifeline.address import new_address
from aioshm.lifeline.bell import Bell
from aioshm.lifeline.listener import LifelineListener
from aioshm.lifeline.protocol import Welcome
from aioshm.process.limits import naming_limits
from aioshm.queue.encoded import parts_of
from aioshm.queue.local.loans import Extent, Loans, Placed
from aioshm.queue.local.overflow import SECRET_BYTES, Overflow, OverflowSegments
from aioshm.queue.local.roster import Roster
from aioshm.queue.membership import ReaderInfo
from aioshm.queue.stats import ReaderStats
from aioshm.ring import RingWriter, ShmRingBuffer
from aioshm.ring.slot import Slot

logger: logging.Logger = logging.getLogger("aioshm.queue")

TOKEN_BYTES = 32

CLOSING_POLL_S = 0.005
"""How often a writer that closes looks whether its readers have received what it sent over ZeroMQ."""


class RingAudience:
    """The ring, and who reads it.

    Args:
        ranks: Of the places for local readers, in the order of the ring's flags.
        extra: Those of them that nobody waits for before the queue is ready.
        sizes: The bytes of a chunk, how many chunks, and how many slots, None taking the default.
        options: The queue's.
        token: What a reader must know; None: one is made.

    Attributes:
        buffer: The ring's memory.
        ring: The writer's cursor.
        roster: Who reads.
        listener: Where readers attach.
        overflow: How what does not fit a chunk is sent.
        loans: The memory that is lent.
        queue_id: The queue's.
        token: What a reader must know.
        secret: What the markers of overflowing messages repeat.
        segment_name: The memory's name; None where its descriptor is passed on.

    Raises:
        SharedMemoryError: There is not enough memory, or no socket can be bound.
        OutOfDescriptors: None is left.
    """

    def __init__(
        self,
        ranks: tuple[int, ...],
        sizes: tuple[int, int, int | None],
        options: Options,
        token: bytes | None = None,
        extra: frozenset[int] = frozenset(),
    ) -> None:
        self.token: bytes = secrets.token_bytes(TOKEN_BYTES) if token is None else token
        self.secret: bytes = secrets.token_bytes(SECRET_BYTES)
        chunk_bytes, chunks, slots = sizes
        self._chunk_bytes = chunk_bytes
        with naming_limits("a writer"):
            self.buffer: ShmRingBuffer = ShmRingBuffer(
                len(ranks), chunk_bytes, chunks, backing=options.backing, slots=slots, traced=options.trace_context
            )
            try:
                self.queue_id: bytes = self.buffer.queue_id
                self.listener: LifelineListener = LifelineListener(
                    new_address(options, self.queue_id, "lifeline"), self.queue_id, self.token, max(64, len(ranks))
                )
            except BaseException:
                self.buffer.close()
                raise
        self.segment_name: str | None = self.buffer.name
        self.buffer.prefault(options.prefault_bytes if ranks else 0, write=True)
        self.ring: RingWriter = self.buffer.writer()
        self.ring.set_writer_state(closed=False, pid=os.getpid())
        self.roster: Roster = Roster(
            self.queue_id.hex()[:8], ranks, extra, self.ring, options.on_reader_death, self._welcome
        )
        self._options = options
        segments = OverflowSegments(self.ring, self.queue_id, self.secret, self.roster.hand_over, self._second_way)
        self.overflow: Overflow = segments
        self.loans: Loans = Loans(self.buffer, None if options.overflow == "zmq" else segments)
        if options.overflow == "zmq" and ranks:
            try:
                self.overflow = self._publisher()
            except BaseException:
                self.close()
                raise
        self.roster.came, self.roster.body_gone = self.overflow.expect_reader, self.overflow.is_gone

    @property
    def ranks(self) -> tuple[int, ...]:
        """The local readers' ranks."""
        return self.roster.ranks

    @property
    def bell(self) -> Bell | None:
        """What readers wake the writer by; None where that is a byte on their connection."""
        return self.listener.bell

    def _welcome(self, rank: int, first: int, going: bool) -> tuple[Welcome, list[int]]:
        by_descriptor = self.segment_name is None or going  # when all were ready, the memory has lost its name
        bells = self.listener.bell is not None
        welcome = Welcome(
            os.getpid(), self.secret, by_descriptor, bells, slow=True, rank=rank, first=first, going=going
        )
        return welcome, [self.buffer.fd] if by_descriptor else []

    def _publisher(self) -> Overflow:
        with naming_limits("a writer"):  # which reading the files may reach; and who has segments needs no ZeroMQ
            from aioshm.queue.local.overflow_sockets import OverflowPublisher
        roster = self.roster
        return OverflowPublisher(
            self.queue_id, self._options, self.ring, self.secret, roster.attached_ranks, len(roster.ranks)
        )

    def _second_way(self, why: AioshmError) -> Overflow:
        publisher = self._publisher()
        for peer in self.roster.peers:
            if peer is not None:
                publisher.expect_reader(peer)
        self.roster.call_to_subscribe()
        logger.warning(
            "queue %s: there is no overflow segment to be had, so what does not fit a chunk goes over ZeroMQ, several "
            "times slower, until there is: %s",
            self.queue_id.hex()[:8],
            why,
        )
        return publisher

    # How they are

    def start(self, loop: asyncio.AbstractEventLoop, changed: Callable[[], None]) -> None:
        """Begin to admit readers; ``changed`` is called after every change, and when a reader rang for the writer."""
        self.roster.changed = changed
        self.listener.start(loop, self.roster)

    def look(self) -> None:
        """Find out who has gone, or come, since the loop has looked."""
        self.listener.look()

    @property
    def lacking(self) -> OutOfDescriptors | None:
        """What has kept a reader from being admitted."""
        return self.listener.lacking

    @property
    def complete(self) -> bool:
        """Whether no reader is waited for any more."""
        return self.roster.complete

    @property
    def alive(self) -> int:
        """How many readers are attached."""
        return self.roster.alive

    def missing(self) -> list[str]:
        """Name the readers that are not attached yet."""
        return self.roster.missing()

    @property
    def left(self) -> dict[int, str]:
        """What became of the readers that were there, or nearly, before all were ready, and are not replaced."""
        return self.roster.left

    def take_death(self) -> PeerDied | None:
        """Return, once, who of them has died."""
        return self.roster.take_death()

    @property
    def held(self) -> dict[int, tuple[int, int]]:
        """Whose places wait for a replacement, as `Roster.held`."""
        return self.roster.held

    def readers(self) -> list[ReaderInfo]:
        """Return who reads, or did."""
        return self.roster.readers()

    def reader_stats(self) -> list[ReaderStats]:
        """Return who reads, or did, and what is known of how."""
        return self.roster.reader_stats()

    def dismiss(self, rank: int) -> None:
        """Wait for a reader no more, whether it is there, has died, or never came."""
        self.roster.dismiss(rank)

    def laggards(self, slots: int = 1, large: Sequence[int] = ()) -> list[str]:
        """Name the readers that keep so many messages from being written, as `RingWriter.laggards`."""
        return self.roster.behind.laggards(slots, large)

    def slowest(self, slots: int = 1, large: Sequence[int] = ()) -> list[int]:
        """Return, by rank, which of those that keep so many messages from being written are furthest behind."""
        return self.roster.behind.slowest(slots, large)

    def lag_of(self, rank: int) -> tuple[str, int] | None:
        """Name a reader, and say how many messages it is behind; None if it is not there."""
        return self.roster.behind.lag_of(rank)

    def free(self, slots: int = 1, large: Sequence[int] = ()) -> bool:
        """Return whether there is room for so many messages, as `RingWriter.free`; who copies is not waited for."""
        return self.ring.free(slots, large) or (bool(self.roster.behind.lenient) and self._make_room(slots, large))

    def claim(self, nbytes: int) -> Slot | None:
        """Return the next slot for writing so many bytes, or None while there is no room."""
        slot = self.ring.claim(nbytes)
        if slot is None and self.free(1, self.ring.large(nbytes)):
            slot = self.ring.claim(nbytes)
        return slot

    def _make_room(self, slots: int, large: Sequence[int]) -> bool:
        self.roster.behind.make_room(slots, large)
        return self.ring.free(slots, large)

    def backlog(self) -> int:
        """Return how many messages the slowest reader has not finished with."""
        return self.roster.behind.backlog()

    @property
    def trouble(self) -> Callable[[], AioshmError] | None:
        """What makes the error that the writer has to raise from now on, if any."""
        return self.roster.trouble

    def go(self) -> None:
        """Tell every reader that all are ready; they have the ring mapped, so it needs no name any more."""
        self.buffer.unlink()
        self.roster.go()

    # Publishing

    def put(self, message: Encoded, size: int, code: int) -> bool:
        """Publish a message, or return False if there is no room. Has sent to all readers or to none.

        Args:
            message: What a codec made of it.
            size: Of its body; what fits the ring as it is goes through the core instead.
            code: The codec's.
        """
        fits = size <= self._chunk_bytes
        slot = self.claim(size)
        if slot is None:
            return False
        parts, buffers = parts_of(message)
        kind = INLINE
        if fits:
            write_body(slot.body, parts, buffers)
        else:
            kind = OVERFLOW
            self.overflow.put(slot.header, parts, buffers, size)
        self.ring.core.copied += size
        pack_header(slot.header, 0, kind, code, 0, len(buffers), self.ring.seq, monotonic_ns(), sum(map(len, parts)))
        self._commit()
        return True

    def put_raw(self, slot: Slot, nbytes: int) -> None:
        """Publish a claimed slot of which so many bytes have been filled."""
        self.ring.core.claimed_bytes = nbytes
        pack_header(slot.header, 0, RAW, 0, 0, 0, self.ring.seq, monotonic_ns(), nbytes)
        self._commit()

    def put_placed(self, slot: Slot, extent: Extent, placed: Placed, code: int) -> None:
        """Publish a message that was written where it lies, for which the slot is claimed.

        Raises:
            SharedMemoryError: What the caller still holds of it could not be taken back. Nothing was sent.
        """
        ring, begin, kind, window = self.ring, slot.begin, INLINE, extent.window
        assert window is not None
        window.write(0, pack_place(placed.table))
        window.write(placed.table, placed.tail)
        del window
        self.loans.take_back(extent)  # before anybody sees the message
        if extent.is_segment:
            assert isinstance(self.overflow, OverflowSegments)
            kind = OVERFLOW
            self.overflow.mark(slot.header, extent.number, placed.end)
        ring.core.copied += placed.copied
        ring.core.claimed_bytes = placed.end
        header = kind, code, PLACED, placed.n_buffers, ring.seq, monotonic_ns(), placed.main_bytes
        pack_header(ring.slots.bodies, begin, *header)
        self._commit()

    def _commit(self) -> None:
        core = self.ring.core
        core.published_ns = now = monotonic_ns()
        core.turn = core.turn - 1 if now < core.turn_ends_ns else 0
        if self.ring.commit():
            self.roster.ring_bells()

    # Closing

    def say_goodbye(self) -> None:
        """Tell the readers that nothing more will come."""
        self.listener.look_at_readers()  # nothing is delivered to those who have gone
        self.ring.set_writer_state(closed=True, pid=os.getpid())
        self.listener.close()

    def close(self) -> None:
        """Give everything back but what still has to be delivered. Idempotent."""
        self.listener.close()
        self.loans.close()
        self.overflow.close()
        self.ring.close()
        self.buffer.close()

    def finished(self) -> bool:
        """Return whether there is nothing left to deliver."""
        return self.overflow.finished()

    async def finish(self) -> None:
        """Wait until the readers have received everything, or are gone."""
        while not self.overflow.finished():  # noqa: ASYNC110 - a thread delivers, whatever becomes of the loop
            await asyncio.sleep(CLOSING_POLL_S)

    def abandon(self) -> None:
        """Let go, in a forked child, of what would hide the parent's death."""
        self.listener.abandon()
