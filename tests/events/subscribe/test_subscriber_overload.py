"""A subscriber slower than its publisher: its memory is bounded, and dropped batches are reported or replayed.

``EVENTS_OVERLOAD_S=120`` floods each subscriber for two minutes; ``-s`` shows the figures.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from support import until

from aioshm.events import BlockIndex, BlockRemoved, Delivery, EventBatch, EventSubscriber, Lost, Received, follow
from aioshm.events import Source as Publisher
from aioshm.events.config import DEFAULT_MAX_BACKLOG_BYTES
from aioshm.events.protocol.wire import pack_seq
from aioshm.events.subscribe.backlog import FRAME_OVERHEAD, MESSAGE_OVERHEAD, RECONNECTED, Backlog

from ..flood_child import LAST
from ..helpers import PATIENCE_S, Ends, batch, publish_until_delivery
from ..proxy import kept_endpoint
from ..raw import RawPublisher

CHILD = Path(__file__).parent.parent / "flood_child.py"
FLOOD_S = float(os.environ.get("EVENTS_OVERLOAD_S", "3"))
MEMORY_BYTES = DEFAULT_MAX_BACKLOG_BYTES + (64 << 20)
"""In addition to the backlog: decoded batches for the consumer, and ZeroMQ's own queue."""
LARGE = EventBatch(0.0, [BlockRemoved([bytes(1000)], "GPU")])
BACKLOG_BYTES = 100_000


class Tally:
    """Follows a subscriber, and checks that each number comes, or is lost, once.

    Attributes:
        next: The number that must come next.
        lost: Numbers that were lost.
        reasons: Why.
        index: The index.
    """

    def __init__(self) -> None:
        self.next = 0
        self.lost = 0
        self.reasons: list[str] = []
        self.index: BlockIndex[Publisher] = BlockIndex()

    def take(self, item: Delivery) -> None:
        if isinstance(item, Lost):
            assert item.first == self.next
            self.next = item.last + 1
            self.lost += item.last + 1 - item.first
            self.reasons.append(item.reason)
        else:
            assert isinstance(item, Received)
            assert item.seq == self.next
            self.next = item.seq + 1
        follow(self.index, item)


@asynccontextmanager
async def flood(events: int) -> AsyncIterator[tuple[asyncio.subprocess.Process, list[str]]]:
    """Start the publishing process; yield the process and its endpoints."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, str(CHILD), "10000", "2000", str(events), stdin=asyncio.subprocess.PIPE, stdout=-1
    )
    assert child.stdout is not None
    try:
        yield child, (await child.stdout.readline()).decode().split()
    finally:
        child.kill()
        await child.communicate()


def tell(child: asyncio.subprocess.Process) -> None:
    assert child.stdin is not None
    child.stdin.write(b"\n")


@pytest.mark.slow
@pytest.mark.one_loop
@pytest.mark.timeout(120 + 3 * FLOOD_S)
@pytest.mark.parametrize(
    ("events", "pause_s", "replay"),
    [(100, 0.0, True), (1, 0.0, True), (100, 0.0, False), (1, 0.0, False), (100, 0.001, False)],
)
async def test_flood_takes_bounded_memory_and_each_number_comes_or_is_lost(
    nothing_left: None, events: int, pause_s: float, replay: bool
) -> None:
    memory = psutil.Process().memory_info
    start = most = memory().rss
    tally = Tally()
    async with flood(events) as (child, endpoints):
        async with EventSubscriber(endpoints[0], endpoints[1] if replay else None) as subscriber:

            async def measure() -> None:
                nonlocal most
                while True:
                    most = max(most, memory().rss)
                    await asyncio.sleep(0.02)

            measuring = asyncio.create_task(measure())
            asyncio.get_running_loop().call_later(FLOOD_S, tell, child)
            is_over = False
            while not is_over:
                item = await subscriber.receive(PATIENCE_S)
                tally.take(item)
                is_over = isinstance(item, Received) and not item.batch.events
                await asyncio.sleep(pause_s)
            tell(child)
            assert child.stdout is not None
            published = int(await child.stdout.readline())
            while tally.next < published:
                tally.take(await subscriber.receive(PATIENCE_S))
            measuring.cancel()
            stats, end = subscriber.stats(), memory().rss
    print(
        f"{events} events, {pause_s} s a batch, replay {replay}: RSS in MiB {start >> 20} at the start, "
        f"{most >> 20} at most, {end >> 20} at the end; {published} published, {stats}"
    )
    if events > 1:  # where CPUs are scarce, the publisher's queue, not the backlog, drops batches of one event
        assert stats.dropped > 0
    assert stats.lost == tally.lost
    assert stats.delivered >= published - tally.lost
    assert most - start < MEMORY_BYTES
    assert any("decodes too slowly" in reason for reason in tally.reasons) == (stats.dropped > 0)
    [publisher] = tally.index.publishers
    assert list(tally.index.blocks(publisher).values()) == [set(range(LAST))]
    assert tally.index.complete(publisher)


class NotReading:
    """A subscriber; its consumer has stopped reading after one batch."""

    def __init__(self, publisher: Any, subscriber: EventSubscriber, first: int) -> None:
        self.subscriber = subscriber
        [source] = subscriber._sources
        self.backlog = source._port.backlog
        self.port = source._port
        self._publisher = publisher
        self._first = first

    @classmethod
    async def open(cls, ends: Ends, publisher: Any, **options: Any) -> NotReading:
        bounds = {"max_waiting": 1, "max_backlog_bytes": BACKLOG_BYTES, "check_interval": None}
        subscriber = ends.subscriber(publisher, start="live", **bounds, **options)
        first = await publish_until_delivery(publisher, subscriber)
        assert isinstance(first, Received)
        return cls(publisher, subscriber, first.seq)

    async def received_all(self) -> None:
        """Wait until everything that was published has come."""
        await self._publisher.flush()
        count = self._publisher.stats().published - self._first
        await until(lambda: self.backlog.received == count, "all batches have come")


@pytest.mark.parametrize("replay", [True, False], ids=["with replay", "without replay"])
async def test_consumer_that_does_not_read_makes_the_oldest_messages_dropped(
    ends: Ends, replay: bool, caplog: pytest.LogCaptureFixture
) -> None:
    publisher = ends.publisher()
    idle = await NotReading.open(ends, publisher, replay=replay)
    with caplog.at_level(logging.WARNING, "aioshm.events"):
        for _ in range(1000):
            publisher.publish(LARGE)
        await idle.received_all()
    assert idle.backlog.size <= BACKLOG_BYTES
    subscriber = idle.subscriber
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
        for each in lost:
            text = r"its backlog was full, and it dropped \d+ batches so far: it decodes too slowly"
            assert re.fullmatch(f"no replay endpoint was given; {text}", each.reason)


async def test_consumer_that_does_not_read_does_not_keep_the_loop_busy(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = ends.publisher()
    idle = await NotReading.open(ends, publisher)
    for _ in range(1000):
        publisher.publish(LARGE)
    await idle.received_all()
    read_ahead = idle.port.read_ahead
    calls = 0

    def counted() -> bool:
        nonlocal calls
        calls += 1
        return read_ahead()

    monkeypatch.setattr(idle.port, "read_ahead", counted)
    for _ in range(20):
        publisher.publish(batch(0))
        await idle.received_all()
    assert 0 < calls <= 100


async def test_publisher_replaced_while_the_consumer_does_not_read_is_reported_in_its_place(nothing_left: None) -> None:
    """The messages of both wait in the backlog, and their numbers go on."""
    with kept_endpoint() as endpoint:
        async with EventSubscriber(endpoint, max_waiting=1, gone_after_s=None) as subscriber:
            subscriber.open()
            [source] = subscriber._sources
            old = await RawPublisher(endpoint, bind=True).subscribed()
            for number in range(10):
                old.send(number, number)
            await until(lambda: source._port.backlog.received == 10, "the batches of the first")
            old.close()
            await until(lambda: subscriber.unconnected, "the end of the connection")
            new = await RawPublisher(endpoint, bind=True).subscribed()
            for number in range(10, 15):
                new.send(number, number)
            await until(lambda: source._port.backlog.received == 15, "the batches of the second")
            items = [await subscriber.receive(PATIENCE_S) for _ in range(17)]
            new.close()
    kinds = [type(item).__name__ for item in items]
    assert kinds == ["Received"] * 10 + ["Restarted", "Lost"] + ["Received"] * 5


# The backlog

PAYLOAD = bytes(1000)
SIZE = MESSAGE_OVERHEAD + 3 * FRAME_OVERHEAD + 1 + 8 + len(PAYLOAD)


def put(backlog: Backlog, *numbers: int, topic: bytes = b"t", connection: object = 1) -> None:
    for number in numbers:
        backlog.put(connection, [topic, pack_seq(number), PAYLOAD])


def shrink(backlog: Backlog) -> None:
    while backlog.is_shrinking:
        backlog.shrink()


def taken(backlog: Backlog) -> list[object]:
    """Take all entries: numbers of messages, connections of markers."""
    found: list[object] = []
    while (entry := backlog.take()) is not None:
        connection, frames, _ = entry
        found.append(connection if frames is None else int.from_bytes(frames[1], "big"))
    return found


def test_message_larger_than_the_bound_is_kept_if_it_is_the_newest() -> None:
    backlog = Backlog(SIZE // 2)
    put(backlog, 0)
    shrink(backlog)
    assert taken(backlog) == [0]
    put(backlog, 1, 2)
    shrink(backlog)
    assert taken(backlog) == [2]
    assert backlog.dropped == 1


def test_many_messages_are_dropped_in_several_calls() -> None:
    backlog = Backlog(40_000 * SIZE)
    put(backlog, *range(40_001))
    calls = 0
    while backlog.is_shrinking:
        backlog.shrink()
        calls += 1
    assert calls > 2
    assert (backlog.size, backlog.dropped) == (20_000 * SIZE, 20_001)


def test_markers_stay_in_order_when_the_messages_between_them_are_dropped() -> None:
    backlog = Backlog(4 * SIZE)
    put(backlog, 0, 1, connection="a")
    backlog.note("a")
    backlog.note(RECONNECTED)
    put(backlog, 2, connection="b")
    backlog.note("b")
    put(backlog, 3, 4, connection="c")
    shrink(backlog)
    assert taken(backlog) == ["a", RECONNECTED, "b", 3, 4]
