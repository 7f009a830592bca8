"""Which local readers are behind, and which of them the writer does not wait for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence

from aioshm.logs import LogLimiter
from aioshm.queue.local.place import Place
from aioshm.ring import RingWriter

logger: logging.Logger = logging.getLogger("aioshm.queue")

COMPLAINT_S = 10.0  # between two warnings of messages that are lost


class Behind:
    """The readers of one queue as far as the writer waits for them.

    Args:
        name: The queue's, for messages.
        places: Of the readers, in the order of the ring's flags.
        ring: The writer's cursor.
        evict: Goes on without the reader at a place; is told how many messages it is behind.

    Attributes:
        lenient: Which of them the writer does not wait for, by their places in that order, and whether they are evicted
            instead of losing messages.
    """

    def __init__(
        self, name: str, places: Sequence[Place], ring: RingWriter, evict: Callable[[int, int], object]
    ) -> None:
        self._name = name
        self._places = places
        self._ring = ring
        self._evict = evict
        self._limiter = LogLimiter(COMPLAINT_S)
        self.lenient: dict[int, bool] = {}

    def laggards(self, slots: int = 1, large: Sequence[int] = ()) -> list[str]:
        """Name the readers that keep so many messages from being written, with pid and process state."""
        return list(self._described(self._ring.laggards(slots, large)))

    def slowest(self, slots: int = 1, large: Sequence[int] = ()) -> list[int]:
        """Return, by rank, which of those that keep so many messages from being written are furthest behind."""
        read = {index: self._ring.messages_read(index) for index in self._ring.laggards(slots, large)}
        least = min(read.values(), default=0)
        return [self._places[index].rank for index, count in read.items() if count == least]

    def lag_of(self, rank: int) -> tuple[str, int] | None:
        """Name a reader, and say how many messages it is behind; None if it is not there."""
        index = next((index for index, place in enumerate(self._places) if place.rank == rank), None)
        if index is None or (self._places[index].peer is None and not self._places[index].held):
            return None
        return next(iter(self._described([index]))), self._ring.seq - self._ring.messages_read(index)

    def make_room(self, slots: int, large: Sequence[int]) -> None:
        """Let no reader that need not be waited for keep so many messages from being written."""
        blocker = self._ring.core.blocker(slots, large)
        for index, evicts in list(self.lenient.items()):
            if not self._ring.pass_over(index, blocker):
                continue
            behind = self._ring.seq - self._ring.messages_read(index)
            if evicts:
                self._evict(index, behind)
            elif (held_back := self._limiter.admit()) is not None:
                (who,) = self._described([index])
                text = "queue %s: %s is too slow, %d messages behind, and loses some (and %d more warnings)"
                logger.warning(text, self._name, who, behind, held_back)

    def backlog(self) -> int:
        """Return how many messages the slowest reader has not finished with."""
        written, there = self._ring.seq, [i for i, place in enumerate(self._places) if place.peer or place.held]
        return max((written - self._ring.messages_read(index) for index in there), default=0)

    def _described(self, indices: Iterable[int]) -> Iterator[str]:
        return (f"rank {self._places[index].rank} ({self._places[index].whose()})" for index in indices)
