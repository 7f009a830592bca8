"""What publishing costs, to the caller and in batches per second, against a threaded publisher.

The rival is what one writes first: ``queue.Queue``, a thread, ``msgspec`` and a PUB socket. Both publish the
same batches in the same bytes, to one connected subscriber in another process; both count as done when the
last batch is handed to ZeroMQ. Nobody serves replay.

Two loads: *burst*, as fast as the caller can, nothing else to do; and *decode*, an engine's event loop that
computes in Python for a while (``--work-us``), publishes, and ends its turn.

    python -m benchmarks.events_publish [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import queue
import random
import statistics
import subprocess
import sys
import threading
import time
from typing import Any

import msgspec
import zmq

from aioshm.events import BlockStored, EventBatch, ThreadedEventPublisher, ZmqEventPublisher
from aioshm.events.encoding import BatchEncoder

EVENTS = 100
TOKENS = 16

SINK = """
import sys, zmq
sub = zmq.Context().socket(zmq.SUB)
sub.set_hwm(0)
sub.subscribe(b"")
sub.connect(sys.argv[1])
while sub.recv_multipart()[2] != b"end":
    pass
"""


def actual(socket: zmq.Socket[bytes]) -> str:
    """Return where a socket is bound."""
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


class StraightforwardPublisher:
    """The rival: a queue, a thread, a PUB socket."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        self._socket.set_hwm(100_000)
        self._socket.bind("tcp://127.0.0.1:0")
        self.endpoint = actual(self._socket)
        self._queue: queue.Queue[EventBatch | None] = queue.Queue(100_000)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def publish(self, batch: EventBatch) -> None:
        """Queue a batch."""
        self._queue.put(batch)

    def finish(self) -> None:
        """Wait until everything is sent."""
        self._queue.put(None)
        self._thread.join()

    def close(self) -> None:
        """Close the socket."""
        self._socket.close(0)
        self._context.term()

    def _run(self) -> None:
        encoder = BatchEncoder("array")
        seq = 0
        while (batch := self._queue.get()) is not None:
            self._socket.send_multipart((b"", seq.to_bytes(8, "big"), encoder.encode(batch, 0)))
            seq += 1


def make_batch(events: int = EVENTS) -> EventBatch:
    """Return a step's worth of stored blocks."""
    chance = random.Random(1)
    stored = [
        BlockStored(
            [chance.getrandbits(64)],
            chance.getrandbits(64),
            [chance.randrange(128_000) for _ in range(TOKENS)],
            TOKENS,
            None,
            "GPU",
        )
        for _ in range(events)
    ]
    return EventBatch(time.time(), stored)


def compute(seconds: float) -> None:
    """Keep the interpreter busy, as a scheduler's step does."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def sink(endpoint: str) -> subprocess.Popen[bytes]:
    """Start a subscriber that reads and forgets."""
    process = subprocess.Popen([sys.executable, "-c", SINK, endpoint])
    time.sleep(0.5)  # PUB has no way to say that a subscription has arrived
    return process


def summary(costs: list[float], batches: int, seconds: float) -> dict[str, float]:
    """Return the figures of one run."""
    costs.sort()
    return {
        "median_us": statistics.median(costs) * 1e6,
        "p99_us": costs[int(len(costs) * 0.99)] * 1e6,
        "batches_per_s": batches / seconds,
    }


def timed(publish: Any, batch: EventBatch, costs: list[float]) -> None:
    """Publish and note how long the caller waited."""
    begin = time.perf_counter()
    publish(batch)
    costs.append(time.perf_counter() - begin)


async def on_the_loop(batch: EventBatch, batches: int, work: float) -> dict[str, float]:
    """Measure the publisher on the running loop."""
    costs: list[float] = []
    async with ZmqEventPublisher(0, "tcp://127.0.0.1:0", bind=True) as publisher:
        process = sink(publisher.endpoint)
        begin = time.perf_counter()
        for _ in range(batches):
            compute(work)
            timed(publisher.publish, batch, costs)
            if work:
                await asyncio.sleep(0)  # the step is over
        await publisher.flush()
        seconds = time.perf_counter() - begin
        process.kill()
        process.wait()
    return summary(costs, batches, seconds)


async def in_a_thread(batch: EventBatch, batches: int, work: float) -> dict[str, float]:
    """Measure the publisher with its own thread."""
    costs: list[float] = []
    with ThreadedEventPublisher(0, "tcp://127.0.0.1:0", bind=True) as publisher:
        process = sink(publisher.endpoint)
        begin = time.perf_counter()
        for _ in range(batches):
            compute(work)
            timed(publisher.publish, batch, costs)
            if work:
                await asyncio.sleep(0)
        publisher.flush()
        seconds = time.perf_counter() - begin
        process.kill()
        process.wait()
    return summary(costs, batches, seconds)


async def straightforward(batch: EventBatch, batches: int, work: float) -> dict[str, float]:
    """Measure the rival."""
    costs: list[float] = []
    publisher = StraightforwardPublisher()
    process = sink(publisher.endpoint)
    begin = time.perf_counter()
    for _ in range(batches):
        compute(work)
        timed(publisher.publish, batch, costs)
        if work:
            await asyncio.sleep(0)
    publisher.finish()
    seconds = time.perf_counter() - begin
    process.kill()
    process.wait()
    publisher.close()
    return summary(costs, batches, seconds)


def inline(batch: EventBatch, batches: int) -> dict[str, float]:
    """What the caller would pay if ``publish`` encoded and sent at once."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    pub = context.socket(zmq.PUB)
    pub.bind("tcp://127.0.0.1:0")
    process = sink(actual(pub))
    encoder = BatchEncoder("array")
    costs: list[float] = []
    begin = time.perf_counter()
    for seq in range(batches):
        start = time.perf_counter()
        pub.send_multipart((b"", seq.to_bytes(8, "big"), encoder.encode(batch, 0)))
        costs.append(time.perf_counter() - start)
    seconds = time.perf_counter() - begin
    process.kill()
    process.wait()
    pub.close(0)
    context.term()
    return summary(costs, batches, seconds)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=5000)
    parser.add_argument("--events", type=int, default=EVENTS, help="events in a batch")
    parser.add_argument("--work-us", type=float, default=100.0, help="computing per step of the decode load")
    parser.add_argument("--rounds", type=int, default=3, help="the round with the median rate counts")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    batch = make_batch(options.events)
    results: dict[str, dict[str, dict[str, float]]] = {}
    for load, work in (("burst", 0.0), ("decode", options.work_us * 1e-6)):
        rounds: dict[str, list[dict[str, float]]] = {}
        for _ in range(options.rounds):  # taking turns, so that a slow moment of the machine meets everybody
            for name, run in (
                ("ZmqEventPublisher", on_the_loop),
                ("ThreadedEventPublisher", in_a_thread),
                ("queue + thread + PUB", straightforward),
            ):
                rounds.setdefault(name, []).append(asyncio.run(run(batch, options.batches, work)))
        results[load] = {
            name: sorted(found, key=lambda one: one["batches_per_s"])[len(found) // 2] for name, found in rounds.items()
        }
    results["burst"]["encode and send in publish"] = inline(batch, options.batches)
    ratios = {
        load: results[load]["ZmqEventPublisher"]["batches_per_s"]
        / results[load]["queue + thread + PUB"]["batches_per_s"]
        for load in results
    }
    machine = (
        f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}, "
        f"pyzmq {zmq.__version__}, msgspec {msgspec.__version__}"
    )
    if options.json:
        print(json.dumps({"machine": machine, "events": options.events, "results": results, "ratio": ratios}))
        return
    print(f"{options.batches} batches of {options.events} events; {machine}")
    for load, found in results.items():
        print(f"\n{load:28} {'publish median':>15} {'p99':>10} {'batches/s':>12}")
        for name, one in found.items():
            figures = f"{one['median_us']:12.2f} us {one['p99_us']:7.2f} us {one['batches_per_s']:12,.0f}"
            print(f"  {name:26} {figures}")
        print(f"  ZmqEventPublisher / queue + thread + PUB: {ratios[load]:.2f} x the batches per second")


if __name__ == "__main__":
    main()
