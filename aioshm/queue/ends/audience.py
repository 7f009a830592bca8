"""What a writer knows of its readers, be they on this host or on others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from aioshm.errors import AioshmError, PeerDied
from aioshm.queue.membership import ReaderInfo
from aioshm.queue.stats import ReaderStats


class Audience(Protocol):
    """The readers of one kind."""

    def start(self, loop: asyncio.AbstractEventLoop, changed: Callable[[], None], /) -> None:
        """Begin to admit readers; ``changed`` is called after every change that a waiting call may look for."""

    def look(self) -> None:
        """Find out who has gone, or come, since the loop has looked."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Of the places for such readers."""

    @property
    def complete(self) -> bool:
        """Whether no reader is waited for any more."""

    @property
    def alive(self) -> int:
        """How many readers are attached."""

    def missing(self) -> list[str]:
        """Name the readers that are not attached yet."""

    @property
    def left(self) -> dict[int, str]:
        """What became of the readers that were there before all were ready, and are not replaced, by rank."""

    def take_death(self) -> PeerDied | None:
        """Return, once, who of them has died."""

    @property
    def held(self) -> dict[int, tuple[int, int]]:
        """Whose places wait for a replacement: by rank, its process, and the first message that is kept for it."""

    def readers(self) -> list[ReaderInfo]:
        """Return who reads, or did."""

    def reader_stats(self) -> list[ReaderStats]:
        """Return the same, and what is known of how they read."""

    def dismiss(self, rank: int, /) -> None:
        """Wait for a reader of its own no more, whether it is there, has died, or never came."""

    def go(self) -> None:
        """Tell every reader that all are ready; from now on a newcomer begins at the present."""

    def laggards(self) -> list[str]:
        """Name the readers that the next message waits for."""

    def slowest(self, slots: int = 1, large: Sequence[int] = (), /) -> list[int]:
        """Return, by rank, which of them are furthest behind: the last ones that will be waited for."""

    def lag_of(self, rank: int, /) -> tuple[str, int] | None:
        """Name a reader, and say how many messages it is behind; None if it is not there."""

    def backlog(self) -> int:
        """Return how many messages the slowest reader has not finished with."""

    @property
    def trouble(self) -> Callable[[], AioshmError] | None:
        """What makes the error that the writer has to raise from now on, if any."""

    def say_goodbye(self) -> None:
        """Tell the readers that nothing more will come."""
