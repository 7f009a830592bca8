"""What a writer sends to its remote readers, and keeps until all of them have it."""

from __future__ import annotations

from aioshm.codec import Encoded
from aioshm.config import Options
from aioshm.queue.encoded import message_bytes
from aioshm.queue.remote import wire
from aioshm.queue.remote.outgoing import Outbox, Outgoing
from aioshm.queue.remote.window import SendWindow
from aioshm.queue.remote.writer_sockets import WriterSockets
from aioshm.ring.layout import TRACE_BYTES


class Flow:
    """A window of messages, and the memory that they lie in.

    Args:
        sockets: What they are sent through.
        secret: What data messages begin with.
        options: The window's size.

    Attributes:
        window: What readers may still need.
        outbox: Makes messages.
        resent: How many were sent again.
    """

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
