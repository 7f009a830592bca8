"""Ends of events on a host of their own: ``python network_child.py publish|subscribe LOOP LIVE REPLAY FIRST``.

REPLAY is an endpoint or nothing. The subscriber prints, for each batch, whether it was replayed, and its number.
"""

from __future__ import annotations

import asyncio
import sys

import uvloop

from aioshm.events import BlockStored, EventBatch, EventSubscriber, Received, ZmqEventPublisher

EVERY_S = 0.05


async def publish(live: str, replay: str | None, first: int) -> None:
    async with ZmqEventPublisher(0, live, replay, bind=True) as publisher:
        print("bound", flush=True)
        for number in range(first, first + 1_000_000):
            publisher.publish(EventBatch(0.0, [BlockStored([number], None, [1], 1, None, "GPU")]))
            await asyncio.sleep(EVERY_S)


async def subscribe(live: str, replay: str | None, _first: int) -> None:
    async with EventSubscriber(live, replay, start="live") as subscriber:
        while True:
            item = await subscriber.receive()
            if isinstance(item, Received):
                event = item.batch.events[0]
                assert isinstance(event, BlockStored)
                print("replayed" if item.replayed else "live", event.block_hashes[0], flush=True)


if __name__ == "__main__":
    role, loop, live, replay, first = sys.argv[1:]
    run = uvloop.run if loop == "uvloop" else asyncio.run
    run({"publish": publish, "subscribe": subscribe}[role](live, replay or None, int(first)))
