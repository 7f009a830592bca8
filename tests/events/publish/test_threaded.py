"""The publisher for programs without a loop."""

from __future__ import annotations

import asyncio
import os
import threading
import time
import warnings

import pytest

from aioshm import RoleError, blocking
from aioshm.events import EventSubscriber, PublisherClosed, Received, ThreadedEventPublisher

from ..helpers import ANY, PATIENCE_S, batch, publish_from_threads, take


class TestThreaded:
    def test_any_thread_may_publish(self) -> None:
        with ThreadedEventPublisher(1, ANY, ANY, bind=True) as publisher:
            publish_from_threads(publisher, 4, 500)
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

    def test_what_cannot_be_bound_raises(self) -> None:
        with pytest.raises(ValueError, match="max_queue_size"):
            ThreadedEventPublisher(0, ANY, max_queue_size=0)

    def test_a_forgotten_one_warns_and_gives_back_its_port(self) -> None:
        publisher = ThreadedEventPublisher(0, ANY, bind=True)
        endpoint = publisher.endpoint
        with pytest.warns(ResourceWarning, match="was not closed: use `with`"):
            del publisher
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                again = ThreadedEventPublisher(0, endpoint, bind=True)
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.005)
            else:
                break
        again.close()

    def test_publishers_and_blocking_queues_share_one_thread(self) -> None:
        with ThreadedEventPublisher(0, ANY, bind=True), ThreadedEventPublisher(0, ANY, bind=True):
            writer = blocking.MessageQueue(1)
            reader = blocking.MessageQueue.create_from_handle(writer.export_handle(), 0)
            with writer, reader:
                other = threading.Thread(target=writer.enqueue, args=("text", PATIENCE_S), name="writing")
                other.start()
                assert reader.dequeue(PATIENCE_S) == "text"
                other.join(PATIENCE_S)
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
                    publisher.shutdown()
                    code = 0
                finally:
                    os._exit(code)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            publisher.publish(batch(1))
            publisher.flush(PATIENCE_S)
            assert publisher.stats().sent == 2

    def test_flush_and_shutdown_say_what_is_left(self, caplog: pytest.LogCaptureFixture) -> None:
        publisher = ThreadedEventPublisher(0, ANY, bind=True)
        large = batch(0, 1000)  # takes the thread far longer to encode than this one to publish
        for _ in range(3000):
            publisher.publish(large)
        with pytest.raises(TimeoutError, match="still wait"):
            publisher.flush(0)
        publisher.shutdown(0)
        assert "to 2999 were sent" in caplog.text
