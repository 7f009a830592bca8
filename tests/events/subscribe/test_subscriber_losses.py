"""The subscriber where messages, connections and publishers are lost: always everything or a word."""

from __future__ import annotations

import asyncio
import re
from contextlib import suppress
from typing import Any

import pytest
from support import until

from aioshm.events import (
    BlockIndex,
    BlockRemoved,
    BlockStored,
    EventBatch,
    EventSubscriber,
    Lost,
    Received,
    Shelf,
    Source,
    UnknownEvent,
    ZmqEventPublisher,
    follow,
)

from ..helpers import PATIENCE_S, Ends, batch, publish_until_delivery, take
from ..proxy import LossyProxy, kept_endpoint


@pytest.mark.parametrize("late", ["the timer", "the loop"])
async def test_answer_that_takes_long_is_read_to_its_end(ends: Ends, late: str) -> None:
    """The answer is overdue only if nothing has come for so long: not as a whole, nor because the loop was busy."""
    publisher = await ends.filled(1000, 20)
    subscriber = ends.subscriber(publisher, max_waiting=5000, replay_timeout=PATIENCE_S)
    subscriber.open()
    (source,) = subscriber._sources
    await until(lambda: source.stats.replayed)
    assert source._tracker.asking is not None
    if late == "the loop":
        source._pause()
        await until(lambda: source._replay._dealer and source._replay._dealer.poll(0))
        source.resume()
        source._replay.overdue_at -= 2 * PATIENCE_S
    source._tick()
    assert [item.seq for item in await take(subscriber, 1000) if isinstance(item, Received)] == list(range(1000))
    assert subscriber.stats().replay_failures == 0


async def test_a_killed_publisher_that_comes_back_is_noticed(nothing_left: None) -> None:
    index: BlockIndex[Source] = BlockIndex()
    with kept_endpoint() as endpoint, kept_endpoint() as replay:
        async with EventSubscriber(endpoint, replay, check_interval=0.05, replay_timeout=1.0) as subscriber:
            for life, count in enumerate((40, 41, 20, 300)):  # more, fewer and more batches than before
                blocks = {1000 * life + number for number in range(count)}
                async with ZmqEventPublisher(0, endpoint, replay, bind=True) as publisher:
                    for block in sorted(blocks):
                        publisher.publish(EventBatch(0.0, [BlockStored([block], None, [1], 1, None, "GPU")]))
                    async with asyncio.timeout(PATIENCE_S):
                        while [index.blocks(source) for source in index.publishers] != [{Shelf("GPU", None): blocks}]:
                            follow(index, await subscriber.receive())
                    assert index.complete(index.publishers[0])
            assert subscriber.stats().restarts == 3


async def test_tiny_check_interval_delivers_every_batch(ends: Ends) -> None:
    """A timer of no time at all, which uvloop makes no timer of."""
    publisher = ends.publisher()
    async with EventSubscriber(publisher.endpoint, publisher.replay_endpoint, check_interval=1e-6) as subscriber:
        for n in range(50):
            publisher.publish(batch(n))
            await asyncio.sleep(0)
        assert [item.seq for item in await take(subscriber, 50)] == list(range(50))


async def test_timer_that_fires_early_does_not_postpone_the_check(ends: Ends) -> None:
    """The timer stays set for the time of an older message: its call must not begin the silence anew."""
    publisher = ends.publisher()
    subscriber = ends.subscriber(publisher, check_interval=PATIENCE_S)
    publisher.publish(batch(0))
    await take(subscriber, 1)
    (source,) = subscriber._sources
    await until(lambda: source._check_at is not None)
    due = source._check_at
    source._timer.cancel()  # as after its time
    source._tick()
    assert source._check_at == source._due == due


async def test_a_connection_that_breaks_is_resumed(ends: Ends) -> None:
    """Everything that was published while there was no connection comes by replay."""
    publisher = ends.publisher()
    async with LossyProxy(publisher.endpoint, 0.0) as proxy:
        async with EventSubscriber(proxy.endpoint, publisher.replay_endpoint, check_interval=0.05) as subscriber:
            for n in range(100):
                publisher.publish(batch(n))
            first = await take(subscriber, 100)
            proxy.cut()
            for n in range(100, 200):
                publisher.publish(batch(n))
            await publisher.flush()
            await until(proxy.bind_again)
            items = first + await take(subscriber, 100)
            assert [item.seq for item in items if isinstance(item, Received)] == list(range(200))


@pytest.mark.parametrize("wire", ["vllm-0.24+", "vllm-0.9"])
async def test_batches_that_the_network_loses_come_by_replay(ends: Ends, wire: Any) -> None:
    publisher = ends.publisher(wire=wire)
    async with LossyProxy(publisher.endpoint, 0.5) as proxy:
        async with EventSubscriber(proxy.endpoint, publisher.replay_endpoint, check_interval=0.05) as subscriber:
            for n in range(200):
                publisher.publish(batch(n))
                if not n % 20:
                    await subscriber.receive(PATIENCE_S)
            items = await take(subscriber, 190)
            assert [item.seq for item in items if isinstance(item, Received)] == list(range(10, 200))
            assert subscriber.stats().gaps > 0


@pytest.mark.parametrize("replay", [False, True])
async def test_batch_that_was_refused_is_lost_for_that_reason(ends: Ends, replay: bool) -> None:
    publisher = ends.publisher()
    subscriber = ends.subscriber(publisher, start="live", replay=replay, max_payload_bytes=1000)
    subscriber.open()
    first = await publish_until_delivery(publisher, subscriber)
    assert isinstance(first, Received)
    publisher.publish(EventBatch(0.0, [BlockRemoved([bytes(1000)], "GPU")]))
    losses = []
    async with asyncio.timeout(PATIENCE_S):
        while not losses:
            publisher.publish(batch(0))
            with suppress(TimeoutError):
                item = await subscriber.receive(0.01)
                losses += [item] if isinstance(item, Lost) else []
    assert re.search(r"refused \d+ messages so far, the last one: a payload of 1\d+ bytes", losses[0].reason)
    assert losses[0].reason.endswith("at most 1000 are taken: max_payload_bytes")


async def test_events_that_are_not_understood_are_logged_once_and_counted(
    ends: Ends, caplog: pytest.LogCaptureFixture
) -> None:
    publisher = ends.publisher()
    for _ in range(3):
        publisher.publish(EventBatch(0.0, [UnknownEvent("X", ["X", 1]), UnknownEvent("BlockStored", ["BlockStored"])]))
    publisher.publish(EventBatch(0.0, [BlockRemoved([1], "GPU")]))
    await publisher.flush(PATIENCE_S)
    subscriber = ends.subscriber(publisher)
    await take(subscriber, 4)
    assert subscriber.stats().unknown_events == 6
    (record,) = caplog.records
    assert record.getMessage() == (
        f"subscriber {publisher.endpoint}: an event of type 'X' arrives as an UnknownEvent: unknown type (logged once)"
    )
