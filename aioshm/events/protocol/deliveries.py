"""What a subscriber hands out: batches, and what must be said about their numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from aioshm.errors import EventsLost, PublisherRestarted
from aioshm.events.protocol.messages import KVEventBatch


@dataclass(frozen=True, slots=True)
class Source:
    """One publisher, as a subscriber tells it from others.

    Attributes:
        endpoint: Where its batches come from.
        topic: The first frame of its messages; None, for good, where an old replay port, which sends
            none, spoke first.
        rank: Its data-parallel rank, or None where it names none.
    """

    endpoint: str
    topic: bytes | None
    rank: int | None

    def __str__(self) -> str:
        topic = "" if not self.topic else f" topic {self.topic.decode(errors='replace')}"
        return f"{self.endpoint}{topic} rank {self.rank}"


@dataclass(frozen=True, slots=True)
class Received:
    """A batch, in its publisher's order.

    Attributes:
        source: Which publisher.
        seq: The batch's number.
        batch: The batch.
        payload: The batch as it was on the wire.
        replayed: Whether it came from the replay port rather than live.
    """

    source: Source
    seq: int
    batch: KVEventBatch
    payload: bytes
    replayed: bool


@dataclass(frozen=True, slots=True)
class Lost:
    """Numbers ``first`` to ``last`` of a publisher will not come.

    Attributes:
        source: Which publisher.
        first: The first lost number.
        last: The last lost number.
        reason: Why they cannot be had.
    """

    source: Source
    first: int
    last: int
    reason: str

    def error(self) -> EventsLost:
        """Return it as the error that ``async for`` raises."""
        error = EventsLost(self.first, self.last)
        error.add_note(f"publisher {self.source}: {self.reason}")
        return error


@dataclass(frozen=True, slots=True)
class Restarted:
    """A publisher's numbers went back; its next batch is numbered from 0 again.

    Attributes:
        source: Which publisher.
        expected: The number that should have come next.
    """

    source: Source
    expected: int

    def error(self) -> PublisherRestarted:
        """Return it as the error that ``async for`` raises."""
        return PublisherRestarted(self.source, self.expected)


Delivery: TypeAlias = Received | Lost | Restarted
