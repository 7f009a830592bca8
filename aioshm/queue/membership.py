"""The readers of a queue, as the writer knows them, and changes of the readers."""

from __future__ import annotations

from collections import deque
from typing import Literal

import msgspec

ReaderState = Literal["absent", "attached", "held", "left", "died", "evicted"]

KEPT_CHANGES = 1024
"""Changes kept for an iteration; beyond that the oldest are dropped."""


class ReaderInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of a queue, and its reader.

    Attributes:
        rank: Reader rank.
        pid: The reader's process id as it sees itself, or the last reader's; 0: there was none.
        host: The reader's host, or the last reader's; empty: there was none.
        state: ``"attached"``; ``"held"``: the reader has died, and its rank and messages wait for a replacement;
            ``"left"``, ``"died"``, ``"evicted"``: the rank is vacant, for that reason; ``"absent"``: no reader has had
            this rank.
        joined_at: When the reader was admitted, by ``time.time()``; 0.0: never.
        read: Number of the first message that the reader has not finished with. Messages are numbered from 0.
        lag: Number of messages that the reader has not finished with; 0 for a vacant rank.
    """

    rank: int
    pid: int
    host: str
    state: ReaderState
    joined_at: float
    read: int
    lag: int


class ReaderJoined(msgspec.Struct, frozen=True, tag=True):
    """A reader was admitted.

    Attributes:
        rank: Reader rank.
        pid: The reader's process id as the reader sees it.
        first: Number of the first message that the reader receives.
    """

    rank: int
    pid: int
    first: int


class ReaderLeft(msgspec.Struct, frozen=True, tag=True):
    """A reader has closed its end, or was evicted.

    Attributes:
        rank: Reader rank.
        pid: The reader's process id as the reader sees it.
        read: Number of the first message that the reader had not finished with.
        evicted: Whether the writer evicted the reader: it was too slow, or was dismissed.
    """

    rank: int
    pid: int
    read: int
    evicted: bool = False


class ReaderDied(msgspec.Struct, frozen=True, tag=True):
    """A reader's process has died.

    Attributes:
        rank: Reader rank.
        pid: The reader's process id as the reader saw it.
        read: Number of the first message that the reader had not finished with.
        held: Whether the rank and its messages wait for a replacement.
    """

    rank: int
    pid: int
    read: int
    held: bool = False


class ChangesLost(msgspec.Struct, frozen=True, tag=True):
    """The iteration was too slow, so its oldest changes were dropped. `MessageQueue.readers` has the present state.

    Attributes:
        count: Number of dropped changes.
    """

    count: int


Change = ReaderJoined | ReaderLeft | ReaderDied | ChangesLost


class ChangeLog:
    """The changes that one iterator of `membership` has not returned yet."""

    def __init__(self) -> None:
        self._waiting: deque[Change] = deque()
        self._dropped = 0

    def add(self, change: Change) -> None:
        """Append a change; drop the oldest if there are too many."""
        if len(self._waiting) == KEPT_CHANGES:
            self._waiting.popleft()
            self._dropped += 1
        self._waiting.append(change)

    def take(self) -> Change | None:
        """Return the next change, if there is one."""
        if self._dropped:
            lost = ChangesLost(self._dropped)
            self._dropped = 0
            return lost
        if self._waiting:
            return self._waiting.popleft()
        return None
