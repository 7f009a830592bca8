"""A subscriber that is slower than its publisher, or among strangers: its memory is bounded, losses are reported."""

from __future__ import annotations

import asyncio
import logging
import re
import tracemalloc
from contextlib import suppress
from typing import Any

import pytest
import zmq
from support import until

from aioshm.events import BlockRemoved, CurveKeys, EventBatch, EventSubscriber, Lost, Received, ZmqEventPublisher
from aioshm.events.protocol import wire
from aioshm.events.protocol.encoding import BatchEncoder
from aioshm.events.protocol.tracker import Connection, SourceTracker
from aioshm.events.protocol.wire import pack_seq
from aioshm.events.subscribe.ports import Backlog

from ..helpers import ANY, PATIENCE_S, Ends, batch, publish_until_delivery
from ..proxy import kept_endpoint
from ..raw import RawPublisher

LARGE = EventBatch(0.0, [BlockRemoved([bytes(1000)], "GPU")])
BACKLOG_BYTES = 100_000


async def not_reading(ends: Ends, publisher: Any, **options: Any) -> tuple[EventSubscriber, Any]:
    """Return a subscriber that is read no more, and a call that waits until it has received everything."""
    bounds = {"max_waiting": 1, "max_backlog_bytes": BACKLOG_BYTES, "check_interval": None}
    subscriber = ends.subscriber(publisher, start="live", **bounds, **options)
    first: Any = await publish_until_delivery(publisher, subscriber)

    async def received_all() -> None:
        await publisher.flush()
        count = publisher.stats().published - first.seq
        await until(lambda: backlog_of(subscriber).received == count, "all batches have come")

    return subscriber, received_all


def backlog_of(subscriber: EventSubscriber) -> Backlog:
    return subscriber._sources[0].port.backlog


@pytest.mark.parametrize("replay", [True, False], ids=["with replay", "without replay"])
async def test_consumer_that_does_not_read_makes_the_oldest_messages_dropped(
    ends: Ends, replay: bool, caplog: pytest.LogCaptureFixture
) -> None:
    publisher = ends.publisher()
    subscriber, received_all = await not_reading(ends, publisher, replay=replay)
    with caplog.at_level(logging.WARNING, "aioshm.events"):
        for _ in range(1000):
            publisher.publish(LARGE)
        await received_all()
    assert backlog_of(subscriber).size <= BACKLOG_BYTES
    dropped = subscriber.stats().dropped
    assert dropped > 800
    [record] = caplog.records
    assert publisher.endpoint in record.getMessage()
    assert "max_backlog_bytes" in record.getMessage()
    lost: list[Lost] = []
    expected: int | None = None
    end = publisher.stats().published
    while expected != end:
        item = await subscriber.receive(PATIENCE_S)
        assert isinstance(item, Received | Lost)
        first, last = (item.seq, item.seq) if isinstance(item, Received) else (item.first, item.last)
        assert expected in (None, first)
        expected = last + 1
        lost += [item] if isinstance(item, Lost) else []
    if replay:
        assert not lost
        assert subscriber.stats().replayed >= dropped
    else:
        assert sum(each.last + 1 - each.first for each in lost) == dropped == subscriber.stats().lost
        text = r"no replay endpoint was given; its backlog was full, and it dropped \d+ batches: it decodes too slowly"
        assert all(re.fullmatch(text, each.reason) for each in lost)


async def test_consumer_that_does_not_read_does_not_keep_the_loop_busy(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = ends.publisher()
    subscriber, received_all = await not_reading(ends, publisher)
    for _ in range(1000):
        publisher.publish(LARGE)
    await received_all()
    port = subscriber._sources[0].port
    read_ahead = port.read_ahead
    calls = 0

    def counted(tracker: SourceTracker) -> bool:
        nonlocal calls
        calls += 1
        return read_ahead(tracker)

    monkeypatch.setattr(port, "read_ahead", counted)
    for _ in range(20):
        publisher.publish(batch(0))
        await received_all()
    assert 0 < calls <= 100


async def test_publisher_replaced_while_the_consumer_does_not_read_is_reported_in_its_place(nothing_left: None) -> None:
    """The messages of both wait in the backlog, and their numbers go on."""
    with kept_endpoint() as endpoint:
        async with EventSubscriber(endpoint, max_waiting=1, gone_after_s=None) as subscriber:
            subscriber.open()
            old = await RawPublisher(endpoint, bind=True).subscribed()
            for number in range(10):
                old.send(number, number)
            await until(lambda: backlog_of(subscriber).received == 10, "the batches of the first")
            old.close()
            await until(lambda: subscriber.unconnected, "the end of the connection")
            new = await RawPublisher(endpoint, bind=True).subscribed()
            for number in range(10, 15):
                new.send(number, number)
            await until(lambda: backlog_of(subscriber).received == 15, "the batches of the second")
            items = [await subscriber.receive(PATIENCE_S) for _ in range(17)]
            new.close()
    kinds = [type(item).__name__ for item in items]
    assert kinds == ["Received"] * 10 + ["Restarted", "Lost"] + ["Received"] * 5


# The backlog


def test_backlog_takes_as_much_memory_as_it_may_and_keeps_the_newest_messages() -> None:
    tracemalloc.start()
    try:
        backlog = Backlog(1 << 20)
        connection = Connection()
        for number in range(3000):
            backlog.put(connection, [b"t", pack_seq(number), bytes(1000)])
        used, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0.9 * backlog.size < used < 1.1 * backlog.size
    assert most < 1.2 * (1 << 20)
    kept = [backlog.take().number for _ in range(len(backlog.entries))]
    assert kept == list(range(backlog.dropped, 3000))
    smallest = Backlog(1)
    for number in (1, 2):
        smallest.put(connection, [b"t", pack_seq(number), bytes(1000)])
    assert [entry.number for entry in smallest.entries] == [1], "the newest stays, however large"


async def test_garbage_from_strangers_is_counted_and_named(
    nothing_left: None, raw: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with EventSubscriber("tcp://127.0.0.1:0", bind=True) as subscriber:
        (endpoint,) = subscriber.endpoints
        publisher = ZmqEventPublisher(0, endpoint, bind=False)
        bad = raw(zmq.PUB, endpoint).socket
        good = BatchEncoder().encode(batch(0), 0)
        junk = [
            [b""],
            [b"", b"1", good],
            [b"", b"\xff" * 8, good],
            [b"", wire.pack_seq(0), b"\xc1"],
            [b"a", b"b", b"c", b"d"],
            [bytes(513), wire.pack_seq(0), good],
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


async def test_connections_end_at_an_open_port_while_the_consumer_does_not_read(nothing_left: None) -> None:
    """ZeroMQ's I/O thread blocks after 2,000 unread events of connections."""
    async with EventSubscriber("tcp://127.0.0.1:0", bind=True, start="live", max_waiting=1) as subscriber:
        (endpoint,) = subscriber.endpoints
        [source] = subscriber._sources
        async with ZmqEventPublisher(0, endpoint) as publisher:
            await publish_until_delivery(publisher, subscriber)
            publisher.publish(batch(0))
            await until(lambda: source._state == "paused", "a consumer that does not read")
            before = subscriber.stats().handshake_failures
            _, writer = await asyncio.open_connection("127.0.0.1", int(endpoint.rpartition(":")[2]))
            writer.close()
            await until(lambda: subscriber.stats().handshake_failures > before, "the end of the connection")


GARBAGE = [[b"x"], [b"", b"y", b"z"], [b"", b"", wire.pack_seq(1), b"\xc1"], [b"", b"", b"", b"", b""]]


@pytest.mark.parametrize("answer", [[], GARBAGE], ids=["nothing", "garbage"])
async def test_gap_is_lost_if_the_replay_port_answers_nothing_of_use(
    ends: Ends, raw: Any, answer: list[list[bytes]]
) -> None:
    publisher = ends.publisher(replay=None)
    replay = raw(zmq.ROUTER, ANY, bind=True)
    router = replay.socket
    async with EventSubscriber(
        publisher.endpoint, replay.endpoint, start="live", replay_timeout=0.05, check_interval=None
    ) as subscriber:
        await publish_until_delivery(publisher, subscriber)
        publisher.publish(EventBatch(0.0, [object()]))  # type: ignore[list-item]  # leaves a hole
        publisher.publish(batch(0))
        items: list[Any] = []
        async with asyncio.timeout(PATIENCE_S):
            while not any(isinstance(item, Lost) for item in items):
                if router.poll(0):
                    identity = router.recv_multipart()[0]
                    for frames in answer:
                        router.send_multipart([identity, *frames])
                with suppress(TimeoutError):
                    items.append(await subscriber.receive(0.001))
        assert f"{replay.endpoint} did not answer" in items[-1].reason
        assert subscriber.stats().replay_failures > 0
        assert (subscriber.stats().garbage > 0) is bool(answer)


async def test_answers_that_break_off_lose_nothing_while_each_brings_more(nothing_left: None, raw: Any) -> None:
    replay = raw(zmq.ROUTER, ANY, bind=True)
    with kept_endpoint() as endpoint:
        async with EventSubscriber(
            endpoint, replay.endpoint, start="live", replay_timeout=0.05, check_interval=None
        ) as subscriber:
            subscriber.open()
            publisher = await RawPublisher(endpoint, bind=True).subscribed()
            publisher.send(0, 0)
            items = [await subscriber.receive(PATIENCE_S)]
            publisher.send(12, 12)
            async with asyncio.timeout(PATIENCE_S):
                while len(items) < 13:
                    if replay.socket.poll(0):
                        identity, *_, start = replay.socket.recv_multipart()
                        first = int.from_bytes(start, "big")
                        for seq in range(first, min(first + 3, 13)):
                            replay.socket.send_multipart([identity, b"", *publisher.frames(seq, seq)])
                    with suppress(TimeoutError):
                        items.append(await subscriber.receive(0.001))
            publisher.close()
    assert [item.seq for item in items if isinstance(item, Received)] == list(range(13))


async def test_peer_with_a_too_large_payload_is_disconnected(nothing_left: None, raw: Any) -> None:
    async with EventSubscriber("tcp://127.0.0.1:0", start="live", bind=True, max_payload_bytes=10_000) as subscriber:
        (endpoint,) = subscriber.endpoints
        bad = raw(zmq.XPUB, endpoint)
        await until(lambda: bad.socket.poll(0), "its subscription")
        await bad.send_and_be_disconnected(b"", wire.pack_seq(0), bytes(20_000))
        async with ZmqEventPublisher(0, endpoint) as publisher:
            assert isinstance(await publish_until_delivery(publisher, subscriber), Received)


@pytest.mark.parametrize(
    ("endpoint", "curve", "warns"),
    [("tcp://*:*", False, True), ("tcp://*:*", True, False), ("tcp://127.0.0.1:*", False, False)],
)
async def test_open_port_warns(
    nothing_left: None, caplog: pytest.LogCaptureFixture, endpoint: str, curve: bool, warns: bool
) -> None:
    keys = CurveKeys.generate() if curve else None
    async with EventSubscriber(endpoint, bind=True, curve=keys):
        assert ("events are taken from anybody" in caplog.text) is warns
