"""The subscriber among strangers: garbage is counted and named, silence ends in a loss."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import Any

import pytest
import zmq
from support import until

from aioshm.events import CurveKeys, EventBatch, EventSubscriber, Lost, Received, ZmqEventPublisher
from aioshm.events.protocol import wire
from aioshm.events.protocol.encoding import BatchEncoder

from ..helpers import ANY, PATIENCE_S, Ends, batch, publish_until_delivery


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
