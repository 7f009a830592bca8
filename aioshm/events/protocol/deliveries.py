"""What a subscriber hands out: batches, and what must be said about their numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from aioshm.errors import EventsLost, PublisherDisconnected, PublisherRestarted
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
    """A publisher began again, or nothing shows that it did not; its batches count from 0 again.

    A publisher's numbers go back when its process is replaced. Where the connection broke and no replay confirms that
    the process is the same, the subscriber assumes a new one: the numbers before the next batch then follow as `Lost`.

    Attributes:
        source: The publisher.
        expected: The number that should have come next.
        reason: How the subscriber noticed.
    """

    source: Source
    expected: int
    reason: str = "its numbers went back"

    def error(self) -> PublisherRestarted:
        """Return it as the error that ``async for`` raises."""
        error = PublisherRestarted(self.source, self.expected)
        error.add_note(self.reason)
        return error


@dataclass(frozen=True, slots=True)
class PublisherGone:
    """A publisher is gone: the subscriber forgets it, and so should its consumer.

    The publisher's connection ended, or its replay port answers without its batches, and no batch of it arrived within
    the subscriber's ``gone_after_s``. A publisher that comes back is a new one, from the subscriber's ``start`` on.

    Attributes:
        source: The publisher.
        expected: The number that should have come next.
        after_s: Seconds since the last sign of it.
    """

    source: Source
    expected: int
    after_s: float

    def error(self) -> PublisherDisconnected:
        """Return it as the error that ``async for`` raises."""
        return PublisherDisconnected(self.source, self.after_s)


Delivery: TypeAlias = Received | Lost | Restarted | PublisherGone
