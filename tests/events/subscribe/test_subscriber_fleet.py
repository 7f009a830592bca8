"""The subscriber of a fleet that changes: publishers that are replaced over a new connection, and that are gone."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from typing import Any

import psutil
import pytest
from support import until

from aioshm.events import (
    BlockIndex,
    BlockRemoved,
    BlockStored,
    CurveKeys,
    Delivery,
    EventBatch,
    EventSubscriber,
    PublisherDisconnected,
    PublisherGone,
    Received,
    Source,
    ZmqEventPublisher,
    follow,
)

from ..helpers import ANY, PATIENCE_S, Ends, batch
from ..proxy import LossyProxy, kept_endpoint
from ..raw import RawPublisher

GONE_S = 0.5
FLEET = 30
SIZES = [
    pytest.param(5, 2, id="five pods"),
    pytest.param(FLEET, 20, id="thirty pods", marks=[pytest.mark.slow, pytest.mark.timeout(300)]),
]
"""Of fleets, and how many times each publisher is replaced."""
BLOCKS = 10
MEMORY_BYTES = 8 << 20


class Following:
    """Reads a subscriber into an index.

    Attributes:
        index: The index.
        items: All deliveries.
    """

    def __init__(self, subscriber: EventSubscriber) -> None:
        self.index: BlockIndex[Source] = BlockIndex()
        self.items: list[Delivery] = []
        self._task = asyncio.create_task(self._read(subscriber))

    async def _read(self, subscriber: EventSubscriber) -> None:
        async for item in subscriber.deliveries():
            follow(self.index, item)
            self.items.append(item)

    async def received(self, seq: int, topic: bytes = b"") -> None:
        """Wait until the last batch of a topic has this number."""
        await until(lambda: self._last(topic) == seq, f"batch {seq}")

    def _last(self, topic: bytes) -> int | None:
        of_topic = [item for item in self.items if item.source.topic == topic]
        return of_topic[-1].seq if of_topic and isinstance(of_topic[-1], Received) else None

    def kinds(self, topic: bytes = b"") -> list[str]:
        """Return the types of a topic's deliveries."""
        return [type(item).__name__ for item in self.items if item.source.topic == topic]

    def topics(self) -> set[bytes | None]:
        return {source.topic for source in self.index.publishers}

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


@asynccontextmanager
async def followed(*args: Any, **options: Any) -> AsyncIterator[tuple[EventSubscriber, Following]]:
    """Open a subscriber and follow it."""
    async with EventSubscriber(*args, **{"check_interval": 0.05, "gone_after_s": GONE_S, **options}) as subscriber:
        following = Following(subscriber)
        try:
            yield subscriber, following
        finally:
            await following.close()


@pytest.fixture
def publishers() -> Iterator[list[RawPublisher]]:
    """Give a list of publishers, which are closed when the test is over."""
    made: list[RawPublisher] = []
    yield made
    for publisher in made:
        publisher.close()


@pytest.mark.parametrize("seq", [10, 15, 3, 0], ids=["expected", "gap", "back", "first"])
async def test_publisher_without_replay_that_is_replaced_is_reported(
    nothing_left: None, publishers: list[RawPublisher], seq: int
) -> None:
    with kept_endpoint() as endpoint:
        async with followed(endpoint, gone_after_s=None) as (subscriber, following):
            old = await RawPublisher(endpoint, bind=True).subscribed()
            for number in range(10):
                old.send(number, 1000 + number)
            await following.received(9)
            old.close()
            await until(lambda: subscriber.unconnected, "the end of the connection")
            publishers.append(await RawPublisher(endpoint, bind=True).subscribed())
            publishers[0].send(seq, 2000)
            await following.received(seq)
    kinds = following.kinds()[10:]
    assert kinds == (["Restarted", "Received"] if seq == 0 else ["Restarted", "Lost", "Received"])
    (source,) = following.index.publishers
    assert following.index.complete(source) is (seq == 0)
    assert not following.index.holders(1000)
    assert following.index.holders(2000)


async def test_publisher_that_keeps_its_connection_is_not_reported(
    nothing_left: None, publishers: list[RawPublisher]
) -> None:
    with kept_endpoint() as endpoint:
        async with followed(endpoint) as (subscriber, following):
            publishers.append(await RawPublisher(endpoint, bind=True).subscribed())
            for number in range(10):
                publishers[0].send(number, number)
                await following.received(number)
            assert following.kinds() == ["Received"] * 10
            assert subscriber.stats().reconnects == 0


@pytest.mark.parametrize("port", ["open", "encrypted", "ipc"])
async def test_port_of_many_publishers_reports_only_those_that_are_replaced_or_gone(
    nothing_left: None, publishers: list[RawPublisher], tmp_path: Any, port: str
) -> None:
    keys = CurveKeys.generate() if port == "encrypted" else None
    where = f"ipc://{tmp_path}/events" if port == "ipc" else ANY
    async with followed(where, bind=True, curve=keys) as (subscriber, following):
        (endpoint,) = subscriber.endpoints

        async def connect(topic: bytes) -> RawPublisher:
            curve = None if keys is None else CurveKeys.generate(keys.public)
            publisher = RawPublisher(endpoint, bind=False, topic=topic, curve=curve)
            publishers.append(publisher)
            return await publisher.subscribed()

        pods = {topic: await connect(topic) for topic in (b"stays", b"restarts", b"leaves")}
        for topic, pod in pods.items():
            pod.send(0, 1000)
            await following.received(0, topic)
        pods[b"restarts"].close()
        pods[b"restarts"] = await connect(b"restarts")
        pods[b"restarts"].send(1, 2000)
        await following.received(1, b"restarts")
        pods[b"leaves"].close()
        await until(lambda: b"leaves" not in following.topics(), "the publisher that leaves is forgotten")
        pods[b"stays"].send(1, 2000)
        await following.received(1, b"stays")
        assert following.kinds(b"stays") == ["Received", "Received"]
        assert following.kinds(b"restarts") == ["Received", "Restarted", "Lost", "Received"]
        assert following.kinds(b"leaves") == ["Received", "PublisherGone"]
        assert following.topics() == {b"stays", b"restarts"}
        assert subscriber.stats().gone == 1


@pytest.mark.slow
async def test_publishers_that_end_while_nothing_is_read_are_gone(
    nothing_left: None, publishers: list[RawPublisher]
) -> None:
    """Whether or not the last bytes of a connection fill its queue, at a port that is open to all."""
    async with EventSubscriber(ANY, bind=True, max_waiting=1, gone_after_s=0.2) as subscriber:
        for pod in range(FLEET):
            publisher = RawPublisher(subscriber.endpoints[0], bind=False, topic=b"%d" % pod)
            publishers.append(await publisher.subscribed())
        publishers[0].send(0, 1000)
        await until(
            lambda: subscriber.stats().delivered == 1
        )  # the consumer does not take it, so the subscriber reads no more
        for pod, publisher in enumerate(publishers):
            for seq in range(100 * pod):
                publisher.send(seq, seq)
            publisher.close()
        gone = 0
        async with asyncio.timeout(4 * PATIENCE_S):
            while gone < FLEET:
                gone += isinstance(await subscriber.receive(), PublisherGone)
        assert not subscriber._sources[0]._port.connections


async def test_publisher_that_is_gone_is_reported_once_and_forgotten(ends: Ends) -> None:
    publisher = ends.publisher()
    async with followed(publisher.endpoint, publisher.replay_endpoint, replay_timeout=0.1) as (subscriber, following):
        publisher.publish(batch(0))
        await following.received(0)
        await publisher.aclose()
        await until(lambda: following.kinds() == ["Received", "PublisherGone"], "the publisher is gone")
        assert following.index.publishers == []
        assert len(following.index) == 0
        gone = following.items[-1]
        assert isinstance(gone, PublisherGone)
        assert (gone.expected, gone.source.endpoint) == (1, publisher.endpoint)
        assert gone.after_s >= GONE_S
        failures = subscriber.stats().replay_failures
        await until(lambda: subscriber.stats().replay_failures >= failures + 3, "more questions")
        assert following.kinds() == ["Received", "PublisherGone"]


async def test_iteration_raises_for_a_publisher_that_is_gone(ends: Ends) -> None:
    publisher = ends.publisher(replay=None)
    publisher.publish(batch(0))
    async with EventSubscriber(publisher.endpoint, start="live", gone_after_s=0.05) as subscriber:
        while True:
            publisher.publish(batch(0))
            try:
                async with asyncio.timeout(0.05):
                    await anext(subscriber)
                break
            except TimeoutError:
                continue
        await publisher.aclose()
        with pytest.raises(PublisherDisconnected, match="is gone") as caught:
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    await anext(subscriber)
        assert caught.value.source.endpoint == publisher.endpoint


async def test_idle_publisher_with_a_broken_connection_is_not_gone_if_replay_confirms_it(ends: Ends) -> None:
    publisher = ends.publisher()
    async with (
        LossyProxy(publisher.endpoint, 0.0) as proxy,
        followed(proxy.endpoint, publisher.replay_endpoint) as (subscriber, following),
    ):
        publisher.publish(batch(0))
        await following.received(0)
        await until(lambda: not subscriber.unconnected, "the connection")
        proxy.cut()
        await until(lambda: subscriber.unconnected, "the end of the connection")
        await until(proxy.bind_again)
        await until(lambda: subscriber.stats().reconnects, "another connection")
        asked = publisher.stats().replay_requests
        # Each question comes within a third of `gone_after_s`.
        await until(lambda: publisher.stats().replay_requests >= asked + 10, "questions of a quiet subscriber")
        assert following.kinds() == ["Received"]
        publisher.publish(batch(1))
        await following.received(1)
        assert following.kinds() == ["Received", "Received"]


async def test_connection_that_ends_in_its_handshake_is_named_and_no_garbage(
    nothing_left: None, caplog: pytest.LogCaptureFixture
) -> None:
    """As at a proxy that has no backend."""

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    endpoint = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    with caplog.at_level(logging.WARNING, "aioshm.events"):
        async with EventSubscriber(endpoint) as subscriber:
            await until(lambda: subscriber.stats().handshake_failures >= 2, "connections that fail")
            await until(lambda: caplog.records, "a warning")
            assert subscriber.stats().garbage == 0
    server.close()
    await server.wait_closed()
    assert f"subscriber {endpoint}: the connection ended during the handshake" in caplog.text
    assert "message" not in caplog.text
    assert "keys" not in caplog.text


@pytest.mark.parametrize(("pods", "rounds"), SIZES)
async def test_publishers_replaced_at_the_same_endpoints_leave_nothing_behind(
    nothing_left: None, pods: int, rounds: int
) -> None:
    with ExitStack() as stack:
        lives, replays = ([stack.enter_context(kept_endpoint()) for _ in range(pods)] for _ in range(2))
        async with followed(lives, replays, gone_after_s=pods / 20) as (subscriber, following):
            await Fleet(subscriber, following, lives, replays).replace_all(rounds)
            assert subscriber.stats().lost == 0


@pytest.mark.parametrize(("pods", "rounds"), SIZES)
async def test_publishers_replaced_at_a_port_of_many_leave_nothing_behind(
    nothing_left: None, pods: int, rounds: int
) -> None:
    async with followed(ANY, bind=True, gone_after_s=pods / 20) as (subscriber, following):
        await Fleet(subscriber, following, subscriber.endpoints * pods, [None] * pods).replace_all(rounds)


class Pod:
    """A publisher with a cache of `BLOCKS` blocks: each batch stores one more, and removes the oldest."""

    def __init__(self, topic: str, live: str, replay: str | None) -> None:
        self.topic = topic.encode()
        self.publisher = ZmqEventPublisher(0, live, replay, bind=replay is not None, topic=topic)
        self.steps = 0

    def step(self) -> None:
        stored = BlockStored([self.steps], None, [1], 1, None, "GPU")
        self.publisher.publish(EventBatch(0.0, [stored, BlockRemoved([self.steps - BLOCKS], "GPU")]))
        self.steps += 1

    def blocks(self) -> set[int]:
        return set(range(max(0, self.steps - BLOCKS), self.steps))


class Fleet:
    """Publishers that are deleted and added, one by one, under traffic."""

    def __init__(
        self, subscriber: EventSubscriber, following: Following, lives: Sequence[str], replays: Sequence[str | None]
    ) -> None:
        self._subscriber = subscriber
        self._following = following
        self._lives = lives
        self._replays = replays
        self._pods: list[Pod] = []
        self._publishing = asyncio.Event()

    async def replace_all(self, rounds: int) -> None:
        """Replace each publisher so many times: index, memory, descriptors and idle replays stay as they were."""
        traffic = asyncio.create_task(self._publish())
        process = psutil.Process()
        memory = descriptors = 0
        try:
            for life in range(rounds):
                self._publishing.set()
                await self._replace_each(life)
                await self._follows_only_the_living()
                self._publishing.clear()
                await self._is_right()
                assert self._subscriber.stats().gone == life * len(self._lives)
                if None not in self._replays:
                    await idle_replays_bring_one_batch_each([pod.publisher for pod in self._pods])
                self._following.items.clear()
                gc.collect()
                # The follower may still hold its last delivery.
                assert sum(isinstance(each, Source) for each in gc.get_objects()) <= len(self._pods) + 1
                if life < rounds / 2:  # allocators have their pools by then
                    memory, descriptors = process.memory_info().rss, process.num_fds()
                else:
                    await descriptors_at_most(descriptors + len(self._pods))
                    assert process.memory_info().rss <= memory + MEMORY_BYTES
        finally:
            traffic.cancel()
            await asyncio.gather(traffic, *(pod.publisher.aclose() for pod in self._pods), return_exceptions=True)
        await until(lambda: not self._following.topics(), "all are gone", 4 * PATIENCE_S)
        assert self._subscriber.stats().gone == rounds * len(self._lives)
        assert self._subscriber.stats().restarts == 0

    async def _publish(self) -> None:
        while True:
            await self._publishing.wait()
            for pod in self._pods:
                pod.step()
            await asyncio.sleep(0.02)

    async def _replace_each(self, life: int) -> None:
        for at, (live, replay) in enumerate(zip(self._lives, self._replays, strict=True)):
            if life:
                old = self._pods.pop(0)
                await old.publisher.aclose()
            self._pods.append(Pod(f"{life}.{at}", live, replay))
            await asyncio.sleep(0)

    async def _follows_only_the_living(self) -> None:
        topics = {pod.topic for pod in self._pods}
        await until(lambda: self._following.topics() == topics, "the publishers of this round", 4 * PATIENCE_S)
        # Of a publisher that connects, the first batches may be lost; their blocks are removed by then.
        seen = [pod.steps for pod in self._pods]
        await until(lambda: all(pod.steps > BLOCKS + at for pod, at in zip(self._pods, seen, strict=True)), "traffic")

    async def _is_right(self) -> None:
        """Wait until the index has the blocks of each publisher, and no others."""
        index = self._following.index

        def is_right() -> bool:
            found = {source.topic: set().union(*index.blocks(source).values()) for source in index.publishers}
            return found == {pod.topic: pod.blocks() for pod in self._pods}

        await until(is_right, "the index is right")
        assert len(index) == BLOCKS * len(self._pods)


async def descriptors_at_most(most: int) -> None:
    """Wait for that: questions that are under way have sockets of their own."""
    process = psutil.Process()
    await until(lambda: process.num_fds() <= most, f"at most {most} descriptors")


async def idle_replays_bring_one_batch_each(fleet: Sequence[ZmqEventPublisher]) -> None:
    """Wait until an answer has one batch, the last: a question that came while batches were sent may bring more."""

    def replays() -> list[tuple[int, int]]:
        return [(stats.replay_requests, stats.replayed) for stats in (publisher.stats() for publisher in fleet)]

    def is_answered_twice(before: list[tuple[int, int]]) -> bool:
        return all(now[0] >= then[0] + 2 for then, now in zip(before, replays(), strict=True))

    most = 0
    for _ in range(4):
        before = replays()
        await until(partial(is_answered_twice, before), "two more questions to each publisher", 2 * PATIENCE_S)
        # An answer may have begun before, and one may not have ended yet.
        most = max(now[1] - then[1] - (now[0] - then[0]) for then, now in zip(before, replays(), strict=True))
        if most <= 1:
            return
    pytest.fail(f"idle replays bring {most} batches more than there were questions")
