"""Messages to remote readers: encoded once, kept until all readers have them, sent as often as need be."""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic_ns
from typing import TYPE_CHECKING

import zmq

from aioshm.codec import Encoded
from aioshm.codec.frames import HEADER, message_bytes, write_body
from aioshm.config import Options
from aioshm.queue.remote import wire
from aioshm.queue.remote.data_sockets import MessageMemory
from aioshm.queue.remote.window import SendWindow
from aioshm.queue.remote.wire import ADDRESS_BYTES, BODY_APART, ONE_FRAME_BYTES, TRACED
from aioshm.ring.layout import TRACE_BYTES

if TYPE_CHECKING:  # who sends large messages to local readers has no such sockets
    from aioshm.queue.remote.writer_sockets import WriterSockets


class Outgoing:
    """One message."""

    __slots__ = ("body", "head", "nbytes", "trackers")

    def __init__(self, head: bytes, body: bytes | memoryview | None = None) -> None:
        self.head: bytes = head  # the first frame, without whom it is for
        self.body: bytes | memoryview | None = body  # the second frame, if there is one
        self.nbytes: int = ADDRESS_BYTES + len(head) + (0 if body is None else len(body))  # of both
        self.trackers: list[zmq.MessageTracker] = []

    def used(self) -> bool:
        """Return whether ZeroMQ still reads the body."""
        if self.trackers:
            self.trackers = [tracker for tracker in self.trackers if not tracker.done]
        return bool(self.trackers)


class Outbox:
    """Makes messages, and counts those that ZeroMQ still reads once nobody needs them."""

    def __init__(self) -> None:
        self._used: list[Outgoing] = []
        self.nbytes: int = 0  # size of those that were let go of while ZeroMQ still reads them

    def pack(
        self,
        kind: int,
        codec: int,
        seq: int,
        parts: Sequence[bytes | memoryview],
        buffers: Sequence[memoryview],
        size: int,
        trace: bytes = b"",
    ) -> Outgoing:
        """Return a message with a copy of all that the caller may change."""
        apart = size > ONE_FRAME_BYTES
        main_bytes, flags = sum(map(len, parts)), (BODY_APART if apart else 0) | (TRACED if trace else 0)
        header = HEADER.pack(kind, codec, flags, len(buffers), seq, monotonic_ns(), main_bytes) + trace
        if not apart:
            if not buffers:
                return Outgoing(b"".join((header, *parts)))
            gathered = bytearray(len(header) + size)
            gathered[: len(header)] = header
            write_body(memoryview(gathered)[len(header) :], parts, buffers)
            return Outgoing(bytes(gathered))
        if len(parts) == 1 and not buffers and type(parts[0]) is bytes:
            return Outgoing(header, parts[0])
        body = memoryview(MessageMemory(size))
        write_body(body, parts, buffers)
        return Outgoing(header, body)

    def let_go(self, messages: Sequence[Outgoing]) -> None:
        """Forget messages that need not be sent any more."""
        for message in messages:
            if message.used():
                self._used.append(message)
                self.nbytes += message.nbytes

    def tidy(self) -> None:
        """Look which of the messages that were let go of ZeroMQ does not read any more."""
        if self._used:
            used, self._used = self._used, []
            self.nbytes = 0
            self.let_go(used)


class Flow:
    """The window of messages that readers may still need, and the memory that they lie in."""

    def __init__(self, sockets: WriterSockets, secret: bytes, options: Options) -> None:
        self._sockets = sockets
        self._secret = secret
        self._everyone = wire.address(secret)
        self.window: SendWindow[Outgoing] = SendWindow(
            options.remote_window, options.remote_window_bytes, options.remote_history
        )
        self.outbox: Outbox = Outbox()
        self.resent: int = 0
        self._head_bytes = wire.HEAD_BYTES + (TRACE_BYTES if options.trace_context else 0)

    @property
    def kept(self) -> int:
        """How many messages are kept because some reader may need them again."""
        return len(self.window)

    @property
    def kept_bytes(self) -> int:
        """Their size."""
        return self.window.nbytes + self.outbox.nbytes

    # Sending

    def room(self, messages: int, nbytes: int) -> bool:
        """Return whether the window has room for so much more."""
        if self.outbox.nbytes:
            self.outbox.tidy()
        return self.window.room(messages, nbytes, self.outbox.nbytes)

    def waits_for_zeromq(self) -> bool:
        """Return whether what takes the room is only what ZeroMQ has not let go of, which nobody tells of."""
        return self.outbox.nbytes > 0

    def room_for(self, *messages: Encoded) -> bool:
        """Return whether the window has room for some encoded messages."""
        return self.room(len(messages), sum(map(self._window_bytes, messages)))

    def room_for_bytes(self, nbytes: int) -> bool:
        """Return whether the window has room for a message of so many bytes."""
        return self.room(1, self._head_bytes + nbytes)

    def parts(self, messages: list[Encoded]) -> list[list[Encoded]]:
        """Divide messages into runs that may go together."""
        parts = []
        while messages:
            count = self.window.part(list(map(self._window_bytes, messages)))
            parts.append(messages[:count])
            messages = messages[count:]
        return parts

    def publish(self, message: Outgoing) -> None:
        """Send the next message to every reader."""
        if not self.window.readers:
            self.outbox.let_go(self.window.sent(message))
            return
        self.window.sent(message)
        self._transmit(self._everyone, message)

    def _transmit(self, whom: bytes, message: Outgoing) -> None:
        for head, body in wire.parts(whom + message.head, message.body):
            tracker = self._sockets.publish(head, body)
            if tracker is not None:
                message.trackers.append(tracker)

    def resend(self, rank: int, first: int, last: int) -> tuple[int, int] | None:
        """Send a run of messages to one reader again; return what run of it is lost for good.

        Raises:
            WireError: Some of it was never sent.
        """
        messages, lost = self.window.resend(rank, first, last)
        whom = wire.address(self._secret, rank)
        for _seq, message in messages:
            self.resent += 1
            self._transmit(whom, message)
        return lost

    def acknowledged(self, rank: int, consumed: int) -> bool:
        """Note how far a reader is; return whether that makes room.

        Raises:
            WireError: It cannot have what was not sent.
        """
        free = self.window.acknowledged(rank, consumed)
        if free:
            self.outbox.let_go(free)
        return bool(free)

    def leave(self, rank: int) -> None:
        """Count on a reader no more."""
        self.outbox.let_go(self.window.leave(rank))

    def _window_bytes(self, message: Encoded) -> int:
        """Return what a message takes of the window, at most."""
        return self._head_bytes + message_bytes(message)
