"""The bound on subscriptions to a port without keys: strangers that exceed it, and peers that do not."""

from __future__ import annotations

import asyncio
import logging
from contextlib import ExitStack
from typing import Any

import pytest
import zmq
from support import until

from aioshm.events import Received
from aioshm.events.publish.sockets import MAX_SUBSCRIPTIONS

from ..helpers import PATIENCE_S, Ends, batch, publish_until, publish_until_delivery


def peer(endpoint: str, prefixes: list[bytes]) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
    socket.linger = 0
    for prefix in prefixes:
        socket.subscribe(prefix)
    socket.connect(endpoint)
    return socket


def topics_of(publisher: Any) -> dict[int, set[bytes]]:
    found: dict[int, set[bytes]] = publisher._core.sockets._subscriptions.topics
    return found


MANY = [b"%d" % number for number in range(4 * MAX_SUBSCRIPTIONS)]


@pytest.mark.parametrize("prefixes", [MANY, [bytes(60_000)]], ids=["too many", "too long"])
async def test_peer_with_too_many_or_too_long_subscriptions_is_disconnected_and_others_get_every_batch(
    ends: Ends, caplog: pytest.LogCaptureFixture, prefixes: list[bytes]
) -> None:
    publisher = ends.publisher()
    subscriber = ends.subscriber(publisher)
    last: Any = await publish_until_delivery(publisher, subscriber)
    monitor = publisher._core.sockets._monitors[0]
    handshakes = monitor.handshakes
    with caplog.at_level(logging.WARNING, "aioshm.events"), peer(publisher.endpoint, prefixes) as greedy:
        async with asyncio.timeout(PATIENCE_S):
            while monitor.handshakes < handshakes + 4:
                greedy.poll(0)  # lets ZeroMQ subscribe again over the next connection
                publisher.publish(batch(0))
                await asyncio.sleep(0.005)
    if prefixes is MANY:
        (record,) = caplog.records  # rate-limited
        assert "disconnected 127.0.0.1:" in record.getMessage()
        assert f"more than {MAX_SUBSCRIPTIONS} subscriptions" in record.getMessage()
        assert publisher.stats().cut_off >= 3
    for seq in range(last.seq + 1, publisher.stats().published):
        item = await subscriber.receive(PATIENCE_S)
        assert isinstance(item, Received)
        assert item.seq == seq
    assert subscriber.stats().reconnects == 0


async def test_as_many_subscriptions_as_allowed_are_fine_and_one_more_is_not(ends: Ends) -> None:
    publisher = ends.publisher(topic="t0")
    with peer(publisher.endpoint, [b"t%d" % number for number in range(MAX_SUBSCRIPTIONS)]) as subscribed:
        await publish_until(publisher, lambda: subscribed.poll(0))
        assert publisher.stats().cut_off == 0
        subscribed.subscribe("one too many")
        await publish_until(publisher, lambda: publisher.stats().cut_off)


async def test_many_subscribers_at_the_same_time_are_fine_and_forgotten_when_they_leave(ends: Ends) -> None:
    publisher = ends.publisher(topic="kv@pod-7@model")
    for _ in range(3):
        with ExitStack() as stack:
            fleet = []
            for number in range(50):
                prefixes = [b"kv@pod-7", b"kv@pod-%d@model" % number, bytes([number]) * 250]
                fleet.append(stack.enter_context(peer(publisher.endpoint, prefixes)))
            await publish_until(publisher, lambda: all(each.poll(0) for each in fleet))  # noqa: B023
            await until(lambda: len(topics_of(publisher)) == 50, "all subscriptions are read")
        await publish_until(publisher, lambda: not topics_of(publisher))
    assert publisher.stats().cut_off == 0


async def test_subscriptions_that_come_and_go_are_not_added_up(ends: Ends) -> None:
    publisher = ends.publisher()
    with peer(publisher.endpoint, []) as busy:
        busy.sndhwm = 0
        for number in range(10 * MAX_SUBSCRIPTIONS):
            busy.subscribe(b"%d" % number)
            if not number % 50:
                topic = b"%d" % number
                await until(lambda topic=topic: any(topic in each for each in topics_of(publisher).values()))  # type: ignore[misc]
            busy.unsubscribe(b"%d" % number)
        busy.subscribe(b"")
        await publish_until(publisher, lambda: busy.poll(0))
    assert publisher.stats().cut_off == 0
