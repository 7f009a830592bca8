"""The readers of a queue as its writer knows them, and the changes among them."""

from __future__ import annotations

from collections import deque
from typing import Literal

import msgspec

ReaderState = Literal["absent", "attached", "held", "left", "died", "evicted"]

KEPT_CHANGES = 1024
"""Changes that wait for one who iterates over them; then the oldest are dropped."""


class ReaderInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One place of a queue, and its reader.

    Attributes:
        rank: Of the place.
        pid: The reader's process id as it sees itself, or the last reader's; 0: there was none.
        host: Where it runs; empty: there was none.
        state: ``"attached"``; ``"held"``: it has died, and its place and messages wait for a replacement; ``"left"``,
            ``"died"``, ``"evicted"``: the place is vacant, for that reason; ``"absent"``: it never had a reader.
        joined_at: When it was admitted, by ``time.time()``; 0.0: never.
        read: The number of the first message that it has not finished with: messages are numbered from 0 on.
        lag: How many messages it has still to read; those of a vacant place are nobody's.
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
        rank: Its place.
        pid: Its process id as it sees itself.
        first: The number of the first message that it receives.
    """

    rank: int
    pid: int
    first: int


class ReaderLeft(msgspec.Struct, frozen=True, tag=True):
    """A reader has closed its end, or was evicted.

    Attributes:
        rank: Its place.
        pid: Its process id as it sees itself.
        read: The number of the first message that it had not finished with.
        evicted: Whether the queue went on without it: it was too slow, or was dismissed.
    """

    rank: int
    pid: int
    read: int
    evicted: bool = False


class ReaderDied(msgspec.Struct, frozen=True, tag=True):
    """A reader's process has died.

    Attributes:
        rank: Its place.
        pid: Its process id as it saw itself.
        read: The number of the first message that it had not finished with.
        held: Whether its place and its messages wait for a replacement.
    """

    rank: int
    pid: int
    read: int
    held: bool = False


class ChangesLost(msgspec.Struct, frozen=True, tag=True):
    """Who iterates was too slow: the oldest changes were dropped. `MessageQueue.readers` says how it is now.

    Attributes:
        count: How many.
    """

    count: int


Change = ReaderJoined | ReaderLeft | ReaderDied | ChangesLost


class ChangeLog:
    """The changes that one iteration has yet to see."""

    def __init__(self) -> None:
        self._waiting: deque[Change] = deque()
        self._dropped = 0

    def add(self, change: Change) -> None:
        """Note a change."""
        if len(self._waiting) == KEPT_CHANGES:
            self._waiting.popleft()
            self._dropped += 1
        self._waiting.append(change)

    def take(self) -> Change | None:
        """Return the next change, if there is one."""
        if self._dropped:
            count, self._dropped = self._dropped, 0
            return ChangesLost(count)
        return self._waiting.popleft() if self._waiting else None
