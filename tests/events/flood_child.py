"""A publisher in a process of its own: ``python flood_child.py BUFFER_STEPS HWM EVENTS``.

It prints its two endpoints and publishes batches of so many events as fast as it can, until it reads a line; from then
on an empty batch now and then. After another line it clears its cache, stores `LAST` blocks, and prints how many
batches it has published so far. A third line ends it.
"""

from __future__ import annotations

import asyncio
import sys
import time

from aioshm.events import AllBlocksCleared, BlockStored, EventBatch, ZmqEventPublisher

LAST = 100
TOKENS = 16
PAUSE_S = 0.02


async def main(buffer_steps: int, hwm: int, events: int) -> None:
    loop = asyncio.get_running_loop()
    stored = [BlockStored([event], None, list(range(TOKENS)), TOKENS, None, "GPU") for event in range(events)]
    any_port = "tcp://127.0.0.1:0"
    async with ZmqEventPublisher(0, any_port, any_port, buffer_steps, hwm=hwm, bind=True) as publisher:
        print(publisher.endpoint, publisher.replay_endpoint, flush=True)
        line = loop.run_in_executor(None, sys.stdin.readline)
        while not line.done():
            await publisher.apublish(EventBatch(time.time(), stored))
        for end in (False, True):
            if end:
                publisher.publish(EventBatch(time.time(), [AllBlocksCleared()]))
                for block in range(LAST):
                    publisher.publish(EventBatch(time.time(), [BlockStored([block], None, [1], 1, None, "GPU")]))
                print(publisher.stats().published, flush=True)
            line = loop.run_in_executor(None, sys.stdin.readline)
            while not line.done():
                publisher.publish(EventBatch(time.time(), []))
                await asyncio.sleep(PAUSE_S)


if __name__ == "__main__":
    asyncio.run(main(*map(int, sys.argv[1:])))
