"""The interface of a reader's source: the ring or the network."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from aioshm.errors import AioshmError
from aioshm.lifeline.doorbell import Doorbell
from aioshm.queue.ends.closing import Inside
from aioshm.ring import RingReader


class SourceBlock(Protocol):
    """The next message, while a block has it."""

    def open(self) -> Any:
        """Return the block's value."""

    def close(self, *, undo: bool) -> None:
        """Finish with it, also if `open` has raised; ``undo``: leave it where it is."""


class TakenMessage:
    """A message that was received when the block began: its end releases nothing."""

    def __init__(self, obj: Any) -> None:
        self._obj = obj

    def open(self) -> Any:
        obj, self._obj = self._obj, None
        return obj

    def close(self, *, undo: bool) -> None: ...


class Waker(Protocol):
    """Wakes a writer that is parked because its ring is full."""

    pending: bool

    def wake(self) -> None:
        """Wake the writer if it can go on."""


class Source(Inside, Protocol):
    """The source of messages; used on its end's loop, by one task at a time. The state closes it."""

    receive: Callable[[], Any]
    ring: RingReader | None

    @property
    def gone(self) -> Callable[[], AioshmError] | None:
        """Once the writer is gone: makes the error that comes when everything it published has been read."""

    @property
    def waker(self) -> Waker | None:
        """Wakes the writer, once there is a ring."""

    # Attaching

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to attach, unless that was done; nothing waits for it."""

    def too_late(self) -> Exception:
        """Return the error of a wait for peers that has lasted too long."""

    # Receiving

    def ready(self) -> bool:
        """Return whether a message is there, be it only in part; cheap, without side effects."""

    def look(self) -> bool:
        """Return whether a message is there, be it only in part; look also where it may have come to."""

    def look_on(self) -> bool:
        """Return the same; look for as long as a call should before it waits."""

    def take(self) -> Any:
        """Return the next message, `EMPTY`, or `SLOW_PATH` if incomplete; skip a damaged one."""

    def take_many(self, most: int) -> list[Any]:
        """Return available messages up to a special one, which may be the first."""

    def open_block(self, *, decoded: bool) -> SourceBlock | None:
        """Return the next message for a block, decoded or as bytes; None if incomplete."""

    def settle(self) -> None:
        """Finish with the rest of the latest block, before anything else is read."""

    def quick(self) -> Callable[[], Any]:
        """Return `receive`, if possible without polling sockets; called on a ready end."""

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
        """Log how long a reader has waited, and the state of the writer."""

    @property
    def doorbell(self) -> Doorbell | None:
        """The eventfd that the writer writes to, where there is one."""

    def other_ends(self) -> list[int]:
        """Return the pids of ends that share CPUs with this one, 0 where unknown."""

    def wake_writer(self) -> None:
        """Wake the writer if it is parked and can go on; may be interrupted, and then has to be called again."""
