"""The publisher for programs without a loop, and the factory of publishers."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from support import eventually

from aioshm import QueueFull, RoleError, blocking
from aioshm.events import (
    EventPublisherFactory,
    EventSubscriber,
    KVEventsConfig,
    NullEventPublisher,
    PublisherClosed,
    Received,
    ThreadedEventPublisher,
    ZmqEventPublisher,
)
from aioshm.process.loop_thread import LoopThread

from ..helpers import ANY, PATIENCE_S, batch, publish_all, take


@contextmanager
def full(publisher: ThreadedEventPublisher, room: int) -> Iterator[None]:
    """Fill the queue of a publisher that sends nothing within the block unless it is closed."""
    core = publisher._core
    drain = core.drain

    def hold() -> None:
        core._next = None
        if core.outbox.closed:
            drain()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(core, "drain", hold)
        publish_all(publisher, range(room))
        yield
    publisher._wake()


class TestThreaded:
    def test_any_thread_may_publish(self) -> None:
        with ThreadedEventPublisher(1, ANY, ANY, max_queue_size=100, bind=True) as publisher:
            with ThreadPoolExecutor(4) as pool:
                publishing = [pool.submit(lambda: [publisher.publish(batch(n)) for n in range(500)]) for _ in range(4)]
            for each in publishing:
                each.result()
            publisher.flush(PATIENCE_S)
            assert (publisher.stats().sent, publisher.stats().dropped) == (2000, 0)

            async def read() -> list[int]:
                async with EventSubscriber(publisher.endpoint, publisher.replay_endpoint) as subscriber:
                    return [item.seq for item in await take(subscriber, 2000) if isinstance(item, Received)]

            assert asyncio.run(read()) == list(range(2000))
        publisher.shutdown()
        with pytest.raises(PublisherClosed):
            publisher.publish(batch(0))

    def test_abandoned_publisher_warns_and_releases_its_port(self) -> None:
        publisher = ThreadedEventPublisher(0, ANY, bind=True)
        endpoint = publisher.endpoint
        with pytest.warns(ResourceWarning, match="was not closed: use `with`"):
            del publisher

        def bind_again() -> bool:
            with suppress(OSError), ThreadedEventPublisher(0, endpoint, bind=True):
                return True
            return False

        eventually(bind_again, "the port is free")

    def test_publishers_and_blocking_queues_share_one_thread(self) -> None:
        made = [ThreadedEventPublisher(0, ANY, bind=True), ThreadedEventPublisher(0, ANY, bind=True)]
        with made[0], made[1], blocking.MessageQueue(1):
            assert [t.name for t in threading.enumerate() if t.name.startswith("aioshm")] == ["aioshm-loop"]

    def test_shutdown_in_a_forked_child_returns_and_the_parent_goes_on_publishing(self) -> None:
        with ThreadedEventPublisher(0, ANY, bind=True) as publisher:
            publisher.publish(batch(0))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # other threads run
                child = os.fork()
            if child == 0:
                code = 1
                try:
                    with publisher, pytest.raises(RoleError, match="belongs to process"):
                        publisher.publish(batch(1))
                    with pytest.raises(RoleError, match="belongs to process"):
                        publisher.flush()
                    publisher.shutdown()
                    code = 0
                finally:
                    os._exit(code)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            publisher.publish(batch(1))
            publisher.flush(PATIENCE_S)
            assert publisher.stats().sent == 2

    def test_the_wait_has_an_end(self) -> None:
        with ThreadedEventPublisher(0, ANY, max_queue_size=3, bind=True) as publisher:
            with full(publisher, 3):
                with pytest.raises(TimeoutError, match=r"3 event batches still wait to be sent after 0\.01 s"):
                    publisher.publish(batch(3), timeout=0.01)
                with pytest.raises(TimeoutError):
                    publisher.publish(batch(3), timeout=0)
            publisher.publish(batch(3), timeout=PATIENCE_S)
            publisher.flush(PATIENCE_S)
            assert publisher.stats().published == 4, "who gave up used no number"

    def test_overflow_raise_does_not_wait(self) -> None:
        with ThreadedEventPublisher(0, ANY, max_queue_size=2, overflow="raise", bind=True) as publisher:
            with full(publisher, 2), pytest.raises(QueueFull):
                publisher.publish(batch(2))
            assert publisher.stats().dropped == 0

    def test_closing_ends_the_wait(self) -> None:
        publisher = ThreadedEventPublisher(0, ANY, max_queue_size=1, bind=True)
        with full(publisher, 1), ThreadPoolExecutor() as pool:
            waiting = [pool.submit(publisher.publish, batch(1)) for _ in range(3)]
            eventually(publisher._core._room_lock.locked)
            publisher.shutdown()
        for each in waiting:
            with pytest.raises(PublisherClosed, match="is closed"):
                each.result()
        assert publisher.stats().sent == 1

    def test_its_own_thread_does_not_wait_for_itself(self) -> None:
        with ThreadedEventPublisher(0, ANY, max_queue_size=1, bind=True) as publisher:

            async def publish_there() -> None:
                for _ in range(2):
                    publisher.publish(batch(0))

            publishing = asyncio.run_coroutine_threadsafe(publish_there(), publisher._host.loop)
            with pytest.raises(RoleError, match="its own thread"):
                publishing.result(PATIENCE_S)

    def test_publish_after_the_thread_has_ended_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        ended = LoopThread("a test")
        ended.stop()
        with ThreadedEventPublisher(0, ANY, max_queue_size=1, bind=True) as publisher:
            with monkeypatch.context() as patched:
                patched.setattr(publisher, "_host", ended)  # as when Python ends
                for _ in ("room for one batch", "no room"):
                    with pytest.raises(PublisherClosed, match="thread of this event publisher has ended"):
                        publisher.publish(batch(0))

    def test_ctrl_c_interrupts_the_wait(self) -> None:
        with ThreadedEventPublisher(0, ANY, max_queue_size=1, bind=True) as publisher:

            def interrupt() -> None:
                eventually(publisher._core._room_lock.locked)
                os.kill(os.getpid(), signal.SIGINT)

            thread = threading.Thread(target=interrupt)
            with full(publisher, 1):
                thread.start()
                with pytest.raises(KeyboardInterrupt):
                    publisher.publish(batch(1))
                thread.join(PATIENCE_S)
            publisher.publish(batch(1))
            publisher.flush(PATIENCE_S)
            assert publisher.stats().sent == 2


class TestFactory:
    @pytest.mark.parametrize("config", [None, KVEventsConfig(), KVEventsConfig(True, "null")])
    async def test_nothing_to_publish(self, config: KVEventsConfig | None) -> None:
        publisher = EventPublisherFactory.create(config)
        assert isinstance(publisher, NullEventPublisher)
        publisher.publish(batch(0))
        await publisher.apublish(batch(0))
        publisher.shutdown()
        assert publisher.get_publisher_config() is None

    def test_defaults_are_the_fields(self) -> None:
        config = KVEventsConfig(enable_kv_cache_events=True)
        assert (config.publisher, config.endpoint, config.replay_endpoint) == ("zmq", "tcp://*:5557", None)
        assert (config.buffer_steps, config.hwm, config.max_queue_size, config.topic) == (10_000, 100_000, 100_000, "")
        assert KVEventsConfig().publisher == "null"

    async def test_on_a_loop(self, nothing_left: None) -> None:
        config = KVEventsConfig(True, endpoint="tcp://127.0.0.1:*", replay_endpoint=ANY, topic="kv")
        publisher = EventPublisherFactory.create(config, 2)
        assert isinstance(publisher, ZmqEventPublisher)
        resolved = publisher.get_publisher_config()
        assert resolved.endpoint == publisher.endpoint
        assert resolved.topic == "kv"
        assert ":*" not in resolved.endpoint
        await publisher.aclose()

    def test_names(self) -> None:
        with pytest.raises(ValueError, match=r"unknown event publisher 'kafka': known are null, zmq"):
            EventPublisherFactory.create(KVEventsConfig(True, "kafka"))
        with pytest.raises(KeyError, match="zmq"):
            EventPublisherFactory.register_publisher("zmq", dict)  # type: ignore[arg-type]
        EventPublisherFactory.register_publisher("test-mine", dict)  # type: ignore[arg-type]
        try:
            made: Any = EventPublisherFactory.create(KVEventsConfig(True, "test-mine", topic="t"), 4)
        finally:
            EventPublisherFactory._registry.pop("test-mine")
        assert (made["data_parallel_rank"], made["topic"]) == (4, "t")
