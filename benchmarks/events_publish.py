"""Batches of KV-cache events that are published, against a threaded publisher.

The rival is what one writes first: ``queue.Queue``, a thread that hands the structs to msgspec, and a PUB socket. All
publish the same batches of 100 events in the default form of the wire, which is vLLM 0.33's: the same bytes. A
subscriber in another process counts them, and the time ends when the last byte is there. CPU time is that of the
publisher's process. Two loads: *burst* publishes 1,000 batches and begins again once they are sent; in *decode loop*
every step of an event loop publishes one batch and does nothing else.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import queue
import random
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

import msgspec
import zmq
from msgspec.structs import astuple

from aioshm.events import BlockStored, EventBatch, ThreadedEventPublisher, ZmqEventPublisher
from benchmarks.framework.crew import BenchmarkError, Boss, Crew, Hand
from benchmarks.framework.harness import Settings, main, progress
from benchmarks.framework.report import Report, percentile

EVENTS = 100
TOKENS = 16
BATCHES = 64
"""Different ones: a CPU learns a single batch by heart, which encodes in half the time."""

ON_THE_LOOP, IN_A_THREAD, RIVAL = "ZmqEventPublisher", "ThreadedEventPublisher", "queue + thread + PUB"
BURST = 1000
AT_LEAST = 1.5
"""The promised batches/s, against the rival's."""
GUESSED_BATCHES_PER_S = 40_000
ROUNDS = 8
"""Turns of each contestant in each repetition: a disturbance of the machine meets all of them."""
SUBSCRIPTION_S = 0.3
"""PUB cannot say that a subscription has arrived; if this is too short, the count of bytes shows it."""
ENDPOINT = "tcp://127.0.0.1:0"
TIMEOUT_S = 60.0


class Stored(msgspec.Struct, omit_defaults=True, gc=False, tag="BlockStored"):
    """A stored block as vLLM 0.33 publishes it."""

    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: list[list[int]] | None = None


@dataclass(frozen=True)
class Contestant:
    """A publisher.

    Attributes:
        endpoint: Where it publishes.
        publish: Takes a batch.
        flush: Waits until everything is handed to ZeroMQ. It may block: the loop has nothing else to do.
    """

    endpoint: str
    publish: Callable[[EventBatch], None]
    flush: Callable[[], Awaitable[None]]


class Straightforward:
    """The rival: a queue, a thread, a PUB socket."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        self._socket.set_hwm(100_000)
        self._socket.bind(ENDPOINT)
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._queue: queue.Queue[EventBatch | threading.Event | None] = queue.Queue(100_000)
        self.publish = self._queue.put
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def flush(self) -> None:
        """Wait until everything is sent."""
        reached = threading.Event()
        self._queue.put(reached)
        reached.wait()

    def close(self) -> None:
        """End the thread and close the socket."""
        self._queue.put(None)
        self._thread.join()
        self._context.destroy(linger=0)

    def _run(self) -> None:
        seq, encode = 0, msgspec.msgpack.Encoder().encode
        while (item := self._queue.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            self._socket.send_multipart((b"", seq.to_bytes(8, "big"), encode(item)))
            seq += 1


@asynccontextmanager
async def contestant(name: str) -> AsyncIterator[Contestant]:
    """Make one, and close it afterwards."""
    if name == ON_THE_LOOP:
        async with ZmqEventPublisher(0, ENDPOINT, bind=True) as publisher:
            yield Contestant(publisher.endpoint, publisher.publish, publisher.flush)
    elif name == IN_A_THREAD:
        with ThreadedEventPublisher(0, ENDPOINT, bind=True) as threaded:
            yield Contestant(threaded.endpoint, threaded.publish, _blocking(threaded.flush))
    else:
        rival = Straightforward()
        try:
            yield Contestant(rival.endpoint, rival.publish, _blocking(rival.flush))
        finally:
            rival.close()


def _blocking(flush: Callable[[], None]) -> Callable[[], Awaitable[None]]:
    async def wait() -> None:
        flush()

    return wait


def make_batch(seed: int) -> EventBatch:
    """Return a step's worth of stored blocks."""
    chance = random.Random(seed)
    stored = [
        BlockStored(
            [chance.getrandbits(64)],
            chance.getrandbits(64),
            [chance.randrange(128_000) for _ in range(TOKENS)],
            TOKENS,
            None,
            "GPU",
        )
        for _ in range(EVENTS)
    ]
    return EventBatch(1700000000.0 + seed, stored, 0)


def as_vllm_has_it(batch: EventBatch) -> EventBatch:
    """Return the same batch of structs like vLLM's."""
    n_fields = len(Stored.__struct_fields__)
    events = [Stored(*astuple(event)[:n_fields]) for event in batch.events]
    return EventBatch(batch.ts, events, batch.data_parallel_rank)


async def publish_burst(to: Contestant, batches: Sequence[EventBatch]) -> list[float]:
    """Publish these, so many at a time; return how long the caller waited each time, in seconds."""
    costs = []
    publish, clock = to.publish, time.perf_counter
    for begin in range(0, len(batches), BURST):
        for batch in batches[begin : begin + BURST]:
            began = clock()
            publish(batch)
            costs.append(clock() - began)
        await to.flush()
    return costs


async def publish_steps(to: Contestant, batches: Sequence[EventBatch]) -> list[float]:
    """Publish one of these in each step; return how long the caller waited each time, in seconds."""
    costs = []
    publish, clock = to.publish, time.perf_counter
    for batch in batches:
        began = clock()
        publish(batch)
        costs.append(clock() - began)
        await asyncio.sleep(0)  # the step is over
    await to.flush()
    return costs


LOADS = {"burst": publish_burst, "decode loop": publish_steps}


async def run(settings: Settings, report: Report) -> None:
    """Measure all publishers, in turns."""
    ours = [make_batch(seed) for seed in range(BATCHES)]
    theirs = [as_vllm_has_it(batch) for batch in ours]
    gc.collect()
    gc.freeze()  # an engine's batches are gone after the step; the collector would visit these again and again
    count = max(1, int(settings.seconds * GUESSED_BATCHES_PER_S / ROUNDS))
    encode = msgspec.msgpack.Encoder().encode
    nbytes = sum(islice(cycle([message_bytes(0, 8, len(encode(batch))) for batch in theirs]), count))
    names = (ON_THE_LOOP, IN_A_THREAD, RIVAL)
    batches = {name: list(islice(cycle(theirs if name == RIVAL else ours), count)) for name in names}
    with Crew(settings.loop_factory) as crew:
        async with AsyncExitStack() as stack:
            found = {name: await stack.enter_async_context(contestant(name)) for name in names}
            sinks = {name: crew.start(f"subscriber of {name}", count_bytes) for name in names}
            for name, sink in sinks.items():
                sink.order(found[name].endpoint)
                await sink.reply()
            await asyncio.sleep(SUBSCRIPTION_S)
            for load, publish in LOADS.items():
                progress(f"{load}: {settings.repeat} times {ROUNDS} turns of {count:,} batches")
                turns = {
                    name: functools.partial(_measure, sinks[name], nbytes, publish, to, batches[name])
                    for name, to in found.items()
                }
                for turn in turns.values():  # the memory for waiting messages is new at first
                    await turn()
                for _ in range(settings.repeat):
                    await _repeat(report, load, turns, count)
        await crew.dismiss(list(sinks.values()))
    for load in LOADS:
        ratios = report.ratios(load, ON_THE_LOOP, RIVAL, "batches_per_s")
        report.hold(f"batches/s of {ON_THE_LOOP} against {RIVAL}, {load}", ratios, "x", AT_LEAST, at_least=True)


async def _repeat(
    report: Report, load: str, turns: Mapping[str, Callable[[], Awaitable[tuple[list[float], float]]]], count: int
) -> None:
    """Give each contestant its turns, and note its figures."""
    costs: dict[str, list[float]] = {name: [] for name in turns}
    seconds, cpu = dict.fromkeys(turns, 0.0), dict.fromkeys(turns, 0.0)
    for _ in range(ROUNDS):
        for name, turn in turns.items():
            cpu[name] -= time.process_time()
            waited, took = await turn()
            costs[name] += waited
            seconds[name] += took
            cpu[name] += time.process_time()
    for name in turns:
        report.result(load, name).add(
            publish_p50_us=percentile(costs[name], 50) * 1e6,
            publish_p99_us=percentile(costs[name], 99) * 1e6,
            batches_per_s=ROUNDS * count / seconds[name],
            cpu_us_per_batch=cpu[name] * 1e6 / (ROUNDS * count),
        )


async def _measure(
    sink: Hand,
    nbytes: int,
    publish: Callable[[Contestant, Sequence[EventBatch]], Awaitable[list[float]]],
    to: Contestant,
    batches: Sequence[EventBatch],
) -> tuple[list[float], float]:
    """Publish; return what each call cost, and the seconds until the last byte had arrived."""
    sink.order(nbytes)
    began = time.perf_counter()
    costs = await publish(to, batches)
    left = await sink.reply()
    seconds = time.perf_counter() - began
    if left:
        raise BenchmarkError(f"{left} of {nbytes} bytes have not arrived")
    return costs, seconds


# A subscriber that costs its machine as little as possible, so that publishers are measured as if it ran on another
# host: it speaks ZMTP (https://rfc.zeromq.org/spec/23/) and counts bytes.

_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
_READY_BODY = b"\x05READY\x0bSocket-Type" + (3).to_bytes(4, "big") + b"SUB"
_SUBSCRIBE_TO_ALL = b"\x04\x0a\x09SUBSCRIBE"
_SHORT = 255  # the longest frame whose length is a single byte
_CHUNK = 1 << 20


def message_bytes(*frames: int) -> int:
    """Return how many bytes a message with frames of these sizes is on the wire."""
    return sum(size + (2 if size <= _SHORT else 9) for size in frames)


def count_bytes(boss: Boss) -> None:
    """Role: subscribe to an address; answer each order, a number of bytes, when they have come, with those missing."""
    peer: socket.socket | None = None
    while (order := boss.plain_order()) is not None:
        if isinstance(order, str):
            peer = _subscribe(order)
        else:
            assert peer is not None
            order -= _discard(peer, order)
        boss.reply(order)


def _discard(peer: socket.socket, nbytes: int) -> int:
    """Wait for so many bytes, or the end; return how many came. Linux need not copy them."""
    room = bytearray(_CHUNK)
    flags = socket.MSG_TRUNC if sys.platform == "linux" else 0  # tcp(7)
    came = 0
    while came < nbytes and (count := peer.recv_into(room, 0, flags)):
        came += count
    return came


def _subscribe(endpoint: str) -> socket.socket:
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    peer = socket.create_connection((host, int(port)), TIMEOUT_S)
    peer.sendall(_GREETING + bytes([4, len(_READY_BODY)]) + _READY_BODY)
    answer = b""
    while b"PUB" not in answer:  # it takes no subscription before its own READY is out
        chunk = peer.recv(4096)
        if not chunk:
            raise ConnectionError(f"{endpoint} hung up during the handshake")
        answer += chunk
    peer.sendall(_SUBSCRIBE_TO_ALL)
    peer.settimeout(None)  # with one, every read would be two system calls
    return peer


if __name__ == "__main__":
    sys.exit(main("events_publish", __doc__, run, repeat=5, seconds=1.0))
