"""vLLM's example of a subscriber, played with plain sockets, against what publishers do by default.

It subscribes with SUB, sees a gap by the numbers, and asks with REQ for what it missed: a request is the first number,
8 bytes; an answer has three frames, of which the payload is empty at the end. REQ takes one message of each answer, and
the example gets no further; here it also asks again from the next number. It never notes the number of a live batch, so
that it would see no gap; here it does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import msgspec
import pytest
import zmq

from aioshm.events import EventBatch, ThreadedEventPublisher, ZmqEventPublisher

from ..helpers import ANY, PATIENCE_S
from .test_wire_names import EVENTS, Batch, kv_events, same  # noqa: F401  a fixture

TOPIC = "kv-events"
# Of the batches that it sees, counted from the first.
LOST = [3, 4, 5, 6]
BATCHES = 10


class Example:
    """The example's sockets, and what it does with them; it also loses what ``LOST`` says.

    Attributes:
        batches: Those that it has, by their numbers.
        replayed: The numbers of those that it got by asking.
        ends: End markers that it read.
    """

    def __init__(self, endpoint: str, replay_endpoint: str, batch: type[Any]) -> None:
        self._decode = msgspec.msgpack.Decoder(type=batch).decode
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.connect(endpoint)
        self._sub.setsockopt_string(zmq.SUBSCRIBE, TOPIC)
        self._replay = self._context.socket(zmq.REQ)
        self._replay.connect(replay_endpoint)
        self._poller = zmq.Poller()
        self._poller.register(self._replay, zmq.POLLIN)
        self._last = -1
        self.batches: dict[int, Any] = {}
        self.replayed: list[int] = []
        self.ends = 0

    def __enter__(self) -> Example:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._context.destroy(linger=0)

    def listens(self) -> bool:
        """Wait a moment for the first message."""
        return bool(self._sub.poll(10))

    def run(self, count: int) -> int:
        """Follow so many batches; return the number of the first."""
        deadline = time.monotonic() + PATIENCE_S
        first: int | None = None
        while first is None or self._last + 1 < first + count:
            assert time.monotonic() < deadline, f"nothing came after batch {self._last}"
            if not self._sub.poll(50):
                continue
            topic, number, payload = self._sub.recv_multipart()
            assert topic == TOPIC.encode()
            seq = int.from_bytes(number, "big")
            first = seq if first is None else first
            if seq - first in LOST:
                continue
            if self._last >= 0 and seq > self._last + 1:
                self._fill(seq)
            self._take(seq, payload)
        return first

    def ask(self, start: int) -> bool:
        """Ask for the batches from this number on, and read as REQ lets it; False if the end marker was all."""
        self._replay.send(start.to_bytes(8, "big"))
        got = False
        timeout = int(PATIENCE_S * 1000)
        while self._poller.poll(timeout):
            _, number, payload = self._replay.recv_multipart()
            if not payload:
                self.ends += 1
                break
            got, timeout = True, 200
            seq = int.from_bytes(number, "big")
            if seq > self._last:
                self.replayed.append(seq)
                self._take(seq, payload)
        return got

    def _fill(self, seq: int) -> None:
        while self._last + 1 < seq:
            assert self.ask(self._last + 1), "the end came before the gap was filled"

    def _take(self, seq: int, payload: bytes) -> None:
        self.batches[seq] = self._decode(payload)
        self._last = seq


def play(example: Example, publish: Callable[[EventBatch], Any]) -> None:
    """Publish until the example is there; then let it lose batches and get them back, and ask for all and for none."""
    deadline = time.monotonic() + PATIENCE_S
    while not example.listens():
        assert time.monotonic() < deadline
        publish(EventBatch(1.0, EVENTS))
    for _ in range(BATCHES):
        publish(EventBatch(1.0, EVENTS))
    first = example.run(BATCHES)
    assert example.replayed == [first + one for one in LOST]
    assert sorted(example.batches) == list(range(first, first + BATCHES))
    assert not example.ask(1 << 40), "there is no such batch yet"
    assert example.ends == 1
    for batch in example.batches.values():
        assert batch.ts == 1.0
        assert len(batch.events) == len(EVENTS)
        assert all(map(same, batch.events, EVENTS))


@pytest.fixture(params=["equivalents", "vLLM's own"])
def batch_type(request: pytest.FixtureRequest) -> Any:
    if request.param == "equivalents":
        return Batch
    return request.getfixturevalue("kv_events").KVEventBatch


@pytest.mark.slow_on_uvloop
async def test_it_reads_a_publisher_on_a_loop(batch_type: Any) -> None:
    async with ZmqEventPublisher(0, ANY, ANY, topic=TOPIC, bind=True) as publisher:
        loop = asyncio.get_running_loop()

        def publish(batch: EventBatch) -> None:
            loop.call_soon_threadsafe(publisher.publish, batch)

        with Example(publisher.endpoint, publisher.replay_endpoint, batch_type) as example:
            await asyncio.to_thread(play, example, publish)


def test_it_reads_a_threaded_publisher(batch_type: Any) -> None:
    with (
        ThreadedEventPublisher(0, ANY, ANY, topic=TOPIC, bind=True) as publisher,
        Example(publisher.endpoint, publisher.replay_endpoint, batch_type) as example,
    ):
        play(example, publisher.publish)
