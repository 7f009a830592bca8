"""What a local reader holds of its queue: the lifeline, the ring, overflow segments, and how to wake the writer."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

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
from aioshm.ring.cores import CopyingCore, ReaderCore

if TYPE_CHECKING:  # readers of segments need no ZeroMQ
    from aioshm.queue.local.overflow_sockets import OverflowSubscriber


class Attachment:
    """Made by `make`; `close` gives everything back and says goodbye last."""

    def __init__(
        self,
        lifeline: Lifeline,
        buffer: ShmRingBuffer,
        ring: RingReader,
        overflow: OverflowReader,
    ) -> None:
        self.lifeline = lifeline  # the connection to the writer; not started
        self.buffer = buffer
        self.ring = ring
        self.rank: int = lifeline.welcome.rank
        self.overflow = overflow  # receives messages that do not fit a chunk

    @classmethod
    async def make(
        cls,
        handle: Handle,
        hello: Hello,
        sock: socket.socket | None,
        prefault_bytes: int,
        changed: Callable[[], None],
    ) -> Attachment:
        """Wait until the writer has admitted this reader, then map the ring; ``changed``: a body has arrived.

        Raises:
            HandleError: The queue is gone, refused this reader, or is not what the handle says.
            PeerClosed: The writer has closed the queue.
            PeerDied: The writer died meanwhile.
        """
        lifeline = await attach(handle.lifeline, hello, sock)
        try:
            buffer = _map(handle, lifeline)
            welcome = lifeline.welcome
            if not welcome.going:  # else its messages are there already, and each touch of theirs maps 64 KiB
                buffer.prefault(prefault_bytes, write=False)
            if welcome.rank not in handle.local_reader_ranks:
                raise HandleError(f"the writer knows a rank {welcome.rank}, the handle does not")
            core: Any = ReaderCore if hello.slow == "block" else CopyingCore
            ring = buffer.reader(handle.local_reader_ranks.index(welcome.rank), core)
            ring.core.start_at(welcome.first)
            overflow: OverflowReader = PassedSegments(welcome.secret, lifeline)
            if handle.options.overflow == "zmq":
                overflow = _subscriber(handle, welcome, changed)
        except BaseException as error:
            closed = isinstance(error, HandleError) and lifeline.has_closed()  # its segment has no name any more then
            lifeline.close()
            if closed:
                raise PeerClosed(CLOSED.reason) from None
            raise
        return cls(lifeline, buffer, ring, overflow)

    def close(self) -> None:
        """Give everything back. Nothing may use the ring any more."""
        self.overflow.close()
        self.ring.close()
        self.buffer.close()
        self.lifeline.close()


class WriterWaker:
    """Wakes the writer, but not for each slot: it would fill that one and go to sleep again.

    Within one turn of the loop it is woken once, or when half of what lies between the message that it waits for and
    the latest has become free: half of the ring, or half of the chunks of one size.
    """

    def __init__(self, state: EndState, ring: RingReader, lifeline: Lifeline, loop: asyncio.AbstractEventLoop) -> None:
        self._state = state
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
            if self._state.on_its_thread:
                self._loop.call_soon(self.wake)
            else:  # a thread has received the message
                shared_loop().post(self.wake)
            self.pending = True  # last: a signal's handler may interrupt this
        if seq >= self.due:
            self.wake()

    def wake(self) -> None:
        """Wake the writer if it can go on."""
        self.pending = False  # first: as above
        if not self.closed and not self._state.dismantled and self._ring.writer_can_go_on():
            self._ring.writer_parked[0] = 0  # one ring is enough until it wakes
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
