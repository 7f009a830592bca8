"""A local reader's resources: the lifeline, the ring, the overflow, and the waker of the writer."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from aioshm.errors import HandleError, PeerClosed
from aioshm.lifeline.dialer import Lifeline, attach
from aioshm.lifeline.protocol import CLOSED, Hello, Welcome
from aioshm.lifeline.sockets import socket_file
from aioshm.process.limits import naming_limits
from aioshm.process.loop_thread import shared_loop
from aioshm.queue.handle import Handle
from aioshm.queue.local.overflow import OverflowReader, PassedSegments
from aioshm.queue.state import EndState
from aioshm.ring import RingReader, ShmRingBuffer

if TYPE_CHECKING:  # readers of segments need no ZeroMQ
    from aioshm.queue.local.overflow_sockets import OverflowSubscriber


class Attachment:
    """The resources of an attached reader, created by `make`; `close` releases them, the lifeline last."""

    def __init__(
        self,
        lifeline: Lifeline,
        buffer: ShmRingBuffer,
        ring: RingReader,
    ) -> None:
        self.lifeline = lifeline  # the connection to the writer; not started
        self.buffer = buffer
        self.ring = ring
        self.rank: int = lifeline.welcome.rank
        # Receives messages that do not fit a chunk.
        self.overflow: OverflowReader = PassedSegments(lifeline.welcome.secret, lifeline)

    @classmethod
    async def make(
        cls,
        handle: Handle,
        hello: Hello,
        sock: socket.socket | None,
        prefault_bytes: int,
        changed: Callable[[], None],  # called when a body arrives
    ) -> Attachment:
        """Wait until the writer has admitted this reader, then map the ring."""
        lifeline = await attach(handle.lifeline, hello, sock)
        welcome = lifeline.welcome
        with ExitStack() as undo:
            undo.callback(lifeline.close)
            try:
                buffer = _map(handle, lifeline)
            except HandleError:
                if lifeline.has_closed():  # then the segment has no name
                    raise PeerClosed(CLOSED.reason) from None
                raise
            undo.callback(buffer.close)
            if not welcome.going:  # else the slots have messages, and are touched anyway
                buffer.prefault(prefault_bytes, write=False)
            if welcome.rank not in handle.local_reader_ranks:
                raise HandleError(f"the writer knows a rank {welcome.rank}, the handle does not")
            ring = buffer.reader(handle.local_reader_ranks.index(welcome.rank))
            ring.start_at(welcome.first)
            undo.callback(ring.close)
            attachment = cls(lifeline, buffer, ring)
            if handle.options.overflow == "zmq":
                attachment.overflow = _subscriber(handle, welcome, changed)
            undo.pop_all()
        return attachment

    def close(self) -> None:
        """Release all resources. No call may use the ring afterwards."""
        self.overflow.close()
        self.ring.close()
        self.buffer.close()
        self.lifeline.close()


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


def _subscriber(handle: Handle, welcome: Welcome, changed: Callable[[], None]) -> OverflowSubscriber:
    with naming_limits("a reader"):  # imported here: readers of segments need no ZeroMQ
        from aioshm.queue.local.overflow_sockets import OverflowSubscriber
    endpoint = f"ipc://{socket_file(handle.options, handle.queue_id, 'overflow')}"
    return OverflowSubscriber(endpoint, welcome.secret, welcome.rank, handle.options.remote_timeout, changed)


def _map(handle: Handle, lifeline: Lifeline) -> ShmRingBuffer:
    if lifeline.welcome.segment:
        return ShmRingBuffer.from_fd(handle.layout, lifeline.take_segment(), handle.queue_id, reads=True)
    if handle.segment is None:
        raise HandleError("the handle names no segment, and the writer sent none")
    return ShmRingBuffer.from_name(handle.layout, handle.segment, handle.queue_id, reads=True)
