"""From a request to its first output, between a front end and an engine, against bare sockets of zmq.asyncio.

One request at a time, so that it is latency that is measured. All carry the same structs, encoded by msgspec, over a
Unix socket, and the engine answers each request with one output. aioshm does more for a front end: it chooses an
engine, knows the request of each output, aborts requests that are left, and notices when an engine dies. A request to
an engine that stamps its progress is compared with one to the same engine without stamps, too.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from statistics import median
from typing import Any, TypeAlias

import msgspec
import zmq
import zmq.asyncio

from aioshm.engine import (
    ClientOptions,
    EngineClient,
    EngineLayout,
    die_with_parent,
    launch_core_engines,
    run_engine_core,
)
from benchmarks.framework.crew import BenchmarkError, Boss, Crew
from benchmarks.framework.harness import Settings, loop_factory, main, progress
from benchmarks.framework.report import Report, latencies
from benchmarks.framework.stamps import Stamped, hold_cost

MOST = 1.15
"""The promised p50, as a share of zmq.asyncio's."""

PROMPTS = {"16 tokens": 16, "4,000 tokens": 4000}

ROUNDS = 10
"""Turns of each contestant in each repetition: a disturbance of the machine meets all of them."""

PROBE, LEAST, MOST_REQUESTS = 50, 5, 2000
READY_S = 30.0


class Request(msgspec.Struct):
    """A prompt."""

    request_id: str
    prompt_token_ids: list[int]


class Output(msgspec.Struct):
    """The first token, which is the last one, too."""

    request_id: str
    token_id: int
    finish_reason: str | None = None


Ask: TypeAlias = Callable[[Request], Awaitable[Output]]


async def run(settings: Settings, report: Report) -> None:
    """Measure, and hold the results against the promise."""
    with Crew(settings.loop_factory) as crew:
        async with AsyncExitStack() as stack:
            progress("starting an engine of each contestant")
            client = await stack.enter_async_context(engine_of(settings.more.loop))
            asks: dict[str, Ask] = {
                "aioshm": lambda request: anext(client.submit(request)),
                "zmq.asyncio": await stack.enter_async_context(router_of(crew)),
            }
            for prompt, length in PROMPTS.items():
                progress(f"{prompt}: {settings.repeat} time(s)")
                await _contest(settings, report, asks, prompt, length)

            async def step() -> float:
                return (await _times(asks["aioshm"], min(PROMPTS.values()), 1))[0]

            await hold_cost(settings, report, "a request to an engine", step, partial(client.call, "stamp"))
    for prompt in PROMPTS:
        ratios = report.ratios(prompt, "aioshm", "zmq.asyncio", "p50_us")
        report.hold(f"p50 from a request of {prompt} to its first output, against bare sockets", ratios, "x", MOST)


async def _contest(settings: Settings, report: Report, asks: dict[str, Ask], prompt: str, length: int) -> None:
    counts = {}
    for name, ask in asks.items():
        probe = median(await _times(ask, length, PROBE))
        counts[name] = max(LEAST, min(MOST_REQUESTS, int(settings.seconds * 1e6 / probe / ROUNDS)))
    for _ in range(settings.repeat):
        times: dict[str, list[float]] = {name: [] for name in asks}
        for _ in range(ROUNDS):
            for name, ask in asks.items():
                times[name] += await _times(ask, length, counts[name])
        for name, found in times.items():
            report.result(prompt, name).add(**latencies(found))


async def _times(ask: Ask, length: int, count: int) -> list[float]:
    """Return how long each request took, in microseconds."""
    prompt = [1000 + number for number in range(length)]
    times = []
    for number in range(count):
        request = Request(f"request-{number}", prompt)
        began = time.perf_counter()
        output = await ask(request)
        times.append((time.perf_counter() - began) * 1e6)
        if (output.request_id, output.token_id) != (request.request_id, prompt[-1]):
            raise BenchmarkError(f"{request.request_id} was answered by {output}")
        await asyncio.sleep(0)
    return times


def answer(request: Request) -> Output:
    """Do the work of an engine."""
    return Output(request.request_id, request.prompt_token_ids[-1], "length")


class Echo(Stamped):
    """An engine that answers each request in its next step."""

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def initialize(self, _metadata: object) -> dict[str, Any]:
        """Prepare nothing."""
        return {}

    def add_request(self, request: Request) -> None:
        """Take a request."""
        self._requests.append(request)

    def abort_requests(self, request_ids: list[str]) -> None:
        """Drop requests."""
        self._requests = [request for request in self._requests if request.request_id not in request_ids]

    def step(self) -> list[Output]:
        """Answer all."""
        outputs = [answer(request) for request in self._requests]
        self._requests.clear()
        return outputs


def serve(handshake_address: str, dp_rank: int, local_dp_rank: int, loop: str) -> None:
    """Run an engine of aioshm's; the target of a process."""
    die_with_parent()
    with asyncio.Runner(loop_factory=loop_factory(loop)) as runner:
        runner.run(run_engine_core(Echo(), handshake_address, dp_rank, request_type=Request))


@asynccontextmanager
async def engine_of(loop: str) -> AsyncIterator[EngineClient]:
    """Start an engine; yield its client."""
    options = ClientOptions(output_type=Output)
    layout = EngineLayout(coordinator=False)
    async with launch_core_engines(serve, 1, kwargs={"loop": loop}, client=options, layout=layout) as launch:
        assert launch.client is not None
        yield launch.client


async def echo(boss: Boss, address: str) -> None:
    """Role: a DEALER that answers."""
    decode, encode = msgspec.msgpack.Decoder(Request).decode, msgspec.msgpack.Encoder().encode
    socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
    socket.setsockopt(zmq.ROUTING_ID, b"\0\0")
    socket.connect(address)
    await socket.send(b"")

    async def answer_all() -> None:
        while True:
            await socket.send(encode(answer(decode(await socket.recv()))))

    serving = asyncio.create_task(answer_all())
    await boss.order()
    serving.cancel()
    await asyncio.wait([serving])
    socket.close(linger=0)


@asynccontextmanager
async def router_of(crew: Crew) -> AsyncIterator[Ask]:
    """Start an engine with a DEALER of zmq.asyncio, and ask it through a ROUTER; nothing else."""
    decode, encode = msgspec.msgpack.Decoder(Output).decode, msgspec.msgpack.Encoder().encode
    with tempfile.TemporaryDirectory(prefix="aioshm-") as folder:
        address = f"ipc://{folder}/router"
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.ROUTER)
        try:
            socket.bind(address)
            hand = crew.start("engine of zmq.asyncio", echo, address)
            async with asyncio.timeout(READY_S):
                identity, _ = await socket.recv_multipart()

            async def ask(request: Request) -> Output:
                await socket.send_multipart([identity, encode(request)])
                return decode((await socket.recv_multipart())[1])

            yield ask
            await crew.dismiss([hand])
        finally:
            socket.close(linger=0)
            context.term()


if __name__ == "__main__":
    sys.exit(main("engine_roundtrip", __doc__, run, repeat=3, seconds=1.0))
