"""KV-cache events: publishers that begin again at the same ports, subscribers before them and behind cut links."""

from __future__ import annotations

import asyncio
import time

from aioshm.events import (
    BlockStored,
    EventBatch,
    EventSubscriber,
    Lost,
    Received,
    Restarted,
    ThreadedEventPublisher,
    ZmqEventPublisher,
)
from tools.campaign.stage import Actor, Part

HOST = "tcp://127.0.0.1"
PORTS = {"loop": (5601, 5602), "thread": (5611, 5612)}
LINKED = {"loop": (5621, 5622)}
"""Where links to the same stand."""
REPLAY_TIMEOUT_S, CHECK_S = 10.0, 1.0
KEPT = 1 << 20


def actors() -> list[Actor]:
    """Return who plays here."""
    found = []
    for name, ports in PORTS.items():
        spec = {"live": f"{HOST}:{ports[0]}", "replay": f"{HOST}:{ports[1]}"}
        found.append(Actor(f"{name}.publisher", f"events:publish_on_{name}", spec, 1.0))
        found.append(Actor(f"{name}.subscriber.0", "events:subscribe", spec | {"publisher": f"{name}.publisher"}))
    live, replay = LINKED["loop"]
    spec = {"live": f"{HOST}:{live}", "replay": f"{HOST}:{replay}", "publisher": "loop.publisher"}
    found.append(Actor("loop.subscriber.1", "events:subscribe", spec))
    return found


def _batch(epoch: int, number: int) -> EventBatch:
    """Return a batch that tells whose it is, and which."""
    return EventBatch(
        time.time(), [BlockStored([epoch, number], None, [number % 1000] * (number % 40), 4, None, "GPU")]
    )


async def publish_on_loop(part: Part) -> None:
    """Publish from an event loop."""
    epoch = int(part.journal.now() * 1e9)
    async with ZmqEventPublisher(0, part.spec["live"], part.spec["replay"], KEPT, bind=True) as publisher:
        part.journal.note("epoch", epoch)
        number = 0
        while not part.stopping.is_set():
            await publisher.apublish(_batch(epoch, number))
            number += 1
            part.journal.note("published", number)
            await asyncio.sleep(part.chance.uniform(0, 0.02))


async def publish_on_thread(part: Part) -> None:
    """Publish without one."""
    epoch = int(part.journal.now() * 1e9)
    publisher = ThreadedEventPublisher(0, part.spec["live"], part.spec["replay"], KEPT, bind=True)
    try:
        part.journal.note("epoch", epoch)
        number = 0
        while not part.stopping.is_set():
            publisher.publish(_batch(epoch, number))
            number += 1
            part.journal.note("published", number)
            await asyncio.sleep(part.chance.uniform(0, 0.02))
    finally:
        publisher.shutdown()


async def subscribe(part: Part) -> None:
    """Follow a publisher, and its successors, until the end."""
    await part.until_stopped(_subscribe(part))


async def _subscribe(part: Part) -> None:
    note = part.journal.note
    subscriber = EventSubscriber(
        part.spec["live"],
        part.spec["replay"],
        replay_timeout=REPLAY_TIMEOUT_S,
        check_interval=CHECK_S,
        gone_after_s=None,  # the same publishers come back, however long they are away
    )
    async with subscriber:
        async for item in subscriber.deliveries():
            if isinstance(item, Lost):
                note("lost", item.first, item.last, item.reason)
            elif isinstance(item, Restarted):
                note("again", item.expected)
            elif isinstance(item, Received):
                [event] = item.batch.events
                epoch, number = getattr(event, "block_hashes", (0, -1))
                if number != item.seq:
                    note("wrong", f"batch {item.seq} is number {number} of {epoch}")
                note("batch", item.seq, epoch)
            if part.chance.random() < 0.0005:  # a slow consumer, now and then
                await asyncio.sleep(1.0)
