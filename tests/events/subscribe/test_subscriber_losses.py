"""The subscriber where messages, connections and publishers are lost: always everything or a word."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import until

from aioshm.events import (
    BlockIndex,
    BlockRemoved,
    BlockStored,
    EventBatch,
    EventSubscriber,
    Lost,
    Received,
    Source,
    UnknownEvent,
    ZmqEventPublisher,
    follow,
)

from ..helpers import ANY, PATIENCE_S, Ends, batch, publish_until_delivery, take
from ..proxy import LossyProxy, kept_endpoint
from ..truth import Truth, held


@pytest.fixture
def endpoints() -> Iterator[tuple[str, str]]:
    """Yield a live and a replay endpoint for consecutive publishers."""
    with kept_endpoint() as endpoint, kept_endpoint() as replay:
        yield endpoint, replay


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
        await until(lambda: source._replay.has_answer)
        source.resume()
        source._replay.overdue_at -= 2 * PATIENCE_S
    source._tick()
    assert [item.seq for item in await take(subscriber, 1000) if isinstance(item, Received)] == list(range(1000))
    assert subscriber.stats().replay_failures == 0


async def test_a_killed_publisher_that_comes_back_is_noticed(nothing_left: None, endpoints: tuple[str, str]) -> None:
    endpoint, replay = endpoints
    index: BlockIndex[Source] = BlockIndex()
    async with EventSubscriber(endpoint, replay, check_interval=0.05, replay_timeout=1.0) as subscriber:
        for life, count in enumerate((40, 41, 20, 300)):  # more, fewer and more batches than before
            truth = Truth(life)
            async with ZmqEventPublisher(0, endpoint, replay, bind=True) as publisher:
                for _ in range(count):
                    publisher.publish(truth.step())
                async with asyncio.timeout(PATIENCE_S):
                    while held(index) != truth.held or not index.complete(index.publishers[0]):
                        follow(index, await subscriber.receive())
        assert subscriber.stats().restarts == 3


async def test_tiny_check_interval_delivers_every_batch(ends: Ends) -> None:
    """A timer of no time at all, which uvloop makes no timer of."""
    publisher = ends.publisher()
    async with EventSubscriber(publisher.endpoint, publisher.replay_endpoint, check_interval=1e-6) as subscriber:
        for n in range(50):
            publisher.publish(batch(n))
            await asyncio.sleep(0)
        assert [item.seq for item in await take(subscriber, 50)] == list(range(50))


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


STEPS = st.lists(
    st.tuples(st.sampled_from(["publish"] * 5 + ["restart", "pause", "join"]), st.integers(1, 60)),
    min_size=3,
    max_size=8,
)


@given(
    steps=STEPS,
    share=st.sampled_from([0.0, 0.3, 0.7]),
    buffer=st.sampled_from([20, 10_000]),
    wire=st.sampled_from(["vllm-0.24+", "vllm-0.9"]),
    seed=st.integers(0, 99),
)
@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
def test_soak(steps: list[tuple[str, int]], share: float, buffer: int, wire: Any, seed: int) -> None:
    """Whatever happens to publisher and network: the index equals the truth, or a loss was reported."""
    with kept_endpoint() as replay:
        is_complete = asyncio.run(soak(steps, share, buffer, wire, seed, replay))
    if buffer > 20 and "restart" not in [action for action, _ in steps]:
        assert is_complete, "replay has everything"


async def soak(steps: list[tuple[str, int]], share: float, buffer: int, wire: Any, seed: int, replay: str) -> bool:
    publisher = ZmqEventPublisher(0, ANY, replay, buffer, bind=True, wire=wire)
    proxy = LossyProxy(publisher.endpoint, share, seed)
    truth = Truth(seed)
    options: Any = {"check_interval": 0.02, "replay_timeout": 0.5}
    subscriber = EventSubscriber(proxy.endpoint, replay, **options)
    subscriber.open()
    index: BlockIndex[Source] = BlockIndex()
    try:
        for action, count in steps:
            if action == "publish":
                for _ in range(count):
                    publisher.publish(truth.step())
            elif action == "restart":
                await publisher.aclose(0)
                truth = Truth(seed + count)
                publisher = ZmqEventPublisher(0, ANY, replay, buffer, bind=True, wire=wire)
                proxy.follow(publisher.endpoint)
            elif action == "pause":
                await asyncio.sleep(count / 2000)
            else:
                await subscriber.aclose()
                index = BlockIndex()
                subscriber = EventSubscriber(proxy.endpoint, replay, **options)
                subscriber.open()
        end = EventBatch(float(seed), [BlockStored([2**63 + seed], None, [], 1, None, "GPU")])
        truth.held.add(2**63 + seed)
        publisher.publish(end)
        async with asyncio.timeout(PATIENCE_S):
            while held(index) != truth.held:
                if 2**63 + seed in held(index) and not index.complete(index.publishers[0]):
                    return False  # reported
                follow(index, await subscriber.receive())
        return index.complete(index.publishers[0])
    finally:
        await subscriber.aclose()
        await proxy.close()
        await publisher.aclose()


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
        f"subscriber {publisher.endpoint}: an event of type X arrives as an UnknownEvent: unknown type (logged once)"
    )
