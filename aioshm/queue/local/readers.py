"""A writer's local readers: the ring, and the lifelines over which readers attach and are woken."""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import secrets
from collections.abc import Sequence
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

from aioshm.codec import Encoded
from aioshm.codec.frames import INLINE, OVERFLOW, PLACED, RAW, pack_header, pack_place, parts_of, write_body
from aioshm.config import SLOW_READER, Options
from aioshm.errors import HandleError, PeerDied
from aioshm.lifeline.listener import LifelineListener, Peer
from aioshm.lifeline.protocol import ANY_RANK, Hello, Welcome
from aioshm.lifeline.sockets import new_address
from aioshm.logs import LogLimiter
from aioshm.process.limits import naming_limits
from aioshm.process.proc import is_dying, process_state
from aioshm.queue.local.loans import Extent, Loans, Placed
from aioshm.queue.local.overflow import SECRET_BYTES, OverflowSegments
from aioshm.queue.registry import ReaderRegistry, ReaderSlot
from aioshm.ring import RingWriter, ShmRingBuffer
from aioshm.ring.layout import ATTACHED, DIED, DISMISSED, EVICTED, HELD, LEFT
from aioshm.ring.slot import Slot

if TYPE_CHECKING:  # writers with segments need no ZeroMQ
    from aioshm.queue.local.overflow_sockets import OverflowPublisher

logger: logging.Logger = logging.getLogger("aioshm.queue")

TOKEN_BYTES = 32

CLOSING_POLL_S = 0.005
"""How often a closing writer checks whether its readers have received what it sent over ZeroMQ."""

COMPLAINT_S = 10.0  # between two warnings of messages that are lost

_STATES = {"left": LEFT, "died": DIED, "held": HELD}


class LocalReaders:
    """The transport of local readers; the `Host` of the lifeline listener."""

    kind = "local"

    def __init__(
        self,
        ranks: tuple[int, ...],
        sizes: tuple[int, int, int | None],  # bytes of a chunk, number of chunks, number of slots
        options: Options,
        token: bytes | None = None,
        extra: frozenset[int] = frozenset(),  # ranks without which the queue becomes ready
    ) -> None:
        self.ranks = ranks
        self.token: bytes = token or secrets.token_bytes(TOKEN_BYTES)
        self.secret: bytes = secrets.token_bytes(SECRET_BYTES)  # repeated in the markers of overflowed messages
        self._options = options
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
        if ranks:
            self.buffer.prefault(options.prefault_bytes, write=True)
        self.ring: RingWriter = self.buffer.writer()
        self.ring.set_writer_state(closed=False, pid=os.getpid())
        self.registry: ReaderRegistry = ReaderRegistry(self.queue_id.hex()[:8], options.on_reader_death)
        self.registry.add(self, ranks, extra)
        self._index = {rank: index for index, rank in enumerate(ranks)}  # index of a rank's flags in the ring
        self._attached: tuple[tuple[int, Peer], ...] = ()  # by index
        self._lenient: dict[int, ReaderSlot] = {}  # readers that the writer does not wait for, by index
        self._limiter = LogLimiter(COMPLAINT_S)
        self._first = 0  # the first message of the reader that is being admitted
        for rank in extra:
            self.ring.evict(self._index[rank])
        segments = OverflowSegments(self.ring, self.queue_id, self.secret, self)
        self.overflow: OverflowSegments | OverflowPublisher = segments
        self.loans: Loans = Loans(self.buffer, segments)
        if options.overflow == "zmq" and ranks:
            try:
                self.overflow = self._publisher()
            except BaseException:
                self.close()
                raise
            self.loans = Loans(self.buffer, None)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to admit readers."""
        self.overflow.start(loop)
        self.listener.start(loop, self)

    def poll(self) -> None:
        """Handle attaching and leaving readers now, before the loop does."""
        self.listener.look()

    def go(self) -> None:
        """Notify every reader that all readers are ready."""
        self.buffer.unlink()  # all readers have mapped the segment; later readers are passed its descriptor
        for peer in self.peers():
            peer.go()

    def peers(self) -> list[Peer]:
        """Return the readers that are attached."""
        return [peer for _, peer in self._attached]

    def pids(self) -> list[int]:
        """Return the readers' process ids by rank, in this process's pid namespace; 0: not visible here, or gone."""
        attached = {peer.rank: peer.seen_pid for peer in self.peers()}
        slots = self.registry.slots
        return [attached.get(rank, 0) for rank in self.ranks if rank in attached or not slots[rank].extra]

    def wake_readers(self) -> None:
        """Wake the parked readers."""
        parked = self.ring.readers_parked
        for index, peer in self._attached:
            if parked[index]:
                parked[index] = 0  # one wake-up is enough for all messages until the reader runs
                try:
                    peer.ring()
                except BaseException:  # a signal handler raised: the next call wakes the reader
                    parked[index] = 1
                    raise

    # Large messages over ZeroMQ

    def _publisher(self) -> OverflowPublisher:
        with naming_limits("a writer"):  # imported here: writers with segments need no ZeroMQ
            from aioshm.queue.local.overflow_sockets import OverflowPublisher
        return OverflowPublisher(self, self._options)

    # Transport, for the registry

    def progress(self, slot: ReaderSlot) -> tuple[int, int]:
        written = self.ring.seq
        return min(self.ring.messages_read(self._index[slot.rank]), written), written

    def condition(self, slot: ReaderSlot) -> str:
        return process_state(slot.reader.seen_pid)

    def evidence(self, slot: ReaderSlot) -> str:
        state = process_state(slot.reader.seen_pid)
        if state in ("gone", "zombie", "dead"):
            return f"does not live any more ({state}): a process that it started keeps its connection open"
        if slot.reader.seen_pid > 0:
            return f"lives ({state})"
        return f"is {state}"

    def row(self, slot: ReaderSlot) -> dict[str, Any]:
        row = self.ring.reader_row(self._index[slot.rank])
        return {"bytes": row.bytes, "latency": row.latency}

    def keep(self, slot: ReaderSlot) -> None:
        index = self._index[slot.rank]
        self._detach(index)
        self.ring.set_reader_state(index, HELD, slot.pid)
        self.ring.resume(index, copies=slot.slow != "block")  # releases the reader's leases

    def drop(self, slot: ReaderSlot) -> None:
        index = self._index[slot.rank]
        self._detach(index)
        if slot.state in _STATES:
            self.ring.set_reader_state(index, _STATES[slot.state], slot.pid)
        self._lenient.pop(index, None)
        self.ring.evict(index)

    def evict(self, slot: ReaderSlot, reader: Any, *, dismissed: bool) -> None:
        index = self._index[slot.rank]
        state = EVICTED
        if dismissed:
            state = DISMISSED
        self.ring.set_reader_state(index, state, slot.pid)  # first: the reader checks the state when a message is gone
        slot.leaving = reader
        self.drop(slot)
        reader.evict()

    def _detach(self, index: int) -> None:
        self._attached = tuple(each for each in self._attached if each[0] != index)

    # Host, for the lifelines

    def admit(self, hello: Hello) -> tuple[Welcome, list[int]]:
        if hello.slow not in SLOW_READER:
            raise HandleError(f"this writer knows no slow_reader={hello.slow!r}")
        slot = self.registry.choose(hello.rank, self)
        index = self._index[slot.rank]
        if slot.held:
            self._first = self.ring.resume(index, copies=slot.slow != "block" and hello.slow != "block")
        else:
            history = min(max(0, hello.history), self.ring.seq)
            self._first = self.ring.admit(index, history, self.overflow.is_gone)
        going = self.registry.going
        by_descriptor = self.segment_name is None or going  # once all readers are ready, the segment has no name
        welcome = Welcome(
            os.getpid(),
            self.secret,
            by_descriptor,
            self.listener.doorbell is not None,
            rank=slot.rank,
            first=self._first,
            going=going,
        )
        fds = []
        if by_descriptor:
            fds.append(self.buffer.fd)
        return welcome, fds

    def awaits_end(self, hello: Hello) -> bool:
        return any(hello.rank in (peer.rank, ANY_RANK) and is_dying(peer.seen_pid) for peer in self.peers())

    def withdrawn(self, welcome: Welcome) -> None:
        if not self.registry.slots[welcome.rank].held:
            self.ring.evict(self._index[welcome.rank])

    def missed(self, hello: Hello, said_goodbye: bool) -> None:
        about = f"queue {self.registry.name}, before all readers were ready"
        death = None
        if not said_goodbye:
            death = PeerDied(hello.rank, hello.pid, "reader", about)
        self.registry.missed(hello.rank, f"pid {hello.pid}", death)

    def attached(self, peer: Peer) -> None:
        index = self._index[peer.rank]
        slot = self.registry.slots[peer.rank]
        self._attached = tuple(sorted((*self._attached, (index, peer)), key=lambda each: each[0]))
        self._lenient.pop(index, None)
        self.ring.set_reader_state(index, ATTACHED, peer.pid)
        self.overflow.expect_reader(peer)
        if peer.slow != "block":
            self._lenient[index] = slot
        self.registry.attach(slot, self, peer, pid=peer.pid, host=platform.node(), slow=peer.slow, first=self._first)

    def announce(self) -> None:
        self.registry.changed()

    def proven(self, peer: Peer) -> None:
        slot = self.registry.slots[peer.rank]
        waited_for = not slot.settled
        if slot.reader is peer:
            self.registry.proven(slot)
        if waited_for:
            self.registry.changed()

    def gone(self, peer: Peer, said_goodbye: bool) -> None:
        registry = self.registry
        slot = registry.slots[peer.rank]
        if slot.leaving is peer:
            slot.leaving = None
            return
        if said_goodbye:
            registry.left(slot)
        else:
            registry.died(slot)
        if not registry.going or slot.trouble is not None or not self._attached:
            registry.changed()  # now: else a waiting call would continue in the released room, without an error

    def woken(self) -> None:
        self.registry.changed()

    # Room

    def laggards(self, slots: int = 1, large: Sequence[int] = ()) -> list[str]:
        """Return the names of the readers that the writer waits for, as `RingWriter.laggards`."""
        return [self._slot(index).name for index in self.ring.laggards(slots, large)]

    def free(self, slots: int = 1, large: Sequence[int] = ()) -> bool:
        """Return whether there is room, as `RingWriter.free`; lenient readers lose messages for it."""
        if self.ring.free(slots, large):
            return True
        if not self._lenient:
            return False
        self._make_room(slots, large)
        return self.ring.free(slots, large)

    def _make_room(self, slots: int, large: Sequence[int]) -> None:
        """Make room: pass over messages of lenient readers, or evict the readers."""
        blocker = self.ring.blocker(slots, large)
        for index, slot in list(self._lenient.items()):
            if slot.slow == "evict":
                if self.ring.messages_read(index) <= blocker:
                    self.registry.evict_slow(slot)
            elif self.ring.pass_over(index, blocker) and (held_back := self._limiter.admit()) is not None:
                text = "queue %s: %s is too slow, %d messages behind, and loses some (and %d more warnings)"
                logger.warning(text, self.registry.name, slot.name, self.registry.lag(slot), held_back)

    def _slot(self, index: int) -> ReaderSlot:
        return self.registry.slots[self.ranks[index]]

    # Publishing

    def claim(self, nbytes: int) -> Slot | None:
        """Claim the next slot for ``nbytes``; return None while there is no room."""
        slot = self.ring.claim(nbytes)
        if slot is None and self.free(1, self.ring.large(nbytes)):
            slot = self.ring.claim(nbytes)
        return slot

    def put(self, message: Encoded, size: int, code: int) -> bool:
        """Publish an encoded message to all readers; return False if there is no room."""
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
        self.ring.copied += size
        pack_header(slot.header, 0, kind, code, 0, len(buffers), self.ring.seq, monotonic_ns(), sum(map(len, parts)))
        self._commit()
        return True

    def put_raw(self, slot: Slot, nbytes: int) -> None:
        """Publish a claimed slot with ``nbytes`` of raw message."""
        self.ring.claimed_bytes = nbytes
        pack_header(slot.header, 0, RAW, 0, 0, 0, self.ring.seq, monotonic_ns(), nbytes)
        self._commit()

    def put_placed(self, slot: Slot, extent: Extent, placed: Placed, code: int) -> None:
        """Publish a message that was written in place, in the claimed slot's extent."""
        ring = self.ring
        kind = INLINE
        window = extent.window
        assert window is not None
        window.write(0, pack_place(placed.table))
        window.write(placed.table, placed.tail)
        del window
        self.loans.take_back(extent)  # before any reader sees the message
        if extent.is_segment:
            assert isinstance(self.overflow, OverflowSegments)
            kind = OVERFLOW
            self.overflow.mark(slot.header, extent.number, placed.end)
        ring.copied += placed.copied
        ring.claimed_bytes = placed.end
        header = (kind, code, PLACED, placed.n_buffers, ring.seq, monotonic_ns(), placed.main_bytes)
        pack_header(ring.slots.bodies, slot.begin, *header)
        self._commit()

    def _commit(self) -> None:
        ring = self.ring
        ring.published_ns = monotonic_ns()
        ring.budget -= 1
        if ring.published_ns >= ring.budget_ends_ns:
            ring.budget = 0
        if ring.commit():
            self.wake_readers()

    # Closing

    def announce_close(self) -> None:
        """Notify the readers that the writer closes."""
        self.listener.look_at_readers()  # nothing is delivered to readers that are gone
        self.ring.set_writer_state(closed=True, pid=os.getpid())
        self.listener.close()

    def close(self) -> None:
        """Release all resources but messages that have yet to be delivered. Idempotent."""
        self.listener.close()
        self.loans.close()
        self.overflow.close()
        self.ring.close()
        self.buffer.close()

    async def finish(self) -> None:
        """Wait until the readers have received every message, or are gone."""
        while not self.overflow.finished():  # noqa: ASYNC110 - a thread delivers, even after the loop has ended
            await asyncio.sleep(CLOSING_POLL_S)
