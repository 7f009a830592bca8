"""The publisher's sockets: binding, sending and closing."""

from __future__ import annotations

import asyncio
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import zmq
from support import cancelled, until

from aioshm.errors import RoleError
from aioshm.events import (
    AllBlocksCleared,
    BlockRemoved,
    CurveKeys,
    EventBatch,
    EventSubscriber,
    Lost,
    PublisherClosed,
    Received,
    ZmqEventPublisher,
)
from aioshm.events.protocol.encoding import BatchDecoder

from ..helpers import ANY, PATIENCE_S, Ends, batch, publish_all, publish_until, publish_until_delivery, take


async def test_frames_numbers_and_rank(ends: Ends, raw: Any) -> None:
    publisher = ends.publisher(3, topic="kv", endpoint=ANY)
    consumer = raw(zmq.SUB, publisher.endpoint)
    await publish_until(publisher, lambda: consumer.socket.poll(0))
    topic, first, payload = await consumer.receive()
    assert topic == b"kv"
    assert BatchDecoder().decode(payload).data_parallel_rank == 3
    last = publisher.stats().published
    publisher.publish(EventBatch(1.0, [], 9))
    for number in range(int.from_bytes(first, "big") + 1, last + 1):
        _, seq, payload = await consumer.receive()
        assert seq == number.to_bytes(8, "big")
    assert BatchDecoder().decode(payload).data_parallel_rank == 9


async def test_overflow_is_counted_logged_once_and_visible(ends: Ends, caplog: pytest.LogCaptureFixture) -> None:
    publisher = ends.publisher(max_queue_size=3)
    subscriber = ends.subscriber(publisher)
    with caplog.at_level(logging.WARNING, "aioshm.events"):
        publish_all(publisher, range(6))  # without a turn of the loop in between
        assert publisher.stats().dropped == 3
        items = await take(subscriber, 5)
    assert len(caplog.records) == 1
    assert "3 batches so far are dropped" in caplog.text
    assert [item.seq for item in items if isinstance(item, Received)] == [0, 1, 2, 6], "6 is empty and shows the gap"
    assert [(item.first, item.last) for item in items if isinstance(item, Lost)] == [(3, 5)]


async def test_batch_that_cannot_be_encoded_is_a_visible_gap(ends: Ends, caplog: pytest.LogCaptureFixture) -> None:
    publisher = ends.publisher()
    subscriber = ends.subscriber(publisher)
    for hashes in ([2**70], [memoryview(b"abcdef")[::2]]):
        publisher.publish(EventBatch(1.0, [BlockRemoved(hashes, "GPU")]))  # type: ignore[arg-type]
    publisher.publish(batch(2))
    items = await take(subscriber, 2)
    assert isinstance(items[0], Lost)
    assert (items[0].first, items[0].last) == (0, 1)
    assert "batch 0 is lost" in caplog.text
    assert (publisher.stats().unencodable, publisher.stats().sent) == (2, 1)


async def test_close_delivers_queued_batches(nothing_left: None) -> None:
    publisher = ZmqEventPublisher(0, ANY, bind=True)
    async with EventSubscriber(publisher.endpoint, start="live") as subscriber:
        await publish_until_delivery(publisher, subscriber)
        before = publisher.stats().published
        publish_all(publisher, range(2000), 10)
        await publisher.aclose(PATIENCE_S)
        await publisher.aclose()
        with pytest.raises(PublisherClosed):
            publisher.publish(batch(0))
        item: Any = None
        while item is None or item.seq < before + 1999:
            item = await subscriber.receive(PATIENCE_S)
            assert isinstance(item, Received)


async def test_close_logs_unsent_batches(nothing_left: None, caplog: pytest.LogCaptureFixture) -> None:
    publisher = ZmqEventPublisher(0, ANY, bind=True)
    publish_all(publisher, range(1000), 50)
    with pytest.raises(TimeoutError, match=r"\d+ event batches still wait to be sent after 0 s"):
        await publisher.flush(0)
    await publisher.aclose(0)
    assert "closed before batches" in caplog.text
    assert "to 999 were sent" in caplog.text
    stats = publisher.stats()
    assert stats.dropped + stats.sent == 1000


async def test_cancelling_close_closes(nothing_left: None) -> None:
    publisher = ZmqEventPublisher(0, ANY, ANY, bind=True)
    publish_all(publisher, range(1000), 50)
    closing = asyncio.create_task(publisher.aclose(PATIENCE_S))
    await asyncio.sleep(0)
    await cancelled(closing)
    with pytest.raises(PublisherClosed):
        publisher.publish(batch(0))
    await until(lambda: not [t for t in threading.enumerate() if t.name.startswith("aioshm-events")])


async def test_an_inproc_name_is_free_again_at_once(nothing_left: None) -> None:
    for _ in range(3):
        async with ZmqEventPublisher(0, "inproc://again", "inproc://again-replay"):
            pass


async def test_shutdown_sends_queued_batches(nothing_left: None) -> None:
    publisher = ZmqEventPublisher(0, "inproc://shutdown", bind=True)
    async with EventSubscriber("inproc://shutdown", start="live") as subscriber:
        publish_all(publisher, range(100))
        publisher.shutdown()
        publisher.shutdown()
        assert publisher.stats().sent == 100
        assert [item.seq for item in await take(subscriber, 100) if isinstance(item, Received)] == list(range(100))


@pytest.mark.parametrize(
    "options",
    [
        {"data_parallel_rank": -1},
        {"buffer_steps": -1},
        {"hwm": -1},
        {"max_queue_size": 0},
        {"wire": "vllm-1"},
        {"overflow": "sulk"},
        {"topic": "t" * 513},
    ],
)
async def test_bad_arguments_are_named(nothing_left: None, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must|endpoint"):
        ZmqEventPublisher(**{"data_parallel_rank": 0, "endpoint": ANY, **options})


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
    async with EventSubscriber(f"ipc://{tmp_path}/kv", bind=True):
        assert len(list(tmp_path.iterdir())) == 1
    assert list(tmp_path.iterdir()) == [], "its socket file"


async def test_open_ports_without_curve_warn_once(nothing_left: None, caplog: pytest.LogCaptureFixture) -> None:
    async with ZmqEventPublisher(0, "tcp://*:0", "tcp://*:0") as publisher:
        assert len(caplog.records) == 1
        ports = f"{publisher.endpoint}, {publisher.replay_endpoint}"
        assert f"published unencrypted to everybody who reaches {ports}" in caplog.text
    caplog.clear()
    async with ZmqEventPublisher(0, "tcp://*:0", curve=CurveKeys.generate()):
        assert not caplog.records


async def test_connecting_to_this_host_without_saying_so_warns(
    nothing_left: None, caplog: pytest.LogCaptureFixture
) -> None:
    """By vLLM's rule a publisher connects to a port of this host, where another publisher may have bound."""
    async with ZmqEventPublisher(0, ANY, bind=True) as first:
        for host, bind in (("127.0.0.1", None), ("localhost", None), ("localhost", False)):
            caplog.clear()
            endpoint = first.endpoint.replace("127.0.0.1", host)
            async with ZmqEventPublisher(0, endpoint, bind=bind):
                warned = [text for text in caplog.messages if f"connects to {endpoint}" in text and "bind=True" in text]
                assert len(warned) == (bind is None)
    caplog.clear()
    for quiet in ("tcp://192.0.2.1:5557", "tcp://[::ffff:127.0.0.1]:*"):  # another host; an address that is bound
        async with ZmqEventPublisher(0, quiet):
            assert not caplog.records


async def test_curve_admits_only_holders_of_the_key(nothing_left: None) -> None:
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


async def test_abandoned_publisher_warns_and_closes(nothing_left: None) -> None:
    publisher = ZmqEventPublisher(0, ANY, ANY, bind=True)
    endpoint = publisher.endpoint
    with pytest.warns(ResourceWarning, match="was not closed"):
        del publisher
    await until(lambda: not [t for t in threading.enumerate() if t.name.startswith("aioshm-events")])
    async with ZmqEventPublisher(0, endpoint, bind=True):  # the port is free again
        pass


# Publishing without loss


def fill(publisher: Any) -> None:
    """Fill a queue of one batch, without waking the sender."""
    publisher._core.outbox.put(batch(0))


async def test_handler_that_raises_while_batches_are_sent_stops_no_later_batch(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> bytes:
        monkeypatch.undo()
        raise RuntimeError("of a signal handler")

    publisher = ends.publisher()
    failures: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context["exception"]))
    monkeypatch.setattr(publisher._core, "_encode", interrupted)
    publish_all(publisher, range(3))
    await until(lambda: publisher.stats().sent == 2, "the batches after the interrupted one")
    assert list(map(str, failures)) == ["of a signal handler"]


class TestWaitForRoom:
    async def test_backpressure(self, ends: Ends) -> None:
        publisher = ends.publisher(max_queue_size=10)
        subscriber = ends.subscriber(publisher)

        async def publish(first: int) -> None:
            for number in range(200):
                await publisher.apublish(batch(first + number))

        await asyncio.gather(*(publish(n * 200) for n in range(4)))
        await publisher.flush()
        assert publisher.stats().dropped == 0
        received = [item for item in await take(subscriber, 800) if isinstance(item, Received)]
        assert [item.seq for item in received] == list(range(800))
        numbers = [int(item.batch.ts) for item in received]
        for n in range(4):  # each task's in its order
            of_task = [number for number in numbers if number // 200 == n]
            assert of_task == list(range(n * 200, n * 200 + 200))

    @pytest.mark.parametrize("room", [False, True], ids=["before there is room", "when there is room"])
    async def test_a_wait_that_is_cancelled_sends_nothing_and_leaves_the_room_to_the_next(
        self, ends: Ends, room: bool
    ) -> None:
        publisher = ends.publisher(max_queue_size=1)
        fill(publisher)
        waiting = [asyncio.create_task(publisher.apublish(batch(n))) for n in range(1, 5)]
        await asyncio.sleep(0)
        if room:
            publisher._core.drain()  # for the first call, which is cancelled before it runs
        waiting[0].cancel()
        waiting[2].cancel()
        publisher._core.drain()
        await asyncio.gather(*waiting, return_exceptions=True)
        await publisher.flush()
        assert publisher.stats().sent == publisher.stats().published == 3
        assert [task.cancelled() for task in waiting] == [True, False, True, False]

    @pytest.mark.parametrize("how", ["aclose", "shutdown"])
    async def test_closing_ends_the_wait(self, ends: Ends, how: str) -> None:
        publisher = ends.publisher(max_queue_size=1)
        fill(publisher)
        waiting = [asyncio.create_task(publisher.apublish(batch(n))) for n in range(1, 3)]
        await asyncio.sleep(0)
        if how == "aclose":
            await publisher.aclose()
        else:
            publisher.shutdown()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(result) for result in results] == [PublisherClosed, PublisherClosed]
        assert publisher.stats().sent == publisher.stats().published == 1
        with pytest.raises(PublisherClosed):
            await publisher.apublish(batch(3))

    async def test_bad_calls(self, ends: Ends) -> None:
        with pytest.raises(ValueError, match="await apublish instead"):
            ZmqEventPublisher(0, ANY, overflow="block", bind=True)
        publisher = ends.publisher()
        with pytest.raises(TypeError, match="apublish takes an EventBatch, not int"):
            await publisher.apublish(1)
        with pytest.raises(TypeError, match="publish takes an EventBatch, not list"):
            publisher.publish([AllBlocksCleared()])
        with pytest.raises(RoleError, match="event loop"):
            await asyncio.to_thread(lambda: asyncio.run(publisher.apublish(batch(0))))
        with pytest.raises(RoleError, match="ThreadedEventPublisher"):
            await asyncio.to_thread(lambda: publisher.publish(batch(0)))
