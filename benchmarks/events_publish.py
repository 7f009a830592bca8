"""What publishing KV-cache events costs its caller, and how many batches a second go out, against a threaded publisher.

The rival is what one writes first: ``queue.Queue``, a thread that hands the structs to msgspec, and a PUB socket. A
second rival sends the bytes that this library does, by its encoder in Python. All publish the same batches of 100
events, 64 different ones in turns, each to a subscriber in another process that counts what arrives: the time ends when
the last byte is there. CPU time is that of the publisher's process, computing included. Nobody serves replay.

Everything is measured in two forms, one after the other. *arrays* (``wire="vllm-0.9"``): the rival's structs are this
library's, and it writes every field that is not set as a nil. *maps* (the default): its structs are like those of vLLM
0.33, and all send the same bytes, 1.8 times as many as arrays have.

Three loads. *burst*: the caller does nothing but publish 1,000 batches, and begins again once they are sent. *decode
loop*: every step of an event loop publishes one batch and does nothing else. *decode loop, 100 us*: it also computes
for so long, in Python.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import queue
import random
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any, TypeAlias

import msgspec
import zmq
from msgspec.structs import astuple

from aioshm.events import BlockStored, EventBatch, ThreadedEventPublisher, ZmqEventPublisher
from aioshm.events.protocol.encoding import BatchEncoder
from aioshm.events.protocol.wire import DEFAULT_WIRE, Wire, resolve_wire
from benchmarks.framework.crew import BenchmarkError, Crew, Hand
from benchmarks.framework.harness import Settings, main, progress
from benchmarks.framework.report import Report, percentile
from benchmarks.zmtp_sink import count_bytes, message_bytes

EVENTS = 100
TOKENS = 16
BATCHES = 64
"""Different ones: a CPU learns a single batch by heart, which encodes in half the time."""

ON_THE_LOOP, IN_A_THREAD = "ZmqEventPublisher", "ThreadedEventPublisher"
RIVAL, SAME_BYTES = "queue + thread + PUB", "the same, same bytes"
BURST = 1000
PUBLISH_US = 5.0
ARRAYS, MAPS = "arrays", "maps"
FORMS: dict[str, Wire] = {ARRAYS: "vllm-0.9", MAPS: DEFAULT_WIRE}
RATIOS = {ARRAYS: 3.0, MAPS: 1.5}
"""Of batches a second, ours to a rival's. Maps are mostly keys, and msgspec copies keys as fast as anybody."""
GUESSED_BATCHES_PER_S = 40_000
ROUNDS = 8
"""The contestants take so many turns in each repetition: what else runs on the machine shall meet all of them."""
COMPUTING_SHARE = 10
"""Where nearly all of the time is computing, a turn has so many times fewer batches."""
SUBSCRIPTION_S = 0.3
"""PUB has no way to say that a subscription has arrived; if this is too short, the count of bytes says so."""


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


Encode: TypeAlias = Callable[[EventBatch], bytes]


def encoders(form: str) -> dict[str, Encode]:
    """Return how each contestant encodes."""
    encoding, _ = resolve_wire(FORMS[form])
    ours = functools.partial(BatchEncoder(encoding).encode, rank=0)
    return {
        RIVAL: msgspec.msgpack.Encoder().encode,
        SAME_BYTES: functools.partial(BatchEncoder(encoding, native=False).encode, rank=0),
        ON_THE_LOOP: ours,
        IN_A_THREAD: ours,
    }


@dataclass(frozen=True)
class Contestant:
    """One that publishes.

    Attributes:
        endpoint: Where.
        publish: Takes a batch.
        flush: Waits until everything is handed to ZeroMQ. It may block: the loop has nothing else to do.
    """

    endpoint: str
    publish: Callable[[EventBatch], None]
    flush: Callable[[], Awaitable[None]]


class Straightforward:
    """The rival: a queue, a thread, a PUB socket."""

    def __init__(self, encode: Encode) -> None:
        self._encode = encode
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        self._socket.set_hwm(100_000)
        self._socket.bind("tcp://127.0.0.1:0")
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
        seq, encode = 0, self._encode
        while (item := self._queue.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            self._socket.send_multipart((b"", seq.to_bytes(8, "big"), encode(item)))
            seq += 1


@asynccontextmanager
async def contestant(name: str, wire: Wire, encode: Encode) -> AsyncIterator[Contestant]:
    """Make one, and close it afterwards."""
    if name == ON_THE_LOOP:
        async with ZmqEventPublisher(0, "tcp://127.0.0.1:0", bind=True, wire=wire) as publisher:
            yield Contestant(publisher.endpoint, publisher.publish, publisher.flush)
    elif name == IN_A_THREAD:
        with ThreadedEventPublisher(0, "tcp://127.0.0.1:0", bind=True, wire=wire) as threaded:
            yield Contestant(threaded.endpoint, threaded.publish, _blocking(threaded.flush))
    else:
        rival = Straightforward(encode)
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


def compute(seconds: float) -> None:
    """Keep the interpreter busy, as a scheduler's step does."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


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


async def publish_steps(to: Contestant, batches: Sequence[EventBatch], work_s: float) -> list[float]:
    """Publish one of these in each step; return how long the caller waited each time, in seconds."""
    costs = []
    publish, clock = to.publish, time.perf_counter
    for batch in batches:
        if work_s:
            compute(work_s)
        began = clock()
        publish(batch)
        costs.append(clock() - began)
        await asyncio.sleep(0)  # the step is over
    await to.flush()
    return costs


LOADS: dict[str, Callable[[Contestant, Sequence[EventBatch]], Awaitable[list[float]]]] = {
    "burst": publish_burst,
    "decode loop": functools.partial(publish_steps, work_s=0.0),
    "decode loop, 100 us": functools.partial(publish_steps, work_s=100e-6),
}
SUSTAINED = ["burst", "decode loop"]


async def run(settings: Settings, report: Report) -> None:
    """Let all of them publish, in turns, in one form and then in the other."""
    batches = [make_batch(seed) for seed in range(BATCHES)]
    of_vllm = [as_vllm_has_it(batch) for batch in batches]
    gc.collect()
    gc.freeze()  # an engine's batches are gone after the step; these would be looked at again and again
    for form in FORMS:
        await _compare(settings, report, form, batches, of_vllm if form == MAPS else batches)
    _hold_against_promises(report)


async def _compare(
    settings: Settings, report: Report, form: str, ours: list[EventBatch], theirs: list[EventBatch]
) -> None:
    count = max(1, int(settings.seconds * GUESSED_BATCHES_PER_S / ROUNDS))
    different = {name: (encode, theirs if name == RIVAL else ours) for name, encode in encoders(form).items()}
    batches = {name: list(islice(cycle(some), count)) for name, (_, some) in different.items()}
    sizes = {name: wire_sizes(encode, some) for name, (encode, some) in different.items()}
    with Crew(settings.loop_factory) as crew:
        async with AsyncExitStack() as stack:
            found = {
                name: await stack.enter_async_context(contestant(name, FORMS[form], encode))
                for name, (encode, _) in different.items()
            }
            sinks = {name: crew.start(f"subscriber of {name}", count_bytes) for name in found}
            for name, sink in sinks.items():
                sink.order(found[name].endpoint)
                await sink.reply()
            await asyncio.sleep(SUBSCRIPTION_S)
            for load, publish in LOADS.items():
                length = count if load in SUSTAINED else max(1, count // COMPUTING_SHARE)
                turns = {name: some[:length] for name, some in batches.items()}
                nbytes = {name: sum(islice(cycle(size), length)) for name, size in sizes.items()}
                progress(f"{form}, {load}: {settings.repeat} times {ROUNDS} turns of {length:,} batches")
                for name, to in found.items():  # the memory for what waits to be sent is new at first
                    await _measure(sinks[name], nbytes[name], publish(to, turns[name]))
                for _ in range(settings.repeat):
                    costs: dict[str, list[float]] = {name: [] for name in found}
                    seconds, cpu = dict.fromkeys(found, 0.0), dict.fromkeys(found, 0.0)
                    for _ in range(ROUNDS):
                        for name, to in found.items():
                            cpu[name] -= time.process_time()
                            waited, took = await _measure(sinks[name], nbytes[name], publish(to, turns[name]))
                            costs[name] += waited
                            seconds[name] += took
                            cpu[name] += time.process_time()
                    for name in found:
                        report.result(case(form, load), name).add(
                            publish_p50_us=percentile(costs[name], 50) * 1e6,
                            publish_p99_us=percentile(costs[name], 99) * 1e6,
                            batches_per_s=ROUNDS * length / seconds[name],
                            cpu_us_per_batch=cpu[name] * 1e6 / (ROUNDS * length),
                        )
        await crew.dismiss(list(sinks.values()))


def case(form: str, load: str) -> str:
    """Return what the report calls a load in a form."""
    return f"{form}, {load}"


def wire_sizes(encode: Encode, batches: Sequence[EventBatch]) -> list[int]:
    """Return how many bytes each of these is on the wire."""
    return [message_bytes(0, 8, len(encode(batch))) for batch in batches]


async def _measure(sink: Hand, nbytes: int, publishing: Awaitable[list[float]]) -> tuple[list[float], float]:
    """Return what the publishing returns, and the seconds until the last byte had arrived."""
    sink.order(nbytes)
    began = time.perf_counter()
    costs = await publishing
    left = await sink.reply()
    seconds = time.perf_counter() - began
    if left:
        raise BenchmarkError(f"{left} of {nbytes} bytes have not arrived")
    return costs, seconds


def _hold_against_promises(report: Report) -> None:
    for form, least in RATIOS.items():
        for load in LOADS:
            name = case(form, load)
            cost = report.result(name, ON_THE_LOOP).median("publish_p50_us")
            report.hold(f"median of a publish, {name}", cost, "us", PUBLISH_US)
            for rival in (RIVAL, SAME_BYTES):
                ratio = report.ratio(name, ON_THE_LOOP, rival, "batches_per_s", of_repetitions=True)
                text = f"batches/s of {ON_THE_LOOP} against {rival}, {name}"
                if load in SUSTAINED:
                    report.hold(text, ratio, "x", least, at_least=True)
                else:
                    report.remarks.append(f"{ratio:.2f}x: {text}; nearly all of it is computing")


if __name__ == "__main__":
    sys.exit(main("events_publish", __doc__, run, repeat=5, seconds=1.0))
