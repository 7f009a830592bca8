"""The interface of what a reader's end receives from: the ring or the network."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from aioshm.errors import AioshmError
from aioshm.lifeline.bell import Bell
from aioshm.queue.ends.closing import Inside
from aioshm.ring import RingReader


class SourceBlock(Protocol):
    """The next message, while a block has it."""

    def open(self) -> Any:
        """Return what the block sees of it."""

    def close(self, *, undo: bool) -> None:
        """Finish with it, also if `open` has raised; ``undo``: leave it where it is."""


class TakenMessage:
    """A message that was received when the block began: nothing goes back at its end.

    Args:
        obj: The message, decoded.
    """

    def __init__(self, obj: Any) -> None:
        self._obj = obj

    def open(self) -> Any:
        obj, self._obj = self._obj, None
        return obj

    def close(self, *, undo: bool) -> None: ...


class Waker(Protocol):
    """Wakes a writer that is parked because its ring is full.

    Attributes:
        pending: Whether the loop is to wake it after its turn.
    """

    pending: bool

    def wake(self) -> None:
        """Wake the writer if it can go on."""


class Source(Inside, Protocol):
    """Where messages come from; used on its end's loop, by one task at a time. The gate closes it.

    Attributes:
        receive: Returns the next message, or `NOTHING` or `ELSEWHERE` if there is more to do than to take it; never
            waits.
        ring: The ring that this reads, if it reads one and has it by now.
    """

    receive: Callable[[], Any]
    ring: RingReader | None

    @property
    def gone(self) -> Callable[[], AioshmError] | None:
        """Once the writer is gone: makes the error that comes when everything it published has been read."""

    @property
    def waker(self) -> Waker | None:
        """What wakes the writer, once there is a ring."""

    # Attaching

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to attach, unless that was done; nothing waits for it."""

    def too_late(self) -> Exception:
        """Return the error of a wait for the other ends that has lasted too long."""

    # Receiving

    def ready(self) -> bool:
        """Return whether a message is there, be it only in part; cheap, without side effects."""

    def look(self) -> bool:
        """Return whether a message is there, be it only in part; look also where it may have come to."""

    def look_on(self) -> bool:
        """Return the same; look for as long as a call should before it waits."""

    def take(self) -> Any:
        """Return the next message, `NOTHING`, or `ELSEWHERE` if not all of it has arrived.

        Raises:
            CorruptSlot, CodecError, MessagesLost: The message was damaged; the next call returns the one behind it.
            SharedMemoryError, OutOfDescriptors: There is no room for it now; the next call tries again.
        """

    def take_many(self, most: int) -> list[Any]:
        """Return what is there: it ends before a message that is no ordinary one, which may be the first.

        Raises:
            CorruptSlot, CodecError, MessagesLost: The first message was damaged; the next call begins behind it.
        """

    def open_block(self, *, decoded: bool) -> SourceBlock | None:
        """Return the next message, which is there, for a block; None if not all of it has arrived.

        Args:
            decoded: Whether the block sees the object, decoded where it lies, or its bytes.

        Raises:
            CorruptSlot, MessagesLost: The message was damaged; the next call returns the one behind it.
        """

    def settle(self) -> None:
        """Finish with what the latest block has left, before anything else is read."""

    def quick(self) -> Callable[[], Any]:
        """Return what is `receive`, if possible without a look at sockets; asked of an end that is ready."""

    def lost(self) -> AioshmError:
        """Return the error if the writer is gone and the rest of the next message has not arrived."""

    def traces(self, most: int) -> list[bytes]:
        """Return the trace contexts of the messages that were taken last, as `ReaderCore.traces`."""

    # What is known of the other ends

    @property
    def writer_pid(self) -> int:
        """The writer's process as it sees itself, 0 while that is not known."""

    @property
    def progress(self) -> int:
        """How many messages were finished with."""

    def ask_writer(self) -> bool:
        """Ask whether the writer's event loop runs; return whether there is an answer to be waited for."""

    def report_waiting(self, waited_s: float) -> None:
        """Report for how many seconds what has been waited for, with what is known of the writer."""

    @property
    def bell(self) -> Bell | None:
        """What the writer wakes this end by, where that is a bell."""

    def other_ends(self) -> list[int]:
        """Return the process of each other end that this one shares CPUs with, 0 where that is not known."""

    def wake_writer(self) -> None:
        """Wake the writer if it is parked and can go on; may be interrupted, and then has to be called again."""
