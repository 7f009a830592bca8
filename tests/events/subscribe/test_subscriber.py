"""The subscriber against real publishers: order, waiting, cancellation, losses, and the end."""

from __future__ import annotations

import asyncio
import random
import re
from contextlib import suppress
from typing import Any

import pytest
from support import until

from aioshm.errors import EventsLost, QueueClosed, RoleError
from aioshm.events import (
    BlockIndex,
    BlockRemoved,
    BlockStored,
    CurveKeys,
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
from aioshm.events.protocol.encoding import BatchEncoder
from aioshm.events.protocol.wire import MAX_TOPIC_BYTES

from ..helpers import ANY, PATIENCE_S, Ends, batch, publish_all, publish_until_delivery, take
from ..proxy import LossyProxy, kept_endpoint


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
            publish_all(publisher, range(100))
            first = await take(subscriber, 100)
            proxy.cut()
            publish_all(publisher, range(100, 200))
            await publisher.flush()
            await until(proxy.bind_again)
            items = first + await take(subscriber, 100)
            assert [item.seq for item in items if isinstance(item, Received)] == list(range(200))


async def test_batches_that_wait_when_a_connection_breaks_are_delivered(ends: Ends) -> None:
    publisher = ends.publisher(buffer_steps=10)
    async with LossyProxy(publisher.endpoint, 0.0) as proxy:
        async with EventSubscriber(
            proxy.endpoint, publisher.replay_endpoint, start="live", max_waiting=4, check_interval=None
        ) as subscriber:
            first: Any = await publish_until_delivery(publisher, subscriber)
            publish_all(publisher, range(100))
            backlog = subscriber._sources[0].port.backlog
            await until(lambda: backlog.entries and backlog.entries[-1].number == backlog.received - 1 >= 100)
            proxy.cut()
            await until(lambda: subscriber.unconnected)
            await until(proxy.bind_again)
            await until(lambda: not subscriber.unconnected)
            items = await take(subscriber, 100)
            assert [item.seq for item in items if isinstance(item, Received)] == list(
                range(first.seq + 1, first.seq + 101)
            )


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
