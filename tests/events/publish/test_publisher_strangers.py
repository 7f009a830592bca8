"""The publisher's ports among strangers: what they can do, and that true peers are not disturbed."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

import pytest
import zmq
from support import tell_to_end

from aioshm.events import Lost, Received

from ..helpers import PATIENCE_S, Ends, batch, publish_until, publish_until_delivery
from ..strain import HELD_S, MEMORY_KB, Strain, attack, cuts

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory and time are read from /proc")


async def attacked(ends: Ends, at: str, kind: str, name: str, connections: int = 1) -> tuple[Strain, int]:
    """Attack a publisher that has a subscriber; return what that cost, and how often the attacker was hung up on."""
    publisher = ends.publisher()
    subscriber = ends.subscriber(publisher)
    first = await publish_until_delivery(publisher, subscriber)
    assert isinstance(first, Received)
    expected = first.seq + 1
    strain = Strain()
    # It ends by itself when each connection was hung up on three times.
    async with attack(getattr(publisher, at), kind, name, seconds=PATIENCE_S, connections=connections) as stranger:
        done = asyncio.create_task(cuts(stranger))
        enough = time.monotonic() + 2.0
        async with strain:
            while not done.done():
                if time.monotonic() > enough:
                    tell_to_end(stranger)
                publisher.publish(batch(expected))
                while publisher.stats().published > expected:
                    item = await subscriber.receive(PATIENCE_S)
                    assert isinstance(item, Received)
                    assert item.seq == expected
                    expected += 1
                await asyncio.sleep(0.001)
    assert subscriber.stats().reconnects == 0, "a true peer was disturbed"
    return strain, await done


@pytest.mark.slow_on_uvloop
@pytest.mark.parametrize("connections", [1, pytest.param(10, marks=pytest.mark.slow)])
async def test_peer_with_long_subscriptions_is_disconnected(ends: Ends, connections: int) -> None:
    strain, cut = await attacked(ends, "endpoint", "SUB", "long-subscriptions", connections)
    assert cut > 0
    assert strain.grown_kb <= MEMORY_KB


@pytest.mark.slow_on_uvloop
@pytest.mark.parametrize(("at", "kind"), [("endpoint", "SUB"), ("replay_endpoint", "DEALER")])
async def test_endless_message_takes_memory_and_disturbs_no_subscriber(ends: Ends, at: str, kind: str) -> None:
    """What ZeroMQ cannot bound, as SECURITY.md says."""
    strain, _ = await attacked(ends, at, kind, "parts")
    assert strain.held_s <= HELD_S


async def test_hundreds_of_subscribers_come_at_once(ends: Ends) -> None:
    publisher = ends.publisher(topic="kv@pod-7@model")
    context: zmq.Context[Any] = zmq.Context.instance()
    fleet = [context.socket(zmq.SUB) for _ in range(300)]
    try:
        for number, one in enumerate(fleet):
            one.linger = 0
            for prefix in ("kv@pod-7", f"kv@pod-{number}@model", f"routers/{number}"):
                one.subscribe(prefix)
            one.connect(publisher.endpoint)
        await publish_until(publisher, lambda: all(one.poll(0) for one in fleet))
    finally:
        for one in fleet:
            one.close()


async def test_a_gap_is_still_seen_through_an_attack(ends: Ends) -> None:
    publisher = ends.publisher(buffer_steps=10)
    for number in range(100):
        publisher.publish(batch(number))
    await publisher.flush()
    async with attack(publisher.replay_endpoint, "DEALER", "parts") as stranger:
        subscriber = ends.subscriber(publisher)
        lost = await subscriber.receive(PATIENCE_S)
        assert isinstance(lost, Lost)
        assert (lost.first, lost.last) == (0, 89)
        assert [(await subscriber.receive(PATIENCE_S)).seq for _ in range(10)] == list(range(90, 100))  # type: ignore[union-attr]
        await cuts(stranger)
