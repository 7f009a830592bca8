"""A local reader's source: dials the writer when it is created, attaches when it is first awaited."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from time import monotonic
from typing import Any

from aioshm.codec import Codec
from aioshm.config import SlowReader
from aioshm.errors import AioshmError, HandleError, MessagesLost, PeerClosed, PeerDied, SharedMemoryError, copy_error
from aioshm.lifeline.dialer import Lifeline, attach, dial, hang_up
from aioshm.lifeline.protocol import CLOSED, Hello
from aioshm.lifeline.sockets import Doorbell, peer_credentials, socket_file
from aioshm.process.limits import naming_limits
from aioshm.process.proc import HUNG_STATES, process_state
from aioshm.queue.handle import Handle
from aioshm.queue.local.copying import CopyingSlots, eviction, refused
from aioshm.queue.local.leases import WriterWaker
from aioshm.queue.local.overflow import OverflowReader, PassedSegments
from aioshm.queue.local.slots import SlotReader
from aioshm.queue.source import Source, findings, nothing
from aioshm.queue.state import EndState
from aioshm.queue.stats import QueueStats
from aioshm.ring import RingReader, ShmRingBuffer
from aioshm.ring.layout import VERSION
from aioshm.wait.limits import seconds

logger: logging.Logger = logging.getLogger("aioshm.queue")


class RingSource(Source):
    """The ring of a writer on this host."""

    # Set when the writer has admitted this reader.
    _slots: SlotReader | CopyingSlots
    settle: Callable[[], None]
    take: Callable[[], Any]
    take_many: Callable[[int], list[Any]]
    has_message: Callable[[], bool]
    poll: Callable[[], bool]
    buffer: ShmRingBuffer
    overflow: OverflowReader  # receives messages that do not fit a chunk
    lifeline: Lifeline
    gone: Callable[[], AioshmError] | None = None
    ring: RingReader | None  # the last of these to be set

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
        self._failed = failed or (lambda error: state.refuse(functools.partial(copy_error, error)))
        self.receive: Callable[[], Any] = nothing
        self.has_message = bool
        self.poll = bool
        self._closed = False
        self.ring = None
        self.waker: WriterWaker | None = None
        self._attaching: asyncio.Task[None] | None = None
        self._hello = Hello(VERSION, handle.queue_id, handle.token, rank, os.getpid(), slow, history)
        self._dialled_pid = 0  # the listening process, in this process's pid namespace
        self._sock: socket.socket | None = dial(handle.lifeline, self._hello)
        if self._sock is not None:
            self._dialled_pid = peer_credentials(self._sock)[0]

    # Attaching

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._attaching is None:
            # A task of its own: a cancelled caller that calls again finds it where it was.
            self._attaching = loop.create_task(self._attach(loop))
            self._attaching.add_done_callback(self._attached)

    async def _attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wait until the writer has admitted this reader, then map the ring."""
        state = self._state
        handle = self._handle
        sock = self._sock
        self._sock = None
        with naming_limits(f"{state!r}"), ExitStack() as undo:
            lifeline = await attach(handle.lifeline, self._hello, sock)
            undo.callback(lifeline.close)
            welcome = lifeline.welcome
            try:
                buffer = self._map(lifeline)
            except HandleError:
                if lifeline.has_closed():  # then the segment has no name
                    raise PeerClosed(CLOSED.reason) from None
                raise
            undo.callback(buffer.close)
            if not welcome.going:  # else the slots have messages, and are touched anyway
                buffer.prefault(state.options.prefault_bytes, write=False)
            if welcome.rank not in handle.local_reader_ranks:
                raise HandleError(f"the writer knows a rank {welcome.rank}, the handle does not")
            ring = buffer.reader(handle.local_reader_ranks.index(welcome.rank))
            ring.start_at(welcome.first)
            undo.callback(ring.close)
            self.overflow = self._receiver(lifeline)
            undo.callback(self.overflow.close)
            self.lifeline = lifeline
            self.buffer = buffer
            self._rank = welcome.rank
            state.use(ring)
            state.rates.begin(monotonic(), welcome.first)
            self.waker = WriterWaker(state, ring, lifeline, loop)
            self.has_message = ring.ready
            self.receive = ring.receive
            if self._hello.slow == "block":
                self._slots = SlotReader(state, buffer, ring, self._codec, self.overflow, self.waker)
            else:
                self._slots = CopyingSlots(state, ring, self._codec, self.overflow)
                self.has_message = self._slots.ready
                self.receive = self._slots.receive
            self.poll = self.has_message
            self.settle = self._slots.settle
            self.take = self._slots.take
            self.take_many = self._slots.take_many
            self.open_block = self._slots.open_block  # type: ignore[method-assign]
            undo.pop_all()
        self.ring = ring
        lifeline.start(self)
        lifeline.prove()
        if welcome.going:
            self.on_go()

    def _map(self, lifeline: Lifeline) -> ShmRingBuffer:
        handle = self._handle
        if lifeline.welcome.segment:
            return ShmRingBuffer.from_fd(handle.layout, lifeline.take_segment(), handle.queue_id, reads=True)
        if handle.segment is None:
            raise HandleError("the handle names no segment, and the writer sent none")
        return ShmRingBuffer.from_name(handle.layout, handle.segment, handle.queue_id, reads=True)

    def _receiver(self, lifeline: Lifeline) -> OverflowReader:
        """Return what receives messages that do not fit a chunk."""
        handle = self._handle
        welcome = lifeline.welcome
        if handle.options.overflow != "zmq":
            return PassedSegments(welcome.secret, lifeline)
        from aioshm.queue.local.overflow_sockets import OverflowSubscriber  # imported here: most readers need no ZeroMQ

        endpoint = f"ipc://{socket_file(handle.options, handle.queue_id, 'overflow')}"
        timeout = handle.options.remote_timeout
        return OverflowSubscriber(endpoint, welcome.secret, welcome.rank, timeout, self._state.interrupt)

    def _attached(self, attaching: asyncio.Task[None]) -> None:
        error: BaseException | None = HandleError(f"{self._state!r}: attaching was cancelled, by another task")
        if not attaching.cancelled():
            error = attaching.exception()
        if error is None or self._closed or self._state.refusal is not None:
            return
        if not isinstance(error, AioshmError):
            error = HandleError(f"cannot attach: {error}")
        self._failed(error)

    @property
    def _ring(self) -> RingReader:
        assert self.ring is not None
        return self.ring

    # Callbacks of the lifeline

    def on_go(self) -> None:
        """Note that every reader is ready."""
        state = self._state
        if state.poller is None:
            state.new_poller(self._ring, self.other_ends(), self.lifeline.doorbell)
        state.ready = True
        state.reopen()
        state.interrupt()

    def on_wake(self) -> None:
        """Note a wake-up by the writer."""
        self._state.wake()

    def on_held_back(self) -> None:
        """Note that a descriptor waits in the socket, since this process has too many."""
        self._state.interrupt()

    def on_gone(self, said_goodbye: bool) -> None:
        """Note the end of the connection."""
        self.overflow.after_last(functools.partial(self._writer_gone, said_goodbye))

    def _writer_gone(self, said_goodbye: bool) -> None:
        state = self._state
        if self._ring.evicted():
            self.gone = functools.partial(eviction, state, self._ring)
        elif said_goodbye or self._ring.writer_closed():  # the goodbye may have found no room in a full socket
            self.gone = lambda: PeerClosed(f"{state!r}: the writer has closed the queue")
        else:
            self.gone = functools.partial(PeerDied, -1, self.lifeline.welcome.pid, "writer", f"queue {state.name}")
        state.interrupt()

    def on_descriptor(self, fd: int | None) -> None:
        """Take over the descriptor of an overflow segment."""
        self.overflow.arrived(fd)
        self._state.interrupt()  # where wake-ups are bytes on the same socket, this one may have left no room for them

    def on_evicted(self) -> None:
        """Note that the writer continues without this reader."""
        refused(self._state, self._ring)
        with suppress(SharedMemoryError):  # there is no memory for a copy
            self.settle()  # now: the writer does not wait for a retained slot any more

    @property
    def doorbell(self) -> Doorbell | None:
        if self.ring is None:
            return None
        return self.lifeline.doorbell

    def other_ends(self) -> list[int]:
        if self.ring is None or self._closed:
            return []
        others = self.ring.reader_pids()
        others[self.ring.reader] = self.lifeline.writer_pid  # in place of this end's own pid
        return others

    # Receiving

    def lost(self) -> AioshmError:
        seq = self.progress
        if self.lifeline.said_goodbye or self._ring.writer_closed():
            return MessagesLost(seq, self._ring.messages_written() - 1)
        return PeerDied(-1, self.lifeline.welcome.pid, "writer", f"with the body of message {seq}")

    def traces(self, most: int, /) -> list[bytes]:
        if self.ring is None:
            return []
        return self._ring.traces(most)

    def wake_writer(self) -> None:
        if self.waker is not None:
            self.waker.slot_is_free()

    # The writer's state

    @property
    def writer_pid(self) -> int:
        if self.ring is None:
            return 0
        return self.lifeline.welcome.pid

    @property
    def progress(self) -> int:
        if self.ring is None:
            return 0
        return self.ring.seq

    def ask_writer(self) -> bool:
        if self.ring is None or process_state(self.lifeline.writer_pid) in HUNG_STATES:
            return False
        self.lifeline.ask()
        return True

    def too_late(self) -> Exception:
        return TimeoutError(f"{self._state!r}: {self.why_not_ready()}")

    def why_not_ready(self) -> str:
        """Return the reason why this end is not ready yet."""
        if self.ring is None:
            return "the writer does not answer: does its event loop run, in wait_until_ready()?"
        return "other readers are missing"

    def _findings(self) -> tuple[int, str]:
        """Return log level and text about the writer."""
        lifeline = self.lifeline
        writer = f"the writer (pid {lifeline.welcome.pid})"
        return findings(writer, process_state(lifeline.writer_pid), lifeline.silent_s, self._handle.answers)

    def report_waiting(self, waited_s: float) -> None:
        state = self._state
        if not state.ready:
            self._report_not_ready(waited_s)
            return
        level, about = self._findings()
        lifeline = self.lifeline
        answers = lifeline.silent_s is None and process_state(lifeline.writer_pid) not in HUNG_STATES
        awaited = "message"
        if self._ring.ready():  # the body was sent before its slot was published
            level = logging.WARNING
            awaited = "the body of message"
        elif answers and self._ring.writer_parked[0] and (others := self._ring.laggards()):
            level = logging.WARNING
            about = (
                f"the writer (pid {lifeline.welcome.pid}) answers, and there is nothing to read, because the writer "
                f"waits for {self._named(others)}"
            )
        text = "%r, rank %d: waited %s for %s %d: %s"
        logger.log(level, text, state, self._rank, seconds(waited_s), awaited, self.progress, about)

    def _report_not_ready(self, waited_s: float) -> None:
        about = ""
        if self.ring is not None:
            about = f"; {self._findings()[1]}"
        elif self._dialled_pid:
            about = f" (it has pid {self._dialled_pid} and is {process_state(self._dialled_pid)})"
        logger.warning("%r: waited %s: %s%s", self._state, seconds(waited_s), self.why_not_ready(), about)

    def _named(self, readers: Sequence[int]) -> str:
        pids = self._ring.reader_pids()
        ranks = self._handle.local_reader_ranks
        return ", ".join(f"rank {ranks[reader]} (pid {pids[reader]})" for reader in readers) + " to read"

    def stats(self) -> QueueStats:
        ring = self.ring
        if ring is None or self._closed:
            return self._state.new_stats("reader", self._rank, messages=self.progress)
        row = ring.reader_row(ring.reader)
        return self._state.new_stats(
            "reader",
            self._rank,
            messages=self.progress,
            max_chunks=ring.layout.max_chunks,
            slots=ring.layout.slots,
            overflows=self._slots.overflows,
            backlog=ring.messages_written() - self.progress,
            bytes=row.bytes,
            latency=row.latency,
        )

    # Closing

    # No goodbye before `close`: after a goodbye, the writer overwrites slots that a block may still be reading.

    def close(self) -> None:
        attaching = self._attaching
        loop = self._state.loop
        if attaching is not None and loop is not None:
            if not loop.is_closed():
                attaching.cancel()
            elif not attaching.done():
                with suppress(RuntimeError):  # the coroutine uses the closed loop
                    attaching.get_coro().close()
        if self._sock is not None:
            hang_up(self._sock)
        self._closed = True
        if self.waker is not None:
            self.waker.closed = True
        if self.ring is not None:
            try:
                self._slots.close()
            finally:  # also without memory for a view that is still held
                self.overflow.close()
                self.ring.close()
                self.buffer.close()
                self.lifeline.close()

    def finished(self) -> bool:
        return self._attaching is None or self._attaching.done() or self._attaching.get_loop().is_closed()

    async def finish(self) -> None:
        if self._attaching is not None and not self.finished():
            await asyncio.wait({self._attaching})

    def detach_after_fork(self) -> None:
        if self._sock is not None:
            os.close(self._sock.detach())
        if self.ring is not None:
            self.lifeline.detach_after_fork()
