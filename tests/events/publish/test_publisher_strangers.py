"""The publisher's ports among strangers: they are hung up on before they do harm, and nobody else notices."""

from __future__ import annotations

import asyncio
import logging
import random
import sys
import threading
import time
from typing import Any

import pytest
import zmq
from support import tell_to_end

from aioshm.events import Lost, Received, ZmqEventPublisher
from aioshm.events.publish.subscriptions import MAX_SUBSCRIPTIONS, PrefixTree
from aioshm.zeromq.guard import GuardedMonitor, PeerLimits

from ..helpers import ANY, PATIENCE_S, Ends, batch, publish_until_delivery, within
from ..strain import Strain, attack, cuts

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="bytes are counted by the kernel, on Linux")


async def unharmed(ends: Ends, at: str, kind: str, name: str, connections: int = 1) -> int:
    """Attack a publisher that has a subscriber; return how often the attacker was hung up on."""
    publisher = ends.publisher()
    subscriber = ends.subscriber(publisher)
    first = await publish_until_delivery(publisher, subscriber)
    assert isinstance(first, Received)
    expected = first.seq + 1
    strain = Strain()
    # It ends by itself when a single attacker was hung up on three times.
    async with attack(getattr(publisher, at), kind, name, seconds=PATIENCE_S, connections=connections) as stranger:
        done = asyncio.create_task(cuts(stranger))
        enough = time.monotonic() + 2.0
        async with strain:
            while not done.done():
                if connections > 1 and time.monotonic() > enough and publisher.stats().cut_off >= connections:
                    tell_to_end(stranger)
                publisher.publish(batch(expected))
                while publisher.stats().published > expected:
                    item = await subscriber.receive(PATIENCE_S)
                    assert isinstance(item, Received)
                    assert item.seq == expected
                    expected += 1
                await asyncio.sleep(0.001)
    assert subscriber.stats().reconnects == 0, "a true peer was disturbed"
    strain.check()
    assert connections == 1 or publisher.stats().cut_off >= connections
    return await done


@pytest.mark.slow_on_uvloop
@pytest.mark.parametrize(
    ("at", "kind", "name"),
    [
        ("endpoint", "SUB", "parts"),
        ("endpoint", "SUB", "large-parts"),
        ("endpoint", "SUB", "subscriptions"),
        ("endpoint", "SUB", "long-subscriptions"),
        ("endpoint", "SUB", "trickle"),
        ("replay_endpoint", "DEALER", "parts"),
        ("replay_endpoint", "DEALER", "large-parts"),
    ],
)
async def test_an_attack_is_cut_off_and_costs_little(ends: Ends, at: str, kind: str, name: str) -> None:
    assert await unharmed(ends, at, kind, name) == 3, "the attacker was not hung up on each time that it came"


@pytest.mark.slow_on_uvloop
@pytest.mark.parametrize("name", ["subscriptions", pytest.param("parts", marks=pytest.mark.slow)])
@pytest.mark.parametrize("connections", [pytest.param(10, marks=pytest.mark.slow), 50])
async def test_many_connections_at_once_cost_no_more(ends: Ends, name: str, connections: int) -> None:
    assert await unharmed(ends, "endpoint", "SUB", name, connections), "the attacker was never hung up on"


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
        waiting = set(fleet)
        async with asyncio.timeout(PATIENCE_S):
            while waiting:
                publisher.publish(batch(0))
                await asyncio.sleep(0.01)
                waiting = {one for one in waiting if not one.poll(0)}
    finally:
        for one in fleet:
            one.close()
    assert publisher.stats().cut_off == 0


@pytest.mark.slow_on_uvloop
@pytest.mark.parametrize(
    "name", ["leave-long", *(pytest.param(name, marks=pytest.mark.slow) for name in ("leave-wide", "leave-none"))]
)
async def test_those_that_come_and_go_cost_little_and_others_still_get_in(ends: Ends, name: str) -> None:
    publisher = ends.publisher()
    subscriber = ends.subscriber(publisher, start="live")
    assert isinstance(await publish_until_delivery(publisher, subscriber), Received)
    strain = Strain()
    async with attack(publisher.endpoint, "SUB", name, seconds=3 * PATIENCE_S, connections=10) as stranger, strain:
        assert stranger.stdout is not None
        assert await within(stranger.stdout.readline()) == b"begun\n"
        over = time.monotonic() + 2.0
        done = asyncio.create_task(cuts(stranger))
        late = ends.subscriber(publisher, start="live")
        assert isinstance(await publish_until_delivery(publisher, late), Received)
        assert not done.done(), "it came in when the attack was over"
        while not done.done():
            if time.monotonic() > over:
                tell_to_end(stranger)
            publisher.publish(batch(0))
            await asyncio.sleep(0.005)
    sent = publisher.stats().sent
    async with asyncio.timeout(PATIENCE_S):
        while not isinstance(item := await subscriber.receive(PATIENCE_S), Received) or item.seq < sent - 1:
            assert isinstance(item, Received), "a true peer has lost something"
    assert subscriber.stats().reconnects == 0, "a true peer was disturbed"
    assert await done >= 10, "nobody has left"
    strain.check()


async def test_a_fleet_comes_back_to_a_publisher_that_was_restarted(ends: Ends) -> None:
    publisher = ends.publisher()
    context: zmq.Context[Any] = zmq.Context.instance()
    fleet = [context.socket(zmq.SUB) for _ in range(64)]
    try:
        for one in fleet:
            one.linger = 0
            one.reconnect_ivl = 20
            one.subscribe("")
            one.connect(publisher.endpoint)
        for round_ in range(2):
            waiting = set(fleet)
            async with asyncio.timeout(PATIENCE_S):
                while waiting:
                    publisher.publish(batch(0))
                    await asyncio.sleep(0.01)
                    waiting = {one for one in waiting if not one.poll(0)}
            if not round_:
                await publisher.aclose()
                for one in fleet:
                    while one.poll(0):
                        one.recv_multipart()
                publisher = ends.publisher(endpoint=publisher.endpoint)
    finally:
        for one in fleet:
            one.close()
    assert publisher.stats().cut_off == 0


def walked(prefixes: set[bytes]) -> int:
    """Return how many places ZeroMQ's tree of these prefixes has."""
    children: dict[bytes, set[int]] = {}
    for prefix in prefixes:
        for length in range(len(prefix)):
            children.setdefault(prefix[:length], set()).add(prefix[length])
    return sum(max(of_node) - min(of_node) + 1 for of_node in children.values())


@pytest.mark.parametrize("alphabet", [b"\x00\xff", b"abc", bytes(range(256))])
def test_the_size_of_zeromqs_tree_is_known(alphabet: bytes) -> None:
    chance = random.Random(0)
    tree = PrefixTree()
    held: list[bytes] = []
    for _ in range(1000):
        if held and chance.random() < 0.4:
            tree.remove(held.pop(chance.randrange(len(held))))
        else:
            held.append(bytes(chance.choices(alphabet, k=chance.randrange(6))))
            tree.add(held[-1])
        assert tree.slots == walked(set(held))


async def test_who_is_hung_up_on_is_named(ends: Ends, caplog: pytest.LogCaptureFixture) -> None:
    publisher = ends.publisher()
    with caplog.at_level(logging.WARNING, "aioshm.zeromq"):
        async with attack(publisher.replay_endpoint, "DEALER", "parts", seconds=PATIENCE_S) as stranger:
            await cuts(stranger)
    assert publisher.stats().cut_off >= 3
    assert "hung up on 127.0.0.1:" in caplog.text
    assert "make no message" in caplog.text
    assert len(caplog.records) == 1, "rate-limited"


async def test_many_subscriptions_are_fine_and_more_are_not(ends: Ends, raw: Any) -> None:
    publisher = ends.publisher(topic="t0")
    one = raw(zmq.SUB, publisher.endpoint)
    for number in range(MAX_SUBSCRIPTIONS - 1):  # it has one for everything
        one.socket.subscribe(f"t{number}")
    async with asyncio.timeout(PATIENCE_S):
        while not one.socket.poll(0):
            publisher.publish(batch(0))
            await asyncio.sleep(0.01)
    assert publisher.stats().cut_off == 0
    one.socket.subscribe("one too many")
    async with asyncio.timeout(PATIENCE_S):
        while not publisher.stats().cut_off:
            publisher.publish(batch(0))
            await asyncio.sleep(0.01)


async def test_subscriptions_that_come_and_go_are_not_added_up(ends: Ends) -> None:
    publisher = ends.publisher()
    subscriber = ends.subscriber(publisher, start="live")
    assert isinstance(await publish_until_delivery(publisher, subscriber), Received)
    context: zmq.Context[Any] = zmq.Context.instance()
    busy = context.socket(zmq.SUB)
    busy.linger = busy.sndhwm = 0
    busy.connect(publisher.endpoint)
    seen = publisher._ends._subscriptions._tree
    for number in range(4000):  # 80 KB and more, ten times what one peer may send unread
        busy.subscribe(f"subscription {number}")
        if not number % 50:
            async with asyncio.timeout(PATIENCE_S):
                while f"subscription {number}".encode() not in seen:
                    await asyncio.sleep(0.001)
        busy.unsubscribe(f"subscription {number}")
    busy.subscribe("")
    async with asyncio.timeout(PATIENCE_S):
        while not busy.poll(0):
            publisher.publish(batch(0))
            await asyncio.sleep(0.01)
    busy.close()
    assert publisher.stats().cut_off == 0


async def test_two_hundred_subscribers_in_turn_are_forgotten(ends: Ends) -> None:
    publisher = ends.publisher()
    context: zmq.Context[Any] = zmq.Context.instance()
    for _ in range(20):
        many = [context.socket(zmq.SUB) for _ in range(10)]
        for number, one in enumerate(many):
            one.linger = 0
            one.subscribe(bytes([number]) * 250)
            one.connect(publisher.endpoint)
        async with asyncio.timeout(PATIENCE_S):
            while len(publisher._ends._subscriptions._of_peer) < len(many):
                await asyncio.sleep(0.001)
        for one in many:
            one.close()
        async with asyncio.timeout(PATIENCE_S):
            while publisher._ends._subscriptions._of_peer:
                publisher._ends.read_subscriptions()
                await asyncio.sleep(0.001)
    assert publisher._ends._subscriptions.slots == 0
    assert publisher.stats().cut_off == 0


def test_the_guards_thread_ends_with_the_last_socket() -> None:
    async def twice() -> None:
        async with ZmqEventPublisher(0, ANY, ANY, bind=True), ZmqEventPublisher(0, ANY, bind=True):
            assert [t for t in threading.enumerate() if t.name == "aioshm-guard"]

    asyncio.run(twice())
    for thread in threading.enumerate():
        if thread.name == "aioshm-guard":
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


def test_a_peer_to_whom_enough_was_said_is_trusted() -> None:
    context: zmq.Context[Any] = zmq.Context()
    pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    monitor = GuardedMonitor(pull, PeerLimits(admitted_after=60), name="pull")  # the greeting has 64 bytes
    try:
        pull.bind(ANY)
        push.connect(pull.getsockopt_string(zmq.LAST_ENDPOINT))
        for number in range(64):
            push.send_multipart([bytes(4096)] * 8)
            assert pull.poll(PATIENCE_S * 1000), f"message {number} did not come"
            assert len(pull.recv_multipart()) == 8
        assert monitor.cut_off == 0
    finally:
        monitor.close()
        context.destroy(linger=0)


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
