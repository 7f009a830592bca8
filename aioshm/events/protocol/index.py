"""Index of cached blocks by publisher, for a KV-aware router, and of events that all workers reported. No I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Hashable, Iterable, Sequence
from typing import Generic, NamedTuple, TypeVar

from aioshm.events.protocol.messages import (
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    Delivery,
    EventBatch,
    Lost,
    Received,
    Restarted,
    Source,
)

P = TypeVar("P", bound=Hashable)


class Shelf(NamedTuple):
    """A place for blocks within a publisher's cache."""

    medium: str | None
    group_idx: int | None


class BlockIndex(Generic[P]):
    """Index of the blocks that each publisher holds, built from its events.

    A publisher is any hashable key: the ``Source`` of deliveries, a rank, a pod's name.

    An engine may cache a block twice, and then announces each copy and each removal of a copy. The index
    counts the copies: it forgets a block when the last copy is removed.

    After a loss, ``complete`` is False until the publisher clears its cache or restarts.
    The known blocks stay, because most of them are still cached and would never be announced again. With
    ``forget_on_loss`` the index drops them, for routers that prefer a missed block to a wrong hit.
    The lost batches may have removed copies, so from then on the index forgets an older block at its next removal.
    A block whose last removal was lost stays until the publisher clears its cache, restarts or is gone. If losses
    are frequent, ``forget_on_loss`` keeps such blocks from piling up.

    Attributes:
        unknown_events: Events of unknown types, and malformed events.
    """

    def __init__(self, *, forget_on_loss: bool = False) -> None:
        self.unknown_events: int = 0
        self._shelves: dict[P, dict[Shelf, Counter[BlockHash]]] = {}  # copies of each block
        self._incomplete: set[P] = set()
        self._forget_on_loss = forget_on_loss

    def apply(self, publisher: P, batch: EventBatch) -> None:
        """Apply the events of one batch, in order; count events of other types in ``unknown_events``."""
        shelves = self._shelves.setdefault(publisher, {})
        for event in batch.events:
            if isinstance(event, BlockStored):
                shelf = Shelf(event.medium, event.group_idx)
                held = shelves.get(shelf)
                if held is None:
                    held = shelves[shelf] = Counter()
                held.update(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                _remove(shelves, event)
            elif isinstance(event, AllBlocksCleared):
                shelves.clear()
                self._incomplete.discard(publisher)
            else:
                self.unknown_events += 1

    def lost(self, publisher: P) -> None:
        """Record that batches of a publisher are lost."""
        self._shelves.setdefault(publisher, {})
        self._incomplete.add(publisher)
        if self._forget_on_loss:
            self._shelves[publisher].clear()
        for held in self._shelves[publisher].values():
            for block in held:
                held[block] = 0

    def restarted(self, publisher: P) -> None:
        """Record that a publisher restarted, with an empty cache."""
        self._shelves[publisher] = {}
        self._incomplete.discard(publisher)

    def remove(self, publisher: P) -> None:
        """Forget a publisher that is gone for good; an unknown publisher is no error."""
        self._shelves.pop(publisher, None)
        self._incomplete.discard(publisher)

    def complete(self, publisher: P) -> bool:
        """Return whether the index has lost no events of a known publisher."""
        return publisher in self._shelves and publisher not in self._incomplete

    @property
    def publishers(self) -> list[P]:
        """All known publishers."""
        return list(self._shelves)

    def blocks(self, publisher: P) -> dict[Shelf, set[BlockHash]]:
        """Return a copy of a publisher's blocks; empty for an unknown publisher."""
        return {shelf: set(held) for shelf, held in self._shelves.get(publisher, {}).items()}

    def holders(self, block: BlockHash) -> dict[P, list[Shelf]]:
        """Return the publishers that hold a block, with the block's places."""
        found = {}
        for publisher, shelves in self._shelves.items():
            places = [shelf for shelf, held in shelves.items() if block in held]
            if places:
                found[publisher] = places
        return found

    def longest_prefix(
        self,
        token_hashes: Sequence[BlockHash],
        *,
        media: Iterable[str | None] | None = None,
        group_idx: int | None = None,
    ) -> dict[P, int]:
        """Return for every publisher how many blocks of the prompt, from the first on, are cached without a hole.

        Args:
            token_hashes: The blocks of a prompt, first to last.
            media: Count only blocks in these media; None counts all.
            group_idx: Count only blocks of this cache group; None counts a block that any group holds.
        """
        wanted: set[str | None] | None = set(media) if media is not None else None
        lengths = {}
        for publisher, shelves in self._shelves.items():
            counted = [
                held
                for shelf, held in shelves.items()
                if (wanted is None or shelf.medium in wanted) and (group_idx is None or shelf.group_idx == group_idx)
            ]
            lengths[publisher] = _prefix(token_hashes, counted)
        return lengths

    def __len__(self) -> int:
        return sum(len(held) for shelves in self._shelves.values() for held in shelves.values())


def _remove(shelves: dict[Shelf, Counter[BlockHash]], event: BlockRemoved) -> None:
    """Remove one copy of each block, or keep the number of copies that the event states."""
    shelf = Shelf(event.medium, event.group_idx)
    held = shelves.setdefault(shelf, Counter())
    blocks = event.block_hashes
    counts = event.remaining_copy_counts
    if counts is not None and len(counts) != len(blocks):
        counts = None
    for number, block in enumerate(blocks):
        left = held[block] - 1 if counts is None else counts[number]
        if left > 0:
            held[block] = left
        else:
            del held[block]
    if not held:
        del shelves[shelf]


def _prefix(hashes: Sequence[BlockHash], shelves: Sequence[Container[BlockHash]]) -> int:
    if len(shelves) == 1:  # the usual case, which must be fast
        held = shelves[0]
        for length, block in enumerate(hashes):
            if block not in held:
                return length
        return len(hashes)
    for length, block in enumerate(hashes):
        if not any(block in held for held in shelves):
            return length
    return len(hashes)


def follow(index: BlockIndex[Source], delivery: Delivery) -> None:
    """Update an index of sources with one delivery of a subscriber."""
    if isinstance(delivery, Received):
        index.apply(delivery.source, delivery.batch)
    elif isinstance(delivery, Lost):
        index.lost(delivery.source)
    elif isinstance(delivery, Restarted):
        index.restarted(delivery.source)
    else:
        index.remove(delivery.source)


E = TypeVar("E", bound=Hashable)


class KVEventAggregator(Generic[E]):
    """Counts how many workers reported each event."""

    __slots__ = ("_events", "_num_workers", "_reports")

    def __init__(self, num_workers: int) -> None:
        if num_workers <= 0:
            raise ValueError(f"num_workers must be greater than zero, not {num_workers}")
        self._events: Counter[E] = Counter()  # how often each event was added
        self._reports: Counter[E] = Counter()  # how many lists contained each event
        self._num_workers = num_workers

    def add_events(self, events: list[E]) -> None:
        """Add the events that one worker reported.

        Raises:
            TypeError: Not a list.
        """
        if not isinstance(events, list):
            raise TypeError(f"events must be a list of events, not {type(events).__name__}")
        self._events.update(events)
        self._reports.update(set(events))

    def get_common_events(self) -> list[E]:
        """Return the events that all workers reported, in the order in which they were first added."""
        return [event for event in self._events if self._reports[event] >= self._num_workers]

    def get_all_events(self) -> list[E]:
        """Return all events, as often as they were added."""
        return list(self._events.elements())

    def clear_events(self) -> None:
        """Forget all events, but not the number of workers."""
        self._events.clear()
        self._reports.clear()

    def increment_workers(self, count: int = 1) -> None:
        """Expect ``count`` more workers.

        Raises:
            ValueError: ``count`` is not positive.
        """
        if count <= 0:
            raise ValueError(f"count must be positive, not {count}")
        self._num_workers += count

    def decrement_workers(self, count: int = 1) -> None:
        """Expect ``count`` fewer workers.

        Raises:
            ValueError: ``count`` is not positive, or no worker would be left.
        """
        if not 0 < count < self._num_workers:
            raise ValueError(f"count must be from 1 to {self._num_workers - 1}, not {count}")
        self._num_workers -= count

    def reset_workers(self) -> None:
        """Expect one worker."""
        self._num_workers = 1

    def get_number_of_workers(self) -> int:
        """Return the number of expected workers."""
        return self._num_workers

    def __repr__(self) -> str:
        return f"<KVEventAggregator workers={self._num_workers}, events={len(self._events)}>"
