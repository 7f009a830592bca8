"""KV-cache events with links that are cut, supervised engines with a worker each, and a group of workers."""

from __future__ import annotations

import asyncio
import importlib
import random
import sys
import time
from pathlib import Path
from typing import Any

from aioshm import Handle
from aioshm.engine import EngineSupervisor, WorkerGroup
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
from benchmarks.survival import RESTART, WEIGHTS, Adder, Survival, serve
from tools.campaign.stage import Actor, Part

ENGINES, WORKERS, STANDBYS = 2, 2, 1
ASKING, CALLING = 3, 2
PATIENCE_S, PAUSE_S, TELL_S = 90.0, 0.03, 1.0
HOST = "tcp://127.0.0.1"
PORTS = {"loop": (5601, 5602), "thread": (5611, 5612)}
LINKED = {"loop": (5621, 5622)}
"""Where links to the same stand."""
REPLAY_TIMEOUT_S, CHECK_S = 10.0, 1.0
KEPT = 1 << 20
EVERY_S, DELAY_S = 1.5, 0.005
_PROXIES = Path(__file__).parents[2] / "tests" / "helpers"


def engine_actors() -> list[Actor]:
    """Return who plays here."""
    return [Actor("service", "services:serve_requests", {}, 0.15)]


async def serve_requests(part: Part) -> None:
    """Serve, and ask, until the end."""
    async with (
        EngineSupervisor(serve, ENGINES, restart=RESTART, resubmit="unstarted") as supervisor,
        WorkerGroup(Adder, WORKERS, args=(WEIGHTS,), restart=RESTART, standbys=STANDBYS) as group,
    ):
        load = Survival(supervisor, group, PATIENCE_S, PAUSE_S)
        work = [asyncio.create_task(load.ask(who)) for who in range(ASKING)]
        work += [asyncio.create_task(load.call(who)) for who in range(CALLING)]
        while not load.stopping:
            await asyncio.sleep(TELL_S)
            load.stopping = part.stopping.is_set()
            if load.stopping:
                await asyncio.gather(*work)
            while load.oddities:
                part.journal.note("odd", load.oddities.pop(0))
            part.journal.note("counts", dict(load.counts))


def event_actors() -> list[Actor]:
    """Return who plays here."""
    found = []
    for name, ports in PORTS.items():
        spec = {"live": f"{HOST}:{ports[0]}", "replay": f"{HOST}:{ports[1]}"}
        found.append(Actor(f"{name}.publisher", f"services:publish_on_{name}", spec, 1.0))
        found.append(Actor(f"{name}.subscriber.0", "services:subscribe", spec | {"publisher": f"{name}.publisher"}))
    live, replay = LINKED["loop"]
    spec = {"live": f"{HOST}:{live}", "replay": f"{HOST}:{replay}", "publisher": "loop.publisher"}
    found.append(Actor("loop.subscriber.1", "services:subscribe", spec))
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


def link_actors() -> list[Actor]:
    """Return who plays here; a dead one would take all its links with it for good, so it is not struck."""
    return [Actor("links", "services:cut", {}, 0.0)]


async def cut(part: Part) -> None:
    """Stand between them until the end."""
    sys.path.insert(0, str(_PROXIES))
    proxy: Any = importlib.import_module("proxy")
    path = part.work / "handles" / "far"
    while not path.exists():  # noqa: ASYNC110 -- another process makes it
        await asyncio.sleep(0.05)
    handle = Handle.from_json(path.read_text())
    chance = random.Random(part.chance.random())
    async with proxy.proxied(handle, chance) as (linked, data, control):
        found = [data, control]
        for (live, replay), ports in ((LINKED[name], PORTS[name]) for name in LINKED):
            for own, target in ((live, ports[0]), (replay, ports[1])):
                found.append(await proxy.Proxy(f"{HOST}:{target}", chance, own).__aenter__())
        path.with_suffix(".linked").write_text(linked.to_json())
        for each in found:
            each.misbehave(EVERY_S, DELAY_S)
        while not part.calm and not part.stopping.is_set():  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        for each in found:
            await each.behave()
        await part.stopping.wait()
        part.journal.note("links", sum(each.connections for each in found))
        for each in found[2:]:
            await each.__aexit__()
