"""Receiving from the ring: a local reader dials when it is made, attaches when it is first awaited."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any

from aioshm.codec import Codec
from aioshm.config import SlowReader
from aioshm.errors import AioshmError, HandleError, MessagesLost, PeerClosed, PeerDied, SharedMemoryError
from aioshm.lifeline.dialer import Lifeline, dial, hang_up
from aioshm.lifeline.protocol import Hello
from aioshm.lifeline.sockets import Doorbell, peer_credentials
from aioshm.process.limits import naming_limits
from aioshm.process.watch import SUSPECT_STATES, process_state
from aioshm.queue.handle import Handle
from aioshm.queue.local.attachment import Attachment, WriterWaker
from aioshm.queue.local.copying import CopyingSlots, eviction
from aioshm.queue.local.leases import Leases
from aioshm.queue.local.slots import SlotReader
from aioshm.queue.source import Source, SourceBlock, findings, nothing
from aioshm.queue.state import EndState
from aioshm.queue.stats import QueueStats
from aioshm.ring import RingReader
from aioshm.ring.copying import CopyingCore
from aioshm.ring.layout import VERSION
from aioshm.wait.cpus import usable_cpus
from aioshm.wait.limits import seconds

logger: logging.Logger = logging.getLogger("aioshm.queue")


class RingSource(Source):
    """The ring of a writer on this host; see `Source`.

    Raises:
        HandleError: The queue is gone, or is another host's or user's.
        OutOfDescriptors: None is left.
    """

    # Set when the writer has admitted this reader, before which nothing that uses them runs.
    _slots: SlotReader | CopyingSlots
    settle: Callable[[], None]
    take: Callable[[], Any]
    take_many: Callable[[int], list[Any]]
    has_message: Callable[[], bool]
    poll: Callable[[], bool]
    gone: Callable[[], AioshmError] | None = None
    _lifeline: Lifeline
    _cursor: RingReader
    ring: RingReader | None

    def __init__(
        self,
        state: EndState,
        handle: Handle,
        rank: int,
        codec: Codec,
        slow: SlowReader,
        history: int = 0,
        failed: Callable[[AioshmError], None] | None = None,
    ) -> None:
        self._state = state
        self._handle = handle
        self._rank = rank
        self._codec = codec
        self._failed = failed or (lambda error: state.refuse(lambda: error))
        self.receive: Callable[[], Any] = nothing
        self.has_message = bool
        self.poll = bool
        self._closed = False
        self.attachment: Attachment | None = None  # what this holds of the queue, once it is attached
        self.waker: WriterWaker | None = None
        self._attaching: asyncio.Task[None] | None = None
        self._hello = Hello(VERSION, handle.queue_id, handle.token, rank, os.getpid(), slow, history)
        self._dialled_pid = 0  # the process that listens, as this one sees it
        self._sock: socket.socket | None = dial(handle.lifeline, self._hello)
        if self._sock is not None:
            self._dialled_pid = peer_credentials(self._sock)[0]

    # Attaching

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._attaching is None:
            # A task of its own, so that a caller that gives up and comes back finds it where it was.
            self._attaching = loop.create_task(self._attach(loop))
            self._attaching.add_done_callback(self._attached)

    async def _attach(self, loop: asyncio.AbstractEventLoop) -> None:
        state = self._state
        sock, self._sock = self._sock, None
        usable_cpus()  # is asked for again once the writer has answered, which takes longer than this does
        with naming_limits(f"{state!r}"):
            self.attachment = attachment = await Attachment.make(
                self._handle, self._hello, sock, state.options.prefault_bytes, state.interrupt
            )
        self._lifeline, self._cursor = lifeline, ring = attachment.lifeline, attachment.ring
        self._rank = attachment.rank
        state.use(ring.core)
        state.rates.begin(monotonic(), lifeline.welcome.first)
        self.waker = waker = WriterWaker(state, ring, lifeline, loop)

        def make_leases() -> Leases:
            fd, layout = attachment.segment_fd, ring.layout
            return Leases(fd, layout, ring.core, loop, waker.slot_is_free, self._may_keep)

        slots: SlotReader | CopyingSlots
        if isinstance(core := ring.core, CopyingCore):
            slots = CopyingSlots(state, ring, core, self._codec, attachment.overflow)
        else:
            slots = SlotReader(state, ring, self._codec, attachment.overflow, waker, make_leases)
        self._slots = slots
        self.settle, self.take, self.take_many = slots.settle, slots.take, slots.take_many
        self.has_message = self.poll = ring.ready
        self.ring, self.receive = ring, ring.core.receive
        lifeline.start(
            self._on_go,
            state.wake,
            self._on_writer_gone,
            self._on_descriptor,
            state.interrupt,
            self._on_evicted,
        )
        lifeline.prove()
        if lifeline.welcome.going:
            self._on_go()

    def _attached(self, attaching: asyncio.Task[None]) -> None:
        if attaching.cancelled():
            return
        error = attaching.exception()
        if error is not None and self._state.refusal is None:
            self._failed(error if isinstance(error, AioshmError) else HandleError(f"cannot attach: {error}"))

    # What the lifeline tells

    def _on_go(self) -> None:
        state = self._state
        if state.poller is None:
            state.new_poller(self._cursor, self.other_ends(), self._lifeline.doorbell)
        state.ready = True
        state.reopen()
        state.interrupt()

    def _on_writer_gone(self, said_goodbye: bool) -> None:
        assert self.attachment is not None
        self.attachment.overflow.after_last(functools.partial(self._writer_gone, said_goodbye))

    def _writer_gone(self, said_goodbye: bool) -> None:
        state = self._state
        if self._cursor.evicted():
            self.gone = functools.partial(eviction, state, self._cursor)
        elif said_goodbye or self._cursor.writer_closed():  # its goodbye may have found no room in a full socket
            self.gone = lambda: PeerClosed(f"{state!r}: the writer has closed the queue")
        else:
            self.gone = functools.partial(PeerDied, -1, self._lifeline.welcome.pid, "writer", f"queue {state.name}")
        state.interrupt()

    def _on_descriptor(self, fd: int | None) -> None:
        assert self.attachment is not None
        self.attachment.overflow.arrived(fd)
        self._state.interrupt()  # where bells are bytes on the same socket, this one may have left no room for them

    def _on_evicted(self) -> None:
        self._state.refuse(functools.partial(eviction, self._state, self._cursor))
        with suppress(SharedMemoryError):  # there is no memory for a copy
            self.settle()  # at once: the writer does not wait for what is kept any more

    def _may_keep(self) -> bool:
        """Return whether what a lease has kept may be kept on, as `Leases` has it."""
        cursor = self._cursor  # a writer that was woken is parked until it runs
        if not self._state.waits:
            return False
        # With a message there the call ends at once, and what was kept goes back when the next block ends.
        return cursor.core.ready() or not cursor.writer_parked[0] or cursor.messages_wanted() > 1

    @property
    def doorbell(self) -> Doorbell | None:
        return None if self.attachment is None else self._lifeline.doorbell

    def other_ends(self) -> list[int]:
        others = self._cursor.reader_pids()
        others[self._cursor.reader] = self._lifeline.writer_pid  # in its place: this end is no other
        return others

    # Receiving

    def open_block(self, *, decoded: bool) -> SourceBlock | None:
        return self._slots.open_block(decoded=decoded)

    def lost(self) -> AioshmError:
        seq = self.progress
        if self._lifeline.said_goodbye or self._cursor.writer_closed():
            return MessagesLost(seq, self._cursor.messages_written() - 1)
        return PeerDied(-1, self._lifeline.welcome.pid, "writer", f"with the body of message {seq}")

    def traces(self, most: int, /) -> list[bytes]:
        return [] if self.attachment is None else self._cursor.core.traces(most)

    def wake_writer(self) -> None:
        if self.waker is not None:
            self.waker.slot_is_free()

    # What is known of the writer

    @property
    def writer_pid(self) -> int:
        return 0 if self.attachment is None else self._lifeline.welcome.pid

    @property
    def progress(self) -> int:
        return 0 if self.ring is None else self._cursor.core.seq

    def ask_writer(self) -> bool:
        if self.attachment is None or process_state(self._lifeline.writer_pid) in SUSPECT_STATES:
            return False
        self._lifeline.ask()
        return True

    def too_late(self) -> Exception:
        return TimeoutError(f"{self._state!r}: {self.why_not_ready()}")

    def why_not_ready(self) -> str:
        """Say what this end waits for before it is ready."""
        if self.attachment is None:
            return "the writer does not answer: does its event loop run, in wait_until_ready()?"
        return "other readers are missing"

    def _answers(self) -> bool:
        lifeline = self._lifeline
        return lifeline.silent_s is None and process_state(lifeline.writer_pid) not in SUSPECT_STATES

    def _findings(self) -> tuple[int, str]:
        """Return at which level to log what is known of the writer, and the words."""
        lifeline = self._lifeline
        who, state = f"the writer (pid {lifeline.welcome.pid})", process_state(lifeline.writer_pid)
        return findings(who, state, lifeline.silent_s, self._handle.answers)

    def report_waiting(self, waited_s: float) -> None:
        if not self._state.ready:
            self._report_not_ready(waited_s)
            return
        level, about = self._findings()
        what, ring = "message", self._cursor
        if ring.ready():
            level, what = logging.WARNING, "the body of message"  # which was sent before
        elif self._answers() and ring.writer_parked[0] and (others := ring.laggards()):
            about = f"the writer (pid {self._lifeline.welcome.pid}) answers, and there is nothing to read"
            level, about = logging.WARNING, f"{about}, because the writer waits for {self._named(others)}"
        logger.log(
            level,
            "%r, rank %d: waited %s for %s %d: %s",
            self._state,
            self._rank,
            seconds(waited_s),
            what,
            self.progress,
            about,
        )

    def _report_not_ready(self, waited_s: float) -> None:
        about = ""
        if self.attachment is not None:
            about = f"; {self._findings()[1]}"
        elif self._dialled_pid:
            about = f" (it has pid {self._dialled_pid} and is {process_state(self._dialled_pid)})"
        logger.warning("%r: waited %s: %s%s", self._state, seconds(waited_s), self.why_not_ready(), about)

    def _named(self, readers: Sequence[int]) -> str:
        pids, ranks = self._cursor.reader_pids(), self._handle.local_reader_ranks
        return ", ".join(f"rank {ranks[reader]} (pid {pids[reader]})" for reader in readers) + " to read"

    # Telling about itself

    def stats(self) -> QueueStats:
        ring = self.ring
        if ring is None or self._closed:
            return self._state.new_stats("reader", self._rank, messages=self.progress)
        return self._state.new_stats(
            "reader",
            self._rank,
            messages=self.progress,
            max_chunks=ring.layout.max_chunks,
            slots=ring.layout.slots,
            overflows=self._slots.overflows,
            backlog=ring.messages_written() - self.progress,
            bytes=ring.bytes_read(ring.reader),
            latency=ring.reader_row(ring.reader).latency,
        )

    # Closing

    # No goodbye before `close`: once the writer knows, it overwrites what a block may still be reading.

    def close(self) -> None:
        attaching, loop = self._attaching, self._state.loop
        if attaching is not None and loop is not None:
            if not loop.is_closed():
                attaching.cancel()
            elif not attaching.done():
                with suppress(RuntimeError):  # it leaves the loop, which is closed
                    attaching.get_coro().close()
        if self._sock is not None:
            hang_up(self._sock)
        self._closed = True
        if self.waker is not None:
            self.waker.closed = True
        if self.ring is not None:
            self._slots.close()
        if self.attachment is not None:
            self.attachment.close()

    def finished(self) -> bool:
        return self._attaching is None or self._attaching.done() or self._attaching.get_loop().is_closed()

    async def finish(self) -> None:
        if self._attaching is not None and not self.finished():
            await asyncio.wait({self._attaching})

    def detach_after_fork(self) -> None:
        if self._sock is not None:
            os.close(self._sock.detach())
        if self.attachment is not None:
            self.attachment.lifeline.detach_after_fork()
