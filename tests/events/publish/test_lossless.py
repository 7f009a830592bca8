"""Publishing without loss: a fast publisher waits for room."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from typing import Any

import pytest

from aioshm.errors import QueueFull, RoleError
from aioshm.events import (
    AllBlocksCleared,
    NullEventPublisher,
    PublisherClosed,
    Received,
    ThreadedEventPublisher,
    ZmqEventPublisher,
)
from aioshm.process.loop_thread import LoopThread

from ..helpers import ANY, PATIENCE_S, Ends, batch, take, within


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class Held:
    """Within the block, the thread of a threaded publisher is busy, and the queue is full."""

    def __init__(self, publisher: ThreadedEventPublisher, room: int) -> None:
        self._publisher, self._room = publisher, room
        self._go_on = threading.Event()

    def __enter__(self) -> None:
        held = threading.Event()

        def hold() -> None:
            held.set()
            self._go_on.wait(PATIENCE_S)

        self._publisher._host.loop.call_soon_threadsafe(hold)
        assert held.wait(PATIENCE_S)
        for number in range(self._room):
            self._publisher.publish(batch(number))

    def __exit__(self, *_: object) -> None:
        self._go_on.set()


def fill(publisher: Any) -> None:
    """Fill a queue of one batch, without waking the sender."""
    publisher._core.outbox.put(batch(0))


class TestThreaded:
    def test_the_wait_has_an_end(self) -> None:
        with ThreadedEventPublisher(0, ANY, max_queue_size=3, bind=True) as publisher:
            with Held(publisher, 3):
                with pytest.raises(TimeoutError, match=r"still full after 0\.01 s"):
                    publisher.publish(batch(3), timeout=0.01)
                with pytest.raises(TimeoutError):
                    publisher.publish(batch(3), timeout=0)
            publisher.publish(batch(3), timeout=PATIENCE_S)
            publisher.flush(PATIENCE_S)
            assert publisher.stats().published == 4, "who gave up used no number"

    def test_closing_ends_the_wait(self) -> None:
        publisher = ThreadedEventPublisher(0, ANY, max_queue_size=1, bind=True)
        failures: list[BaseException] = []

        def publish() -> None:
            try:
                publisher.publish(batch(1))
            except PublisherClosed as error:
                failures.append(error)

        threads = [threading.Thread(target=publish) for _ in range(3)]
        with Held(publisher, 1):
            for thread in threads:
                thread.start()
            wait_until(lambda: publisher._core.outbox.blocked == 3)
            closing = threading.Thread(target=publisher.shutdown)
            closing.start()
            for thread in threads:
                thread.join(PATIENCE_S)
        closing.join(PATIENCE_S)
        assert len(failures) == 3
        assert publisher.stats().sent == 1

    def test_its_own_thread_does_not_wait_for_itself(self) -> None:
        with ThreadedEventPublisher(0, ANY, max_queue_size=1, bind=True) as publisher:
            found: list[BaseException] = []
            done = threading.Event()

            def publish_there() -> None:
                try:
                    for _ in range(2):
                        publisher.publish(batch(0))
                except RoleError as error:
                    found.append(error)
                done.set()

            publisher._host.loop.call_soon_threadsafe(publish_there)
            assert done.wait(PATIENCE_S)
            assert "its own thread" in str(found[0])

    def test_publish_after_the_thread_has_ended_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        ended = LoopThread("a test")
        ended.stop()
        with ThreadedEventPublisher(0, ANY, max_queue_size=1, bind=True) as publisher:
            with monkeypatch.context() as patched:
                patched.setattr(publisher, "_host", ended)  # as when Python ends
                with pytest.raises(PublisherClosed, match="thread of this event publisher has ended"):
                    for _ in range(2):
                        publisher.publish(batch(0))

    def test_ctrl_c_interrupts_the_wait(self) -> None:
        with ThreadedEventPublisher(0, ANY, max_queue_size=1, bind=True) as publisher:

            def interrupt() -> None:
                wait_until(lambda: publisher._core.outbox.blocked)
                os.kill(os.getpid(), signal.SIGINT)

            thread = threading.Thread(target=interrupt)
            with Held(publisher, 1):
                thread.start()
                with pytest.raises(KeyboardInterrupt):
                    publisher.publish(batch(1))
                thread.join(PATIENCE_S)
            publisher.publish(batch(1))
            publisher.flush(PATIENCE_S)
            assert publisher.stats().sent == 2

    @pytest.mark.parametrize("overflow", ["drop", "raise"])
    def test_overflow_drop_and_raise_do_not_wait(self, overflow: Any) -> None:
        with ThreadedEventPublisher(0, ANY, max_queue_size=2, overflow=overflow, bind=True) as publisher:
            with Held(publisher, 2):
                if overflow == "raise":
                    with pytest.raises(QueueFull):
                        publisher.publish(batch(2))
                else:
                    publisher.publish(batch(2))
            assert publisher.stats().dropped == (overflow == "drop")


class TestOnALoop:
    async def test_backpressure(self, ends: Ends) -> None:
        publisher = ends.publisher(max_queue_size=10)
        subscriber = ends.subscriber(publisher)

        async def publish(first: int) -> None:
            for number in range(200):
                await publisher.apublish(batch(first + number))

        await within(asyncio.gather(*(publish(n * 200) for n in range(4))))
        await publisher.flush()
        assert publisher.stats().dropped == 0
        received = [item for item in await take(subscriber, 800) if isinstance(item, Received)]
        assert [item.seq for item in received] == list(range(800))
        numbers = [int(item.batch.ts) for item in received]
        for n in range(4):  # each task's in its order
            of_task = [number for number in numbers if number // 200 == n]
            assert of_task == list(range(n * 200, n * 200 + 200))

    async def test_a_wait_that_is_cancelled_sends_nothing(self, ends: Ends) -> None:
        publisher = ends.publisher(max_queue_size=1)
        fill(publisher)
        waiting = [asyncio.create_task(publisher.apublish(batch(n))) for n in range(1, 5)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        waiting[2].cancel()
        publisher._core.drain()
        await within(asyncio.gather(*waiting, return_exceptions=True))
        await publisher.flush()
        assert publisher.stats().sent == publisher.stats().published == 3
        assert [task.cancelled() for task in waiting] == [True, False, True, False]

    async def test_call_cancelled_when_there_is_room_leaves_the_room_to_the_next(self, ends: Ends) -> None:
        publisher = ends.publisher(max_queue_size=1)
        fill(publisher)
        waiting = [asyncio.create_task(publisher.apublish(batch(n))) for n in range(1, 4)]
        await asyncio.sleep(0)
        publisher._core.drain()  # there is room for the first call, which is cancelled before it runs
        waiting[0].cancel()
        await within(asyncio.gather(*waiting, return_exceptions=True))
        await publisher.flush()
        assert publisher.stats().sent == publisher.stats().published == 3
        assert waiting[0].cancelled()

    async def test_timeout(self, ends: Ends) -> None:
        publisher = ends.publisher(max_queue_size=1)
        fill(publisher)
        with pytest.raises(TimeoutError, match="1 event batches still wait"):
            await publisher.apublish(batch(1), timeout=0)
        publisher._core.drain()
        await publisher.apublish(batch(1), timeout=PATIENCE_S)
        await publisher.flush()
        assert publisher.stats().published == 2

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
        results = await within(asyncio.gather(*waiting, return_exceptions=True))
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
        await NullEventPublisher().apublish(batch(0))
