"""A KV-aware router in miniature: prompts go to the engine that has most of them in its cache.

python examples/events_router.py
"""

from __future__ import annotations

import asyncio
import time

from aioshm.events import (
    AllBlocksCleared,
    BlockIndex,
    BlockStored,
    EventBatch,
    EventSubscriber,
    Source,
    ZmqEventPublisher,
    follow,
)

SYSTEM_PROMPT = [101, 102, 103]  # hashes of the blocks that every conversation begins with
CONVERSATION = [*SYSTEM_PROMPT, 201, 202]


def stored(*hashes: int) -> EventBatch:
    """Return the event of an engine that has just cached these blocks."""
    return EventBatch(time.time(), [BlockStored(list(hashes), None, [0] * len(hashes), 1, None, "GPU")])


def best(index: BlockIndex[Source], prompt: list[int]) -> tuple[int | None, int]:
    """Return the rank that holds most of a prompt, and how many blocks of it."""
    lengths = index.longest_prefix(prompt)
    source = max(lengths, key=lambda one: lengths[one])
    return source.rank, lengths[source]


async def main() -> None:
    """Publish, follow, route."""
    engines = [ZmqEventPublisher(rank, "tcp://127.0.0.1:0", "tcp://127.0.0.1:0", bind=True) for rank in range(2)]
    engines[0].publish(stored(*SYSTEM_PROMPT))
    engines[1].publish(stored(*CONVERSATION))

    index: BlockIndex[Source] = BlockIndex()
    endpoints = [engine.endpoint for engine in engines]
    replays = [engine.replay_endpoint for engine in engines]
    async with EventSubscriber(endpoints, replays) as subscriber:  # a late joiner: the past is replayed
        for _ in engines:
            follow(index, await subscriber.receive(timeout=10))
        rank, warm = best(index, CONVERSATION)
        print(f"the conversation goes to rank {rank}, {warm} blocks are warm")

        engines[1].publish(EventBatch(time.time(), [AllBlocksCleared()]))
        follow(index, await subscriber.receive(timeout=10))
        rank, warm = best(index, CONVERSATION)
        print(f"rank 1 was cleared: now to rank {rank}, {warm} blocks are warm")

    for engine in engines:
        await engine.aclose()


if __name__ == "__main__":
    asyncio.run(main())
