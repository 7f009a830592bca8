"""The subscriber against real publishers: gaps, restarts, strangers, cancellation; always everything or a
word."""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import until

from aioshm.errors import EventsLost, QueueClosed, RoleError
from aioshm.events import (
    AllBlocksCleared,
    BlockIndex,
    BlockRemoved,
    BlockStored,
    EventBatch,
    EventSubscriber,
    Lost,
    PublisherRestarted,
    Received,
    Restarted,
    Source,
    ZmqEventPublisher,
    follow,
    wire,
)
from aioshm.events.encoding import BatchEncoder

from .helpers import ANY, PATIENCE_S, Ends, batch, take


class LossyProxy:
    """Stands between a publisher's PUB and a subscriber and drops a share of the messages."""

    def __init__(self, upstream: str, share: float, seed: int = 1) -> None:
        context = zmq.Context.instance()
        self._front: zmq.Socket[bytes] = context.socket(zmq.SUB)
        self._back: zmq.Socket[bytes] = context.socket(zmq.PUB)
        for end in (self._front, self._back):
            end.set_hwm(0)
            end.linger = 0
        self._front.subscribe(b"")
        self._front.connect(upstream)
        self.upstream = upstream
        self._back.bind(ANY)
        self.endpoint = self._back.last_endpoint.rstrip(b"\0").decode()
        self._random = random.Random(seed)
        self._share = share
        self.dropped = 0
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            while self._front.poll(0):
                frames = self._front.recv_multipart()
                if self._random.random() < self._share:
                    self.dropped += 1
                else:
                    self._back.send_multipart(frames)
            await asyncio.sleep(0.001)

    def follow(self, upstream: str) -> None:
        self._front.disconnect(self.upstream)
        self._front.connect(upstream)
        self.upstream = upstream

    def bind_again(self) -> bool:
        """Bind where it was; False as long as ZeroMQ has not given the address back."""
        try:
            self._back.bind(self.endpoint)
        except zmq.ZMQError:
            return False
        return True

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._front.close()
        self._back.close()


@pytest_asyncio.fixture
async def stranger() -> AsyncIterator[Any]:
    made: list[zmq.Socket[bytes]] = []

    def make(kind: int, endpoint: str, *, bind: bool = False) -> zmq.Socket[bytes]:
        one: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
        one.linger = 0
        made.append(one)
        one.bind(endpoint) if bind else one.connect(endpoint)
        return one

    yield make
    for one in made:
        one.close()


def free_endpoint() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


class Truth:
    """A cache that changes at random and publishes what it does."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.held: set[int] = set()
        self._next = 0

    def step(self) -> EventBatch:
        events: list[Any] = []
        for _ in range(self._random.randrange(4)):
            choice = self._random.random()
            if choice < 0.65 or not self.held:
                self._next += 1
                self.held.add(self._next)
                events.append(BlockStored([self._next], None, [1], 1, None, "GPU"))
            elif choice < 0.99:
                gone = self._random.choice(sorted(self.held))
                self.held.discard(gone)
                events.append(BlockRemoved([gone], "GPU"))
            else:
                self.held.clear()
                events.append(AllBlocksCleared())
        return EventBatch(float(self._random.random()), events)


async def follow_until(
    subscriber: EventSubscriber, index: BlockIndex[Source], source_count: int, last: dict[Any, int]
) -> bool:
    """Feed the index until every rank in ``last`` has reached its last number; True if a loss was
    reported."""
    at: dict[Any, int] = {}
    lost = False
    async with asyncio.timeout(PATIENCE_S):
        while any(at.get(rank, -1) < number for rank, number in last.items()):
            item = await subscriber.receive()
            follow(index, item)
            if isinstance(item, Restarted):
                at[item.source.rank] = -1
            elif isinstance(item, Lost):
                lost = True
                at[item.source.rank] = item.last
            else:
                assert item.seq == at.get(item.source.rank, -1) + 1
                at[item.source.rank] = item.seq
    return lost


def held(index: BlockIndex[Source], rank: int = 0) -> set[Any]:
    found: set[Any] = set()
    for source in index.publishers:
        if source.rank == rank:
            for blocks in index.blocks(source).values():
                found |= blocks
    return found


async def test_a_burst_arrives_whole_and_in_order(ends: Ends) -> None:
    publisher = ends.publisher()
    subscriber = ends.subscriber(publisher)
    subscriber.open()
    events = batch(0, 100).events
    for n in range(10_000):
        publisher.publish(EventBatch(float(n), events))
    number = 0
    async for seq, got in subscriber:
        assert seq == number == got.ts
        assert len(got.events) == 100
        number += 1
        if number == 10_000:
            break
    assert subscriber.stats().lost == 0


async def test_a_late_joiner_gets_everything_or_hears_what_is_gone(ends: Ends) -> None:
    publisher = ends.publisher(buffer_steps=10)
    for n in range(25):
        publisher.publish(batch(n))
    await publisher.flush(PATIENCE_S)
    everything = ends.subscriber(publisher)
    with pytest.raises(EventsLost) as caught:
        await anext(everything)
    assert (caught.value.first, caught.value.last) == (0, 14)
    assert publisher.endpoint in str(caught.value.__notes__)
    assert [(await anext(everything))[0] for _ in range(10)] == list(range(15, 25))
    from_20 = ends.subscriber(publisher, start=20)
    assert [item.seq for item in await take(from_20, 5) if isinstance(item, Received)] == list(range(20, 25))


async def test_live_only_begins_with_what_comes(ends: Ends) -> None:
    publisher = ends.publisher()
    publisher.publish(batch(0))
    await publisher.flush()
    subscriber = ends.subscriber(publisher, start="live")
    subscriber.open()
    while True:
        publisher.publish(batch(1))
        try:
            item = await subscriber.receive(0.02)
        except TimeoutError:
            continue
        break
    assert isinstance(item, Received)
    assert item.seq > 0


async def test_the_lost_end_of_a_stream_is_found(ends: Ends) -> None:
    publisher = ends.publisher()
    proxy = LossyProxy(publisher.endpoint, 1.0)
    try:
        subscriber = EventSubscriber(proxy.endpoint, publisher.replay_endpoint, check_interval=0.05)
        async with subscriber:
            for n in range(5):
                publisher.publish(batch(n))
                assert (await take(subscriber, 1))[0].seq == n  # type: ignore[union-attr]
    finally:
        await proxy.close()


async def test_without_replay_a_gap_is_reported(ends: Ends) -> None:
    publisher = ends.publisher(replay=None)
    proxy = LossyProxy(publisher.endpoint, 0.3)
    try:
        async with EventSubscriber(proxy.endpoint) as subscriber:
            at, lost = -1, 0
            n = 0
            async with asyncio.timeout(PATIENCE_S):
                while at < 500:
                    publisher.publish(batch(n))
                    n += 1
                    try:
                        item = await subscriber.receive(0.001)
                    except TimeoutError:
                        continue
                    first, last = (item.seq, item.seq) if isinstance(item, Received) else (item.first, item.last)  # type: ignore[union-attr]
                    assert first == at + 1
                    at = last
                    lost += isinstance(item, Lost)
            assert lost
    finally:
        await proxy.close()


@pytest.mark.parametrize("form", ["topic", "legacy"])
@pytest.mark.parametrize("encoding", ["array", "map"])
async def test_thirty_percent_loss_leaves_no_trace(ends: Ends, form: Any, encoding: Any) -> None:
    publisher = ends.publisher(replay_format=form, encoding=encoding, topic="kv")
    proxy = LossyProxy(publisher.endpoint, 0.3)
    truth = Truth(1)
    index: BlockIndex[Source] = BlockIndex()
    try:
        async with EventSubscriber(proxy.endpoint, publisher.replay_endpoint, "kv", check_interval=0.05) as subscriber:
            for n in range(1500):
                publisher.publish(truth.step())
                if n % 50 == 0:
                    await asyncio.sleep(0.002)
            assert not await follow_until(subscriber, index, 1, {0: 1499})
            assert held(index) == truth.held
            assert subscriber.stats().replayed > 0
    finally:
        await proxy.close()


async def test_a_killed_publisher_that_comes_back_is_noticed(nothing_left: None) -> None:
    endpoint, replay = free_endpoint(), free_endpoint()
    index: BlockIndex[Source] = BlockIndex()
    async with EventSubscriber(endpoint, replay, check_interval=0.05, replay_timeout=1.0) as subscriber:
        for life, count in enumerate((40, 41, 20, 300)):  # fewer, one more, and many more than the one before
            truth = Truth(life)
            async with ZmqEventPublisher(0, endpoint, replay, bind=True) as publisher:
                for _ in range(count):
                    publisher.publish(truth.step())
                async with asyncio.timeout(PATIENCE_S):
                    while held(index) != truth.held or not index.complete(index.publishers[0]):
                        follow(index, await subscriber.receive())
        assert subscriber.stats().restarts == 3


async def test_a_publisher_process_that_is_killed(nothing_left: None) -> None:
    endpoint, replay = free_endpoint(), free_endpoint()
    code = f"""
import asyncio
from aioshm.events import BlockStored, EventBatch, ZmqEventPublisher
async def main():
    async with ZmqEventPublisher(0, {endpoint!r}, {replay!r}, bind=True) as publisher:
        n = 0
        while True:
            publisher.publish(EventBatch(float(n), [BlockStored([n], None, [1], 1, None, "GPU")]))
            n += 1
            await asyncio.sleep(0.001)
asyncio.run(main())
"""
    async with EventSubscriber(endpoint, replay, check_interval=0.05, replay_timeout=1.0) as subscriber:
        for life in range(2):
            process = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
            try:
                expected = 0
                async with asyncio.timeout(PATIENCE_S):
                    while expected < 200:
                        item = await subscriber.receive()
                        if isinstance(item, Restarted):
                            assert life == 1
                            expected = 0
                            continue
                        assert isinstance(item, Received)
                        assert item.seq == expected
                        expected += 1
            finally:
                process.kill()
                await process.wait()
        with pytest.raises(PublisherRestarted):
            raise Restarted(item.source, 5).error()


async def test_what_is_overdue_at_once(ends: Ends) -> None:
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
    proxy = LossyProxy(publisher.endpoint, 0.0)
    try:
        async with EventSubscriber(proxy.endpoint, publisher.replay_endpoint, check_interval=0.05) as subscriber:
            for n in range(100):
                publisher.publish(batch(n))
            first = await take(subscriber, 100)
            proxy._back.unbind(proxy.endpoint)
            for n in range(100, 200):
                publisher.publish(batch(n))
            await publisher.flush()
            await until(proxy.bind_again)
            items = first + await take(subscriber, 100)
            assert [item.seq for item in items if isinstance(item, Received)] == list(range(200))
    finally:
        await proxy.close()


async def test_many_ranks_each_in_its_own_order(ends: Ends) -> None:
    publishers = [ends.publisher(rank) for rank in range(4)]
    truths = [Truth(rank) for rank in range(4)]
    async with EventSubscriber(
        [one.endpoint for one in publishers], [one.replay_endpoint for one in publishers]
    ) as subscriber:
        for _ in range(300):
            for publisher, truth in zip(publishers, truths, strict=True):
                publisher.publish(truth.step())
        index: BlockIndex[Source] = BlockIndex()
        assert not await follow_until(subscriber, index, 4, dict.fromkeys(range(4), 299))
        assert [held(index, rank) for rank in range(4)] == [truth.held for truth in truths]


async def test_a_consumer_that_is_slow_loses_nothing(ends: Ends) -> None:
    publisher = ends.publisher(hwm=50)
    subscriber = ends.subscriber(publisher, max_waiting=4, hwm=50)
    subscriber.open()
    for n in range(3000):
        publisher.publish(batch(n))
    await publisher.flush()
    assert [item.seq for item in await take(subscriber, 3000) if isinstance(item, Received)] == list(range(3000))


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
        while len(got) < 300:
            if published < 300:
                publisher.publish(batch(published))
                published += 1
            task = asyncio.create_task(read())
            for _ in range(chance.randrange(4)):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    assert got == list(range(300))


async def test_two_readers_share_the_stream(ends: Ends) -> None:
    publisher = ends.publisher()
    subscriber = ends.subscriber(publisher)
    got: list[int] = []

    async def read() -> None:
        async for seq, _ in subscriber:
            got.append(seq)

    readers = [asyncio.create_task(read()) for _ in range(2)]
    for n in range(200):
        publisher.publish(batch(n))
        await asyncio.sleep(0)
    await until(lambda: len(got) == 200)
    await subscriber.aclose()
    await asyncio.gather(*readers)
    assert got == list(range(200))


async def test_garbage_from_strangers_is_counted_and_named(
    nothing_left: None, stranger: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with EventSubscriber("tcp://127.0.0.1:0", bind=True) as subscriber:
        (endpoint,) = subscriber.endpoints
        publisher = ZmqEventPublisher(0, endpoint)
        bad = stranger(zmq.PUB, endpoint)
        good = BatchEncoder().encode(batch(0), 0)
        junk = [
            [b""],
            [b"", b"1", good],
            [b"", b"\xff" * 8, good],
            [b"", wire.pack_seq(0), b"\xc1"],
            [b"a", b"b", b"c", b"d"],
        ]
        at = -1
        with caplog.at_level(logging.WARNING, "aioshm.events"):
            async with asyncio.timeout(PATIENCE_S):
                while at < 100 or subscriber.stats().garbage < 20:
                    for frames in junk:
                        bad.send_multipart(frames)
                    publisher.publish(batch(0))
                    try:
                        item = await subscriber.receive(0.002)
                    except TimeoutError:
                        continue
                    if isinstance(item, Received):
                        assert at in (-1, item.seq - 1)
                        at = item.seq
        assert endpoint in caplog.text
        assert len(caplog.records) == 1, "rate-limited"
        await publisher.aclose()


async def test_a_replay_port_that_answers_garbage(ends: Ends, stranger: Any) -> None:
    publisher = ends.publisher(replay=None)
    router = stranger(zmq.ROUTER, ANY, bind=True)
    replay = router.last_endpoint.rstrip(b"\0").decode()
    async with EventSubscriber(publisher.endpoint, replay, replay_timeout=0.2, check_interval=None) as subscriber:
        subscriber.open()

        async def serve() -> None:
            while True:
                while router.poll(0):
                    identity = router.recv_multipart()[0]
                    for frames in (
                        [b"x"],
                        [b"", b"y", b"z"],
                        [b"", b"", wire.pack_seq(1), b"\xc1"],
                        [b"", b"", b"", b"", b""],
                    ):
                        router.send_multipart([identity, *frames])
                await asyncio.sleep(0.001)

        serving = asyncio.create_task(serve())
        try:
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    publisher.publish(batch(0))
                    try:
                        item = await subscriber.receive(0.02)
                    except TimeoutError:
                        continue
                    break
            assert isinstance(item, Received | Lost)
            stats = subscriber.stats()
            assert stats.garbage > 0
            assert stats.replay_failures > 0
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)


async def test_a_silent_replay_port_ends_in_a_loss_that_names_it(ends: Ends, stranger: Any) -> None:
    publisher = ends.publisher(replay=None)
    silent = stranger(zmq.ROUTER, ANY, bind=True).last_endpoint.rstrip(b"\0").decode()
    async with EventSubscriber(
        publisher.endpoint, silent, start="live", replay_timeout=0.05, check_interval=None
    ) as subscriber:
        proxied: list[Any] = []
        async with asyncio.timeout(PATIENCE_S):
            while not any(isinstance(item, Lost) for item in proxied):
                publisher.publish(batch(0))
                if proxied:  # a number that nobody can fill
                    publisher._outbox.put(EventBatch(0.0, [object()]))
                try:
                    proxied.append(await subscriber.receive(0.01))
                except TimeoutError:
                    continue
        assert silent in proxied[-1].reason
        assert "did not answer" in proxied[-1].reason


async def test_closing_ends_every_wait(ends: Ends) -> None:
    publisher = ends.publisher()
    subscriber = ends.subscriber(publisher)

    async def read() -> int:
        return len([item async for item in subscriber.deliveries()])

    waiting = [asyncio.create_task(read()), asyncio.create_task(subscriber.receive())]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await subscriber.aclose()
    await subscriber.aclose()
    assert await waiting[0] == 0
    with pytest.raises(QueueClosed):
        await waiting[1]
    assert [item async for item in subscriber] == []
    with pytest.raises(QueueClosed):
        subscriber.open()


async def test_timeouts_raise(ends: Ends) -> None:
    subscriber = ends.subscriber(ends.publisher())
    with pytest.raises(TimeoutError):
        await subscriber.receive(0.01)


async def test_a_forgotten_subscriber_warns_and_closes(ends: Ends) -> None:
    publisher = ends.publisher()
    subscriber = EventSubscriber(publisher.endpoint, publisher.replay_endpoint)
    subscriber.open()
    with pytest.warns(ResourceWarning, match="never closed"):
        del subscriber


async def test_another_loop_is_refused(ends: Ends) -> None:
    subscriber = ends.subscriber(ends.publisher())
    subscriber.open()

    def elsewhere() -> None:
        with pytest.raises(RoleError):
            asyncio.run(subscriber.receive(0.1))

    await asyncio.get_running_loop().run_in_executor(None, elsewhere)
    await asyncio.get_running_loop().shutdown_default_executor()


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        (([],), {}),
        (("nowhere",), {}),
        ((["tcp://h:1", "tcp://h:2"], "tcp://h:3"), {}),
        (("tcp://h:1", "x"), {}),
        (("tcp://h:1",), {"start": -1}),
        (("tcp://h:1",), {"start": "now"}),
        (("tcp://h:1",), {"replay_timeout": 0}),
        (("tcp://h:1",), {"check_interval": 0}),
        (("tcp://h:1",), {"max_waiting": 0}),
    ],
)
def test_bad_arguments_are_named(arguments: Any, options: Any) -> None:
    with pytest.raises(ValueError, match=r"endpoint|start|replay_timeout|max_waiting"):
        EventSubscriber(*arguments, **options)


async def test_an_address_that_is_taken_is_named(ends: Ends) -> None:
    publisher = ends.publisher()
    with pytest.raises(OSError, match=publisher.endpoint):
        EventSubscriber(publisher.endpoint, bind=True).open()


STEPS = st.lists(
    st.tuples(st.sampled_from(["publish"] * 5 + ["restart", "pause", "join"]), st.integers(1, 60)),
    min_size=3,
    max_size=8,
)


@given(
    steps=STEPS,
    share=st.sampled_from([0.0, 0.3, 0.7]),
    buffer=st.sampled_from([20, 10_000]),
    seed=st.integers(0, 99),
)
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
def test_soak(steps: list[tuple[str, int]], share: float, buffer: int, seed: int) -> None:
    """Whatever happens to publisher and network: the index equals the truth, or a loss was reported."""
    asyncio.run(soak(steps, share, buffer, seed))


async def soak(steps: list[tuple[str, int]], share: float, buffer: int, seed: int) -> None:
    replay = free_endpoint()
    publisher = ZmqEventPublisher(0, ANY, replay, buffer, bind=True)
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
                publisher = ZmqEventPublisher(0, ANY, replay, buffer, bind=True)
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
                    break  # reported
                follow(index, await subscriber.receive())
    finally:
        await subscriber.aclose()
        await proxy.close()
        await publisher.aclose()
