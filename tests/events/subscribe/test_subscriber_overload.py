"""A subscriber slower than its publisher: its memory is bounded, and dropped batches are reported or replayed."""

from __future__ import annotations

import logging
import re
import tracemalloc
from typing import Any

import pytest
from support import until

from aioshm.events import BlockRemoved, EventBatch, EventSubscriber, Lost, Received
from aioshm.events.protocol.tracker import Connection, SourceTracker
from aioshm.events.protocol.wire import pack_seq
from aioshm.events.subscribe.ports import Backlog

from ..helpers import PATIENCE_S, Ends, batch, publish_until_delivery
from ..proxy import kept_endpoint
from ..raw import RawPublisher

LARGE = EventBatch(0.0, [BlockRemoved([bytes(1000)], "GPU")])
BACKLOG_BYTES = 100_000


class NotReading:
    """A subscriber; its consumer has stopped reading after one batch."""

    def __init__(self, publisher: Any, subscriber: EventSubscriber, first: int) -> None:
        self.subscriber = subscriber
        [source] = subscriber._sources
        self.backlog = source.port.backlog
        self.port = source.port
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
            text = r"its backlog was full, and it dropped \d+ batches: it decodes too slowly"
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

    def counted(tracker: SourceTracker) -> bool:
        nonlocal calls
        calls += 1
        return read_ahead(tracker)

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
            await until(lambda: source.port.backlog.received == 10, "the batches of the first")
            old.close()
            await until(lambda: subscriber.unconnected, "the end of the connection")
            new = await RawPublisher(endpoint, bind=True).subscribed()
            for number in range(10, 15):
                new.send(number, number)
            await until(lambda: source.port.backlog.received == 15, "the batches of the second")
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
