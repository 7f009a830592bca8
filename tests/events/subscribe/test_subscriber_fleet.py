"""The subscriber of a fleet that changes: publishers that are replaced over a new connection, and that are gone."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
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
from ..proxy import LossyProxy
from ..raw import RawPublisher

GONE_S = 0.5
FLEET = 4
ROUNDS = 2
BLOCKS = 10


class Following:
    """Reads a subscriber into an index."""

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


@pytest.mark.parametrize("port", ["encrypted", "ipc"])
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
        await until(lambda: subscriber.stats().delivered == 1)  # is not taken: the subscriber reads no more
        for pod, publisher in enumerate(publishers):
            for seq in range(100 * pod):
                publisher.send(seq, seq)
            publisher.close()
        gone = 0
        async with asyncio.timeout(4 * PATIENCE_S):
            while gone < FLEET:
                gone += isinstance(await subscriber.receive(), PublisherGone)
        assert not subscriber._sources[0].port.connections


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
        with pytest.raises(PublisherDisconnected, match="is gone") as caught:
            raise gone.error()
        assert caught.value.source is gone.source
        failures = subscriber.stats().replay_failures
        await until(lambda: subscriber.stats().replay_failures > failures, "more questions")
        assert following.kinds() == ["Received", "PublisherGone"]


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
        await until(lambda: publisher.stats().replay_requests >= asked + 8, "questions of a quiet subscriber")
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


class Pod:
    """A publisher with a cache of `BLOCKS` blocks: each batch stores one more, and removes the oldest."""

    def __init__(self, topic: str, endpoint: str) -> None:
        self.topic = topic.encode()
        self.publisher = ZmqEventPublisher(0, endpoint, bind=False, topic=topic)
        self.steps = 0

    def step(self) -> None:
        stored = BlockStored([self.steps], None, [1], 1, None, "GPU")
        self.publisher.publish(EventBatch(0.0, [stored, BlockRemoved([self.steps - BLOCKS], "GPU")]))
        self.steps += 1

    def blocks(self) -> set[int]:
        return set(range(max(0, self.steps - BLOCKS), self.steps))


async def test_publishers_replaced_one_by_one_under_traffic_leave_nothing_behind(nothing_left: None) -> None:
    pods: list[Pod] = []
    descriptors = 0

    def is_right() -> bool:
        found = {source.topic: set().union(*index.blocks(source).values()) for source in index.publishers}
        return found == {pod.topic: pod.blocks() for pod in pods}

    async with followed(ANY, bind=True) as (subscriber, following):
        index = following.index
        try:
            for life in range(ROUNDS):
                for number in range(FLEET):
                    if life:
                        await pods.pop(0).publisher.aclose()
                    pods.append(Pod(f"{life}.{number}", subscriber.endpoints[0]))
                    for pod in pods:
                        pod.step()
                    await asyncio.sleep(0.01)
                async with asyncio.timeout(4 * PATIENCE_S):
                    while following.topics() != {pod.topic for pod in pods}:
                        for pod in pods:
                            pod.step()
                        await asyncio.sleep(0.02)
                for pod in pods * BLOCKS:  # the first batches of a publisher that connects may be lost
                    pod.step()
                await until(is_right, "the index is right")
                assert subscriber.stats().gone == life * FLEET
                following.items.clear()
                gc.collect()
                # The follower may still hold its last delivery.
                assert sum(isinstance(each, Source) for each in gc.get_objects()) <= FLEET + 1
                descriptors = descriptors or psutil.Process().num_fds()
            await until(lambda: psutil.Process().num_fds() <= descriptors, "the descriptors of the first round")
        finally:
            await asyncio.gather(*(pod.publisher.aclose() for pod in pods), return_exceptions=True)
        await until(lambda: not following.topics(), "all are gone", 4 * PATIENCE_S)
        assert (subscriber.stats().gone, subscriber.stats().restarts) == (ROUNDS * FLEET, 0)
