"""The publisher's sockets: what is bound, what is sent, who asks, and how it ends."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import zmq
from support import until

from aioshm.errors import QueueFull, RoleError
from aioshm.events import (
    AllBlocksCleared,
    BlockRemoved,
    CurveKeys,
    EventBatch,
    EventPublisher,
    EventPublisherFactory,
    EventSubscriber,
    KVEventsConfig,
    Lost,
    NullEventPublisher,
    PublisherClosed,
    Received,
    ThreadedEventPublisher,
    ZmqEventPublisher,
    replay_server,
    wire,
)
from aioshm.events.decoding import BatchDecoder

from .helpers import ANY, PATIENCE_S, Ends, batch, take, within


class Raw:
    """A plain ZeroMQ socket, as any other consumer has it; waits without blocking the loop."""

    def __init__(self, kind: int, endpoint: str, hwm: int = 1000) -> None:
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
        self.socket.set_hwm(hwm)
        self.socket.linger = 0
        if kind == zmq.SUB:
            self.socket.subscribe(b"")
        self.socket.connect(endpoint)

    async def receive(self) -> list[bytes]:
        await until(lambda: bool(self.socket.poll(0)))
        return self.socket.recv_multipart()

    async def ask(self, *frames: bytes) -> list[list[bytes]]:
        self.socket.send_multipart(frames)
        answer = [await self.receive()]
        while answer[-1][-2:] != [wire.END_SEQ, b""]:
            answer.append(await self.receive())
        return answer


@pytest.fixture
def raw() -> Any:
    made: list[Raw] = []

    def make(kind: int, endpoint: str, hwm: int = 1000) -> Raw:
        made.append(Raw(kind, endpoint, hwm))
        return made[-1]

    yield make
    for one in made:
        one.socket.close()


async def test_frames_numbers_and_rank(ends: Ends, raw: Any) -> None:
    publisher = ends.publisher(3, topic="kv", endpoint=ANY)
    consumer = raw(zmq.SUB, publisher.endpoint)
    probe = 0
    while not consumer.socket.poll(0):  # until the subscription has arrived
        publisher.publish(batch(probe))
        probe += 1
        await asyncio.sleep(0.005)
    topic, seq, payload = await consumer.receive()
    first = int.from_bytes(seq, "big")
    assert topic == b"kv"
    assert len(seq) == 8
    assert BatchDecoder().decode(payload).data_parallel_rank == 3
    named = EventBatch(1.0, [], 9)
    publisher.publish(named)
    while int.from_bytes(seq, "big") < probe:
        _, seq, payload = await consumer.receive()
    assert BatchDecoder().decode(payload).data_parallel_rank == 9
    assert first < probe


@pytest.mark.parametrize("form", ["topic", "legacy"])
async def test_replay_answers(ends: Ends, raw: Any, form: Any) -> None:
    publisher = ends.publisher(topic="kv", buffer_steps=5, replay_format=form)
    for n in range(8):
        publisher.publish(batch(n))
    await publisher.flush(PATIENCE_S)
    client = raw(zmq.DEALER, publisher.replay_endpoint)
    for start, first in ((0, 3), (6, 6)):  # what is older than the buffer: answered with what there is
        *replies, end = await client.ask(b"", wire.pack_seq(start))
        parsed = [wire.parse_reply(reply) for reply in replies]
        assert [reply.seq for reply in parsed if reply] == list(range(first, 8))
        assert {reply.topic for reply in parsed if reply} == {b"kv" if form == "topic" else None}
        assert end == wire.end_reply(form)
    assert await client.ask(b"", wire.pack_seq(8)) == [wire.end_reply(form)]
    assert publisher.stats().replay_requests == 3


async def test_a_req_socket_gets_one_answer(ends: Ends, raw: Any) -> None:
    """A REQ takes one reply a request: the first; asking for what is not there yet gives the end marker."""
    publisher = ends.publisher()
    client = raw(zmq.REQ, publisher.replay_endpoint)
    client.socket.send(wire.pack_seq(0))
    assert await client.receive() == wire.end_reply("topic")[1:]


async def test_malformed_requests_are_counted_named_and_answered_with_the_end(
    ends: Ends, raw: Any, caplog: pytest.LogCaptureFixture
) -> None:
    publisher = ends.publisher()
    publisher.publish(batch(0))
    client = raw(zmq.DEALER, publisher.replay_endpoint)
    bad = [[b""], [b"x", wire.pack_seq(0)], [b"", b"123"], [b"", wire.pack_seq(0), b"more"], [b"\xff" * 9]]
    with caplog.at_level(logging.WARNING, "aioshm.events"):
        for frames in bad:
            assert await client.ask(*frames) == [wire.end_reply("topic")]
    assert len(await client.ask(b"", wire.pack_seq(0))) == 2  # it still works
    assert publisher.stats().malformed_requests == len(bad)
    assert len(caplog.records) == 1, "rate-limited"
    assert "127.0.0.1" in caplog.text


async def test_strangers_that_do_not_speak_zeromq(ends: Ends, caplog: pytest.LogCaptureFixture) -> None:
    publisher = ends.publisher()
    subscriber = ends.subscriber(publisher)
    with caplog.at_level(logging.WARNING, "aioshm.events"):
        for endpoint in (publisher.endpoint, publisher.replay_endpoint):
            with socket.create_connection(("127.0.0.1", int(endpoint.rpartition(":")[2]))) as stranger:
                stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 20)
        await until(lambda: publisher.stats().handshake_failures >= 2)
    assert "handshake" in caplog.text
    publisher.publish(batch(0))
    assert [item.seq for item in await take(subscriber, 1) if isinstance(item, Received)] == [0]


async def test_a_request_that_is_too_large_is_cut_off(ends: Ends, raw: Any) -> None:
    publisher = ends.publisher()
    stranger = raw(zmq.DEALER, publisher.replay_endpoint)
    stranger.socket.send_multipart([b"", b"x" * 10_000_000])
    publisher.publish(batch(0))
    client = raw(zmq.DEALER, publisher.replay_endpoint)
    await until(lambda: publisher.stats().sent == 1)
    assert len(await client.ask(b"", wire.pack_seq(0))) == 2


async def test_a_slow_client_is_served_fully_while_others_go_on(ends: Ends, raw: Any) -> None:
    publisher = ends.publisher(buffer_steps=3000)
    for n in range(3000):
        publisher.publish(batch(n, 20))
    await publisher.flush(PATIENCE_S)
    slow = raw(zmq.DEALER, publisher.replay_endpoint, hwm=1)
    slow.socket.rcvbuf = 4096
    slow.socket.send_multipart(wire.request(0))
    await until(lambda: publisher.stats().replay_requests == 1)
    for n in range(3000, 7000):  # everything the slow client still has to get is pushed out of the buffer
        publisher.publish(batch(n))
    await publisher.flush(PATIENCE_S)
    quick = raw(zmq.DEALER, publisher.replay_endpoint)
    assert len(await quick.ask(b"", wire.pack_seq(6990))) == 11
    assert publisher.stats().replayed < 3000 + 10
    seen = []
    while (reply := wire.parse_reply(await slow.receive())) is not None:
        seen.append(reply.seq)
    assert seen == list(range(3000))


async def test_a_client_that_stops_reading_is_given_up(ends: Ends, raw: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_server, "STALLED_S", 0.1)
    publisher = ends.publisher()
    for n in range(5000):
        publisher.publish(batch(n, 100))
    await publisher.flush(PATIENCE_S)
    stalled = raw(zmq.DEALER, publisher.replay_endpoint, hwm=1)
    stalled.socket.send_multipart(wire.request(0))
    await until(lambda: publisher.stats().abandoned_replays == 1)


async def test_a_client_that_leaves_is_forgotten(ends: Ends, raw: Any) -> None:
    publisher = ends.publisher()
    for n in range(5000):
        publisher.publish(batch(n, 100))
    await publisher.flush(PATIENCE_S)
    leaving = raw(zmq.DEALER, publisher.replay_endpoint, hwm=1)
    leaving.socket.send_multipart(wire.request(0))
    await until(lambda: publisher.stats().replay_requests == 1)
    leaving.socket.close()
    await until(lambda: publisher.stats().abandoned_replays == 1)


async def test_overflow_is_counted_logged_once_and_visible(ends: Ends, caplog: pytest.LogCaptureFixture) -> None:
    publisher = ends.publisher(max_queue_size=3)
    subscriber = ends.subscriber(publisher)
    with caplog.at_level(logging.WARNING, "aioshm.events"):
        for n in range(6):  # without a turn of the loop in between
            publisher.publish(batch(n))
    assert publisher.stats().dropped == 3
    assert len(caplog.records) == 1
    items = await take(subscriber, 5)
    assert [item.seq for item in items if isinstance(item, Received)] == [
        0,
        1,
        2,
        6,
    ]  # 6 is empty and shows the gap
    assert [(item.first, item.last) for item in items if isinstance(item, Lost)] == [(3, 5)]


async def test_overflow_can_raise(ends: Ends) -> None:
    publisher = ends.publisher(max_queue_size=1, overflow="raise")
    publisher.publish(batch(0))
    with pytest.raises(QueueFull):
        publisher.publish(batch(1))
    assert publisher.stats().published == 1


async def test_what_cannot_be_encoded_is_a_visible_gap(ends: Ends, caplog: pytest.LogCaptureFixture) -> None:
    publisher = ends.publisher()
    subscriber = ends.subscriber(publisher)
    publisher.publish(EventBatch(1.0, [BlockRemoved([2**70], "GPU")]))
    publisher.publish(batch(1))
    items = await take(subscriber, 2)
    assert isinstance(items[0], Lost)
    assert (items[0].first, items[0].last) == (0, 0)
    assert "batch 0 is lost" in caplog.text
    assert publisher.stats().unencodable == 1


async def test_close_delivers_what_is_queued(nothing_left: None) -> None:
    publisher = ZmqEventPublisher(0, ANY, bind=True)
    async with EventSubscriber(publisher.endpoint, start="live") as subscriber:
        publisher.publish(batch(0))
        while True:  # until the subscription has arrived
            try:
                await subscriber.receive(0.01)
                break
            except TimeoutError:
                publisher.publish(batch(0))
        before = publisher.stats().published
        for n in range(2000):
            publisher.publish(batch(n, 10))
        await publisher.aclose(PATIENCE_S)
        await publisher.aclose()
        with pytest.raises(PublisherClosed):
            publisher.publish(batch(0))
        item: Any = None
        while item is None or item.seq < before + 1999:
            item = await subscriber.receive(PATIENCE_S)
            assert isinstance(item, Received)


async def test_close_says_what_was_not_sent(nothing_left: None, caplog: pytest.LogCaptureFixture) -> None:
    publisher = ZmqEventPublisher(0, ANY, bind=True)
    for n in range(5000):
        publisher.publish(batch(n, 50))
    with pytest.raises(TimeoutError, match="5000 event batches still wait"):
        await publisher.flush(0)
    await publisher.aclose(0)
    assert "closed before batches" in caplog.text
    assert "to 4999 were sent" in caplog.text
    stats = publisher.stats()
    assert stats.dropped + stats.sent == 5000


async def test_cancelling_close_closes(nothing_left: None) -> None:
    publisher = ZmqEventPublisher(0, ANY, ANY, bind=True)
    for n in range(5000):
        publisher.publish(batch(n, 50))
    closing = asyncio.create_task(publisher.aclose(PATIENCE_S))
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    with pytest.raises(PublisherClosed):
        publisher.publish(batch(0))
    await until(lambda: not [t for t in threading.enumerate() if t.name.startswith("aioshm-events")])


async def test_cancelling_flush_loses_nothing(ends: Ends) -> None:
    publisher = ends.publisher()
    subscriber = ends.subscriber(publisher)
    for n in range(1000):
        publisher.publish(batch(n))
    flushing = asyncio.create_task(publisher.flush())
    await asyncio.sleep(0)
    flushing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await flushing
    assert [item.seq for item in await take(subscriber, 1000) if isinstance(item, Received)] == list(range(1000))


async def test_an_inproc_name_is_free_again_at_once(nothing_left: None) -> None:
    for _ in range(20):
        async with ZmqEventPublisher(0, "inproc://again", "inproc://again-replay"):
            pass


async def test_sync_shutdown_sends_what_is_queued(nothing_left: None) -> None:
    publisher = ZmqEventPublisher(0, "inproc://shutdown", bind=True)
    async with EventSubscriber("inproc://shutdown", start="live") as subscriber:
        for n in range(100):
            publisher.publish(batch(n))
        publisher.shutdown()
        publisher.shutdown()
        assert publisher.stats().sent == 100
        assert [item.seq for item in await take(subscriber, 100) if isinstance(item, Received)] == list(range(100))


async def test_wrong_place_and_wrong_argument(ends: Ends) -> None:
    publisher = ends.publisher()
    with pytest.raises(TypeError, match="EventBatch"):
        publisher.publish([AllBlocksCleared()])
    failures: list[BaseException] = []

    def elsewhere() -> None:
        try:
            publisher.publish(batch(0))
        except RoleError as error:
            failures.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert "ThreadedEventPublisher" in str(failures[0])


@pytest.mark.parametrize(
    "options",
    [
        {"data_parallel_rank": -1},
        {"endpoint": "tcp://nowhere"},
        {"replay_endpoint": "x"},
        {"buffer_steps": -1},
        {"hwm": -1},
        {"max_queue_size": 0},
        {"encoding": "json"},
        {"replay_format": "new"},
        {"overflow": "sulk"},
    ],
)
async def test_bad_arguments_are_named(nothing_left: None, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must|endpoint"):
        ZmqEventPublisher(**{"data_parallel_rank": 0, "endpoint": ANY, **options})


async def test_an_address_that_is_taken_is_named(ends: Ends) -> None:
    publisher = ends.publisher()
    with pytest.raises(OSError, match=publisher.endpoint):
        ZmqEventPublisher(0, publisher.endpoint, bind=True)


async def test_ranks_and_transports(ends: Ends, tmp_path: Path) -> None:
    path = f"ipc://{tmp_path}/kv"
    publisher = ends.publisher(2, path, "inproc://replay", bind=None)
    assert (publisher.endpoint, publisher.replay_endpoint) == (f"{path}_dp2", "inproc://replay_dp2")
    subscriber = ends.subscriber(publisher)
    publisher.publish(batch(0))
    (item,) = await take(subscriber, 1)
    assert item.source.rank == 2
    assert len(list(tmp_path.iterdir())) == 1
    await publisher.aclose()
    assert list(tmp_path.iterdir()) == [], "its socket file"


async def test_a_subscriber_that_binds_leaves_no_socket_file(nothing_left: None, tmp_path: Path) -> None:
    async with EventSubscriber(f"ipc://{tmp_path}/kv", bind=True):
        assert len(list(tmp_path.iterdir())) == 1
    assert list(tmp_path.iterdir()) == []


async def test_publishers_can_connect_to_a_subscriber_that_binds(nothing_left: None) -> None:
    async with EventSubscriber("tcp://127.0.0.1:0", bind=True) as subscriber:
        (endpoint,) = subscriber.endpoints
        publishers = [ZmqEventPublisher(0, endpoint, topic=name) for name in ("pod-a", "pod-b")]
        seen: dict[bytes | None, list[int]] = {b"pod-a": [], b"pod-b": []}
        async with asyncio.timeout(PATIENCE_S):
            while min(map(len, seen.values())) < 50:
                for publisher in publishers:
                    publisher.publish(batch(0))
                try:
                    item = await subscriber.receive(0.01)
                except TimeoutError:
                    continue
                if isinstance(item, Received):
                    seen[item.source.topic].append(item.seq)
                else:  # what was published before the subscription arrived
                    assert isinstance(item, Lost)
                    assert item.first == 0
        for numbers in seen.values():
            assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        for publisher in publishers:
            await publisher.aclose()


async def test_wildcards_without_curve_warn_once(nothing_left: None, caplog: pytest.LogCaptureFixture) -> None:
    async with ZmqEventPublisher(0, "tcp://*:0", "tcp://*:0"):
        assert len(caplog.records) == 1
        assert "every interface" in caplog.text
    caplog.clear()
    async with ZmqEventPublisher(0, "tcp://*:0", curve=CurveKeys.generate()):
        assert not caplog.records


async def test_curve_lets_in_only_those_with_the_key(nothing_left: None) -> None:
    server = CurveKeys.generate()
    assert server.secret.decode() not in repr(server)
    async with ZmqEventPublisher(0, ANY, ANY, bind=True, curve=server) as publisher:
        publisher.publish(batch(0))
        friend = EventSubscriber(publisher.endpoint, publisher.replay_endpoint, curve=CurveKeys.generate(server.public))
        stranger = EventSubscriber(publisher.endpoint, publisher.replay_endpoint, replay_timeout=0.1)
        async with friend, stranger:
            (item,) = await take(friend, 1)
            assert isinstance(item, Received)
            await until(lambda: publisher.stats().handshake_failures > 0)
            await until(lambda: stranger.stats().replay_failures > 0)
            assert stranger.stats().delivered == 0
        with pytest.raises(ValueError, match=r"curve\.server"):
            async with EventSubscriber(publisher.endpoint, curve=CurveKeys.generate()):
                pass


async def test_a_forgotten_publisher_warns_and_closes(nothing_left: None) -> None:
    publisher = ZmqEventPublisher(0, ANY, ANY, bind=True)
    endpoint = publisher.endpoint
    with pytest.warns(ResourceWarning, match="never closed"):
        del publisher
    await until(lambda: not [t for t in threading.enumerate() if t.name.startswith("aioshm-events")])
    async with ZmqEventPublisher(0, endpoint, bind=True):  # the port is free again
        pass


class TestThreaded:
    def test_any_thread_may_publish(self) -> None:
        with ThreadedEventPublisher(1, ANY, ANY, bind=True) as publisher:
            threads = [
                threading.Thread(target=lambda: [publisher.publish(batch(n)) for n in range(500)]) for _ in range(4)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            publisher.flush(PATIENCE_S)
            assert publisher.stats().sent == 2000

            async def read() -> list[int]:
                async with EventSubscriber(publisher.endpoint, publisher.replay_endpoint) as subscriber:
                    return [item.seq for item in await take(subscriber, 2000) if isinstance(item, Received)]

            assert asyncio.run(read()) == list(range(2000))
            config = publisher.get_publisher_config()
            assert (config.endpoint, config.replay_endpoint) == (
                publisher.endpoint,
                publisher.replay_endpoint,
            )
        publisher.shutdown()
        with pytest.raises(PublisherClosed):
            publisher.publish(batch(0))
        assert not [t for t in threading.enumerate() if t.name.startswith("aioshm-events")]

    def test_what_cannot_be_bound_raises_and_leaves_no_thread(self) -> None:
        with pytest.raises(ValueError, match="max_queue_size"):
            ThreadedEventPublisher(0, ANY, max_queue_size=0)
        assert not [t for t in threading.enumerate() if t.name.startswith("aioshm-events")]

    def test_a_forgotten_one_warns_and_ends_its_thread(self) -> None:
        publisher = ThreadedEventPublisher(0, ANY, bind=True)
        with pytest.warns(ResourceWarning, match="never shut down"):
            del publisher
        deadline = time.monotonic() + PATIENCE_S
        while [t for t in threading.enumerate() if t.name.startswith("aioshm-events")]:
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def test_flush_and_shutdown_say_what_is_left(self, caplog: pytest.LogCaptureFixture) -> None:
        publisher = ThreadedEventPublisher(0, ANY, bind=True)
        large = batch(0, 1000)  # takes the thread far longer to encode than this one to publish
        for _ in range(3000):
            publisher.publish(large)
        with pytest.raises(TimeoutError, match="still wait"):
            publisher.flush(0)
        publisher.shutdown(0)
        assert "to 2999 were sent" in caplog.text


class TestFactory:
    @pytest.mark.parametrize("config", [None, KVEventsConfig(), KVEventsConfig(True, "null")])
    def test_nothing_to_publish(self, config: KVEventsConfig | None) -> None:
        publisher = EventPublisherFactory.create(config)
        assert isinstance(publisher, NullEventPublisher)
        publisher.publish(batch(0))
        publisher.shutdown()
        assert publisher.get_publisher_config() is None

    def test_defaults_are_the_fields(self) -> None:
        config = KVEventsConfig(enable_kv_cache_events=True)
        assert (config.publisher, config.endpoint, config.replay_endpoint) == ("zmq", "tcp://*:5557", None)
        assert (config.buffer_steps, config.hwm, config.max_queue_size, config.topic) == (
            10_000,
            100_000,
            100_000,
            "",
        )
        assert KVEventsConfig().publisher == "null"

    async def test_on_a_loop(self, nothing_left: None) -> None:
        config = KVEventsConfig(True, endpoint="tcp://127.0.0.1:*", replay_endpoint=ANY, topic="kv")
        before = repr(config)
        publisher = EventPublisherFactory.create(config, 2)
        assert isinstance(publisher, ZmqEventPublisher)
        assert repr(config) == before
        resolved = publisher.get_publisher_config()
        assert resolved.endpoint == publisher.endpoint
        assert resolved.topic == "kv"
        assert ":*" not in resolved.endpoint
        await publisher.aclose()

    def test_without_a_loop(self) -> None:
        publisher = EventPublisherFactory.create(KVEventsConfig(True, endpoint="inproc://without-a-loop"))
        assert isinstance(publisher, ThreadedEventPublisher)
        publisher.shutdown()

    def test_names(self) -> None:
        class Mine(EventPublisher):
            def __init__(self, data_parallel_rank: int = 0, **options: Any) -> None:
                super().__init__(data_parallel_rank)
                self.options = options

            def publish(self, events: EventBatch) -> None: ...

            def shutdown(self) -> None: ...

        with pytest.raises(ValueError, match=r"unknown event publisher 'kafka': known are null, zmq"):
            EventPublisherFactory.create(KVEventsConfig(True, "kafka"))
        with pytest.raises(KeyError, match="zmq"):
            EventPublisherFactory.register_publisher("zmq", Mine)
        EventPublisherFactory.register_publisher("test-mine", Mine)
        try:
            made = EventPublisherFactory.create(KVEventsConfig(True, "test-mine", topic="t"), 4)
        finally:
            EventPublisherFactory._registry.pop("test-mine")
        assert isinstance(made, Mine)
        assert made.options["topic"] == "t"


async def test_publishing_waits_for_nobody(ends: Ends) -> None:
    """A subscriber that never reads and a client that never reads its replay hold nobody up."""
    publisher = ends.publisher(hwm=10)
    idle = ends.subscriber(publisher, max_waiting=1)
    idle.open()
    for n in range(3000):
        publisher.publish(batch(n, 10))
    await within(publisher.flush())
    assert publisher.stats().sent == 3000
