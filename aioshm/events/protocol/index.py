"""Which publisher holds which block: what a KV-aware router asks. No I/O."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Generic, NamedTuple, TypeVar

from aioshm.events.protocol.deliveries import Lost, Received, Restarted, Source
from aioshm.events.protocol.messages import (
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    EventBatch,
)

P = TypeVar("P", bound=Hashable)


class Shelf(NamedTuple):
    """Where in a publisher a block lies."""

    medium: str | None
    group_idx: int | None


class BlockIndex(Generic[P]):
    """Keeps what each publisher holds, from its events.

    A publisher is any hashable key: the ``Source`` of deliveries, a rank, a pod's name.

    A loss is remembered: ``complete`` is False from then on, until the publisher clears its cache or begins
    again. What was known stays, because most of it is still true and would never be announced again;
    ``forget_on_loss`` drops it instead, for those who would rather miss a block than look for one in vain.
    """

    def __init__(self, *, forget_on_loss: bool = False) -> None:
        self.unknown_events: int = 0
        self._shelves: dict[P, dict[Shelf, set[BlockHash]]] = {}
        self._incomplete: set[P] = set()
        self._forget_on_loss = forget_on_loss

    def apply(self, publisher: P, batch: EventBatch) -> None:
        """Take the events of one batch, in order; those of other types are counted in ``unknown_events``."""
        shelves = self._shelves.setdefault(publisher, {})
        for event in batch.events:
            if isinstance(event, BlockStored):
                shelf = Shelf(event.medium, event.group_idx)
                shelves.setdefault(shelf, set()).update(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                shelf = Shelf(event.medium, event.group_idx)
                held = shelves.get(shelf)
                if held is not None:
                    held.difference_update(event.block_hashes)
                    if not held:
                        del shelves[shelf]
            elif isinstance(event, AllBlocksCleared):
                shelves.clear()
                self._incomplete.discard(publisher)
            else:
                self.unknown_events += 1

    def lost(self, publisher: P) -> None:
        """Note that some of a publisher's batches are lost."""
        self._shelves.setdefault(publisher, {})
        self._incomplete.add(publisher)
        if self._forget_on_loss:
            self._shelves[publisher].clear()

    def restarted(self, publisher: P) -> None:
        """Note that a publisher began again, with an empty cache."""
        self._shelves[publisher] = {}
        self._incomplete.discard(publisher)

    def remove(self, publisher: P) -> None:
        """Forget a publisher that is gone for good; unknown ones are no error."""
        self._shelves.pop(publisher, None)
        self._incomplete.discard(publisher)

    def complete(self, publisher: P) -> bool:
        """Tell whether nothing is known to be missing about a publisher."""
        return publisher in self._shelves and publisher not in self._incomplete

    @property
    def publishers(self) -> list[P]:
        """All publishers that were heard of."""
        return list(self._shelves)

    def blocks(self, publisher: P) -> dict[Shelf, set[BlockHash]]:
        """Return a copy of what a publisher holds; empty for unknown ones."""
        return {shelf: set(held) for shelf, held in self._shelves.get(publisher, {}).items()}

    def holders(self, block: BlockHash) -> dict[P, list[Shelf]]:
        """Return who holds a block, and where."""
        found = {}
        for publisher, shelves in self._shelves.items():
            where = [shelf for shelf, held in shelves.items() if block in held]
            if where:
                found[publisher] = where
        return found

    def longest_prefix(
        self,
        token_hashes: Sequence[BlockHash],
        *,
        media: Iterable[str | None] | None = None,
        group_idx: int | None = None,
    ) -> dict[P, int]:
        """Return for every publisher how many blocks from the first on it holds without a hole.

        Args:
            token_hashes: The blocks of a prompt, first to last.
            media: Count only blocks in these media; None counts all.
            group_idx: Count only blocks of this cache group; None counts a block that any group holds.
        """
        wanted = None if media is None else set(media)
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


def _prefix(hashes: Sequence[BlockHash], shelves: list[set[BlockHash]]) -> int:
    if len(shelves) == 1:  # the usual case, and the one that must be quick
        held = shelves[0]
        for length, block in enumerate(hashes):
            if block not in held:
                return length
        return len(hashes)
    for length, block in enumerate(hashes):
        if not any(block in held for held in shelves):
            return length
    return len(hashes)


def follow(index: BlockIndex[Source], delivery: Received | Lost | Restarted) -> None:
    """Bring an index of sources up to date with one delivery of a subscriber."""
    if isinstance(delivery, Received):
        index.apply(delivery.source, delivery.batch)
    elif isinstance(delivery, Lost):
        index.lost(delivery.source)
    else:
        index.restarted(delivery.source)
