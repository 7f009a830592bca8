"""One place for a local reader: who has it, and what became of who had it before."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass

from aioshm.errors import PeerDied
from aioshm.lifeline.peer import Peer
from aioshm.process.state import process_state
from aioshm.queue.membership import ReaderInfo, ReaderState


@dataclass(slots=True)
class Place:
    """What the writer knows of one place.

    Attributes:
        rank: Its rank.
        extra: Whether nobody waits for a reader here before the queue is ready.
        peer: The reader that is attached.
        leaving: The reader that was evicted and has its end open still: until that is closed the place cannot have
            another one, because the two would write to the same flags.
        settled: Whether no reader is waited for any more.
        state: What became of the reader.
        pid: The reader's process id as it saw itself, or the last reader's.
        copies: Whether that reader copied messages, and was not waited for.
        joined_at: When it was admitted, by ``time.time()``.
        trouble: Makes what the writer raises because of the reader's death, until that is replaced or dismissed.
    """

    rank: int
    extra: bool
    peer: Peer | None = None
    leaving: Peer | None = None
    settled: bool = False
    state: ReaderState = "absent"
    pid: int = 0
    copies: bool = False
    joined_at: float = 0.0
    trouble: Callable[[], PeerDied] | None = None

    @property
    def held(self) -> bool:
        """Whether its unread messages wait for a replacement of the reader that has died."""
        return self.state == "held"

    @property
    def vacant(self) -> bool:
        """Whether a reader can have it."""
        return self.peer is None and self.leaving is None

    def why_taken(self) -> str:
        """Say who has it, which is not vacant."""
        if self.peer is None:
            return f": its reader (pid {self.pid} was evicted) has its end open still, and has to close it first"
        state = process_state(self.peer.seen_pid)
        if state in ("gone", "zombie", "dead"):
            text = f"does not live any more ({state}): something that it has left running keeps its connection open"
        else:
            text = f"lives ({state})" if self.peer.seen_pid > 0 else f"is {state}"
        return f" by pid {self.pid}, which {text}"

    def whose(self) -> str:
        """Say who reads here, and how that process is."""
        if self.held:
            return f"pid {self.pid} has died; its place is held"
        return "gone" if self.peer is None else f"pid {self.pid}, {process_state(self.peer.seen_pid)}"

    def info(self, read: int, written: int) -> ReaderInfo:
        """Return what users are told.

        Args:
            read: Messages that the reader has finished with.
            written: Messages that were published.
        """
        read = min(read, written)
        there = self.peer is not None or self.held
        return ReaderInfo(
            rank=self.rank,
            pid=self.pid,
            host=platform.node() if self.pid else "",
            state=self.state,
            joined_at=self.joined_at,
            read=read,
            lag=written - read if there else 0,
        )
