"""Ends of events on a host of their own: ``python network_child.py ROLE LIVE REPLAY FIRST``.

``subscribe`` prints, for each batch, whether it was replayed, and its number. ``bind`` binds LIVE, with keys, for
publishers that ``connect``, gives a silent connection up after `SILENCE_S`, and prints ``gone 0`` when a connection
has ended.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import zmq

from aioshm.events import (
    BlockStored,
    CurveKeys,
    EventBatch,
    EventSubscriber,
    PublisherGone,
    Received,
    ZmqEventPublisher,
)
from aioshm.events.subscribe import ports

EVERY_S = 0.05
SILENCE_S = 3.0
SECRET = b"0" * 40
KEYS = CurveKeys(public=zmq.curve_public(SECRET), secret=SECRET)


async def publish(
    live: str, replay: str | None, first: int, *, bind: bool = True, curve: CurveKeys | None = None
) -> None:
    async with ZmqEventPublisher(0, live, replay, bind=bind, curve=curve) as publisher:
        print("bound", flush=True)
        for number in range(first, first + 1_000_000):
            publisher.publish(EventBatch(0.0, [BlockStored([number], None, [1], 1, None, "GPU")]))
            await asyncio.sleep(EVERY_S)


async def subscribe(live: str, replay: str | None, **options: Any) -> None:
    async with EventSubscriber(live, replay, start="live", **options) as subscriber:
        while True:
            item = await subscriber.receive()
            if isinstance(item, Received):
                event = item.batch.events[0]
                assert isinstance(event, BlockStored)
                print("replayed" if item.replayed else "live", event.block_hashes[0], flush=True)
            elif isinstance(item, PublisherGone):
                print("gone 0", flush=True)


if __name__ == "__main__":
    role, live, replay, first = sys.argv[1:]
    if role == "bind":
        ports.BOUND_SUBSCRIBER_SILENCE_S = SILENCE_S
        work = subscribe(live, None, bind=True, curve=KEYS, gone_after_s=0.1)
    elif role == "connect":
        work = publish(live, None, int(first), bind=False, curve=CurveKeys.generate(KEYS.public))
    elif role == "publish":
        work = publish(live, replay, int(first))
    else:
        work = subscribe(live, replay)
    asyncio.run(work)
