"""What a local reader holds of its queue: the lifeline, the mapped ring, what did not fit a chunk."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from aioshm.errors import HandleError, PeerClosed
from aioshm.lifeline.dialer import Lifeline, attach
from aioshm.lifeline.protocol import CLOSED, Hello
from aioshm.queue.handle import Handle
from aioshm.queue.local.overflow import PassedSegments
from aioshm.ring import RingReader, ShmRingBuffer
from aioshm.ring.copying import CopyingCore
from aioshm.ring.cores import ReaderCore

if TYPE_CHECKING:  # who has segments needs no ZeroMQ
    from aioshm.queue.local.overflow_sockets import OverflowSubscriber


class Attachment:
    """Made by `make`; `close` gives everything back and says goodbye last."""

    def __init__(
        self,
        lifeline: Lifeline,
        buffer: ShmRingBuffer,
        ring: RingReader,
        subscriber: Callable[[bytes, int], OverflowSubscriber],
    ) -> None:
        self.lifeline = lifeline  # the connection to the writer; not started
        self.buffer = buffer
        self.ring = ring
        secret, rank = lifeline.welcome.secret, lifeline.welcome.rank
        self.rank: int = rank
        # Where messages are that did not fit a chunk.
        self.overflow: PassedSegments = PassedSegments(
            ring, secret, lifeline.look, lambda: lifeline.holds_back, lambda: subscriber(secret, rank)
        )

    @classmethod
    async def make(
        cls,
        handle: Handle,
        hello: Hello,
        sock: socket.socket | None,
        prefault_bytes: int,
        subscriber: Callable[[bytes, int], OverflowSubscriber],
    ) -> Attachment:
        """Wait until the writer has admitted this reader, then map the ring.

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
            ring.start_at(welcome.first)
        except BaseException as error:
            closed = isinstance(error, HandleError) and lifeline.has_closed()  # its segment has no name any more then
            lifeline.close()
            if closed:
                raise PeerClosed(CLOSED.reason) from None
            raise
        attachment = cls(lifeline, buffer, ring, subscriber)
        if handle.options.overflow == "zmq":
            try:
                attachment.overflow.subscribe()
            except BaseException:
                attachment.close()
                raise
        return attachment

    @property
    def segment_fd(self) -> int:
        """The segment's descriptor, which stays this object's."""
        return self.buffer.fd

    def close(self) -> None:
        """Give everything back. Nothing may use the ring any more."""
        self.overflow.close()
        self.ring.close()
        self.buffer.close()
        self.lifeline.close()


def _map(handle: Handle, lifeline: Lifeline) -> ShmRingBuffer:
    if lifeline.welcome.segment:
        return ShmRingBuffer.from_fd(handle.layout, lifeline.take_segment(), handle.queue_id, reads=True)
    if handle.segment is None:
        raise HandleError("the handle names no segment, and the writer sent none")
    return ShmRingBuffer.from_name(handle.layout, handle.segment, handle.queue_id, reads=True)
