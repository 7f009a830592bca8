"""The subscriber against real publishers: order, waiting, cancellation, and how it ends."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from aioshm.errors import EventsLost, QueueClosed, RoleError
from aioshm.events import (
    BlockRemoved,
    CurveKeys,
    EventBatch,
    EventSubscriber,
    Received,
    ZmqEventPublisher,
)
from aioshm.events.protocol.encoding import BatchEncoder
from aioshm.events.protocol.wire import MAX_TOPIC_BYTES

from ..helpers import ANY, PATIENCE_S, Ends, batch, publish_until_delivery, take


async def test_late_subscriber_gets_everything_or_a_loss(ends: Ends) -> None:
    publisher = await ends.filled(25, buffer_steps=10)
    everything = ends.subscriber(publisher)
    with pytest.raises(EventsLost) as caught:
        await anext(everything)
    assert (caught.value.first, caught.value.last) == (0, 14)
    assert publisher.endpoint in str(caught.value.__notes__)
    assert [(await anext(everything))[0] for _ in range(10)] == list(range(15, 25))
    from_20 = ends.subscriber(publisher, start=20)
    assert [item.seq for item in await take(from_20, 5) if isinstance(item, Received)] == list(range(20, 25))


async def test_live_start_begins_with_the_first_arrival(ends: Ends) -> None:
    publisher = await ends.filled(1)
    subscriber = ends.subscriber(publisher, start="live")
    subscriber.open()
    item = await publish_until_delivery(publisher, subscriber)
    assert isinstance(item, Received)
    assert item.seq > 0


async def test_cancelling_loses_nothing(ends: Ends) -> None:
    publisher = ends.publisher()
    subscriber = ends.subscriber(publisher, max_waiting=2)
    chance = random.Random(5)
    got: list[int] = []

    async def read() -> None:
        seq, _ = await anext(subscriber)
        got.append(seq)

    published = 0
    async with asyncio.timeout(PATIENCE_S):
        while len(got) < 100:
            if published < 100:
                publisher.publish(batch(published))
                published += 1
            task = asyncio.create_task(read())
            for _ in range(chance.randrange(4)):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    assert got == list(range(100))


async def test_closing_ends_every_wait(ends: Ends) -> None:
    publisher = ends.publisher()
    subscriber = ends.subscriber(publisher)
    with pytest.raises(TimeoutError):
        await subscriber.receive(0.01)

    async def read() -> int:
        return len([item async for item in subscriber.deliveries()])

    async def read_next() -> object:
        return await anext(subscriber, "the end")

    waiting = [asyncio.create_task(call) for call in (read(), read_next(), subscriber.receive())]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await subscriber.aclose()
    await subscriber.aclose()
    assert [await waiting[0], await waiting[1]] == [0, "the end"]
    with pytest.raises(QueueClosed):
        await waiting[2]
    assert [item async for item in subscriber] == []
    with pytest.raises(QueueClosed):
        subscriber.open()


async def test_abandoned_subscriber_warns_and_closes(ends: Ends) -> None:
    publisher = ends.publisher()
    subscriber = EventSubscriber(publisher.endpoint, publisher.replay_endpoint)
    subscriber.open()
    with pytest.warns(ResourceWarning, match="was not closed"):
        del subscriber


async def test_another_loop_is_refused(ends: Ends) -> None:
    subscriber = ends.subscriber(ends.publisher())
    subscriber.open()
    with pytest.raises(RoleError, match="another event loop"):
        await asyncio.to_thread(lambda: asyncio.run(subscriber.receive(0.1)))


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        (([],), {}),
        (("nowhere",), {}),
        ((["tcp://h:1", "tcp://h:2"], "tcp://h:3"), {}),
        (("tcp://h:1", "x"), {}),
        (("tcp://h:1",), {"start": 2**64 - 1}),
        (("tcp://h:1",), {"start": "now"}),
        (("tcp://h:1",), {"replay_timeout": float("nan")}),
        (("tcp://h:1",), {"check_interval": 0}),
        (("tcp://h:1",), {"gone_after_s": 0}),
        (("tcp://h:1",), {"max_waiting": 0}),
        (("tcp://h:1",), {"topic": "\u00e9" * 257}),
        (("tcp://h:1",), {"max_payload_bytes": 0}),
        (("tcp://h:1",), {"max_backlog_bytes": 0}),
    ],
)
def test_bad_arguments_are_named(arguments: Any, options: Any) -> None:
    with pytest.raises(ValueError, match=next(iter(options), "endpoint")):
        EventSubscriber(*arguments, **options)


# Limits: encryption makes each frame longer


async def test_payload_of_exactly_the_limit_arrives(nothing_left: None) -> None:
    server = CurveKeys.generate()
    client = CurveKeys.generate(server.public)
    largest = EventBatch(1.0, [BlockRemoved([bytes(1000)], "GPU")])
    size = len(BatchEncoder().encode(largest, 0))
    async with EventSubscriber(ANY, start="live", bind=True, curve=server, max_payload_bytes=size) as subscriber:
        async with ZmqEventPublisher(0, subscriber.endpoints[0], curve=client) as publisher:
            await publish_until_delivery(publisher, subscriber)
            publisher.publish(largest)
            async with asyncio.timeout(PATIENCE_S):
                async for _, got in subscriber:
                    if got.events == largest.events:
                        break
    assert subscriber.stats().garbage == subscriber.stats().reconnects == 0


async def test_longest_topic_is_subscribed_to(nothing_left: None) -> None:
    server = CurveKeys.generate()
    topic = "t" * MAX_TOPIC_BYTES
    async with ZmqEventPublisher(0, ANY, bind=True, topic=topic, curve=server) as publisher:
        async with EventSubscriber(
            publisher.endpoint, topic=topic, start="live", curve=CurveKeys.generate(server.public)
        ) as subscriber:
            item = await publish_until_delivery(publisher, subscriber)
            assert item.source.topic == topic.encode()
