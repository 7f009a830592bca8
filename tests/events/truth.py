"""A cache with random changes, and helpers to compare an index with it."""

from __future__ import annotations

import random
from typing import Any

from aioshm.events import (
    AllBlocksCleared,
    BlockIndex,
    BlockRemoved,
    BlockStored,
    EventBatch,
    Source,
)


class Truth:
    """A cache that changes at random and publishes its changes."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.held: set[int] = set()
        self._next = 0

    def step(self) -> EventBatch:
        events: list[Any] = []
        for _ in range(self._random.randrange(4)):
            choice = self._random.random()
            if choice < 0.65 or not self.held:
                self._next += 1
                self.held.add(self._next)
                events.append(BlockStored([self._next], None, [1], 1, None, "GPU"))
            elif choice < 0.99:
                gone = self._random.choice(sorted(self.held))
                self.held.discard(gone)
                events.append(BlockRemoved([gone], "GPU"))
            else:
                self.held.clear()
                events.append(AllBlocksCleared())
        return EventBatch(float(self._random.random()), events)


def held(index: BlockIndex[Source], rank: int = 0) -> set[Any]:
    found: set[Any] = set()
    for source in index.publishers:
        if source.rank == rank:
            for blocks in index.blocks(source).values():
                found |= blocks
    return found
