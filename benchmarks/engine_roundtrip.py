"""From a request to its first output, between a front end and an engine, against bare sockets of zmq.asyncio.

One request at a time, so that it is latency that is measured. aioshm does what a front end needs beside: it chooses an
engine, knows which output belongs to which request, aborts what is left, and notices when an engine dies.
"""

from __future__ import annotations

import asyncio
import sys
import time
from contextlib import AsyncExitStack
from statistics import median

from benchmarks.contestants.engines import ENGINES, Ask, Request
from benchmarks.framework.crew import BenchmarkError, Crew
from benchmarks.framework.harness import Settings, main, progress
from benchmarks.framework.report import Report, latencies

SHARE = 1.5
"""The promised p50, as a share of zmq.asyncio's."""

PROMPTS = {"16 tokens": 16, "4,000 tokens": 4000}

ROUNDS = 10
"""The contestants take so many turns in each repetition: what else runs on the machine shall meet all of them."""

PROBE, LEAST, MOST = 50, 5, 2000


async def run(settings: Settings, report: Report) -> None:
    """Measure, and hold the results against the promise."""
    with Crew(settings.loop_factory) as crew:
        async with AsyncExitStack() as stack:
            progress("starting an engine of each contestant")
            asks = {one.name: await stack.enter_async_context(one.front(crew)) for one in settings.chosen(ENGINES)}
            for prompt, length in PROMPTS.items():
                progress(f"{prompt}: {settings.repeat} time(s)")
                await _contest(settings, report, asks, prompt, length)
    for prompt in PROMPTS:
        ratio = report.ratio(prompt, "aioshm", "zmq.asyncio", "p50_us")
        report.hold(f"p50 from a request of {prompt} to its first output, against bare sockets", ratio, "x", SHARE)


async def _contest(settings: Settings, report: Report, asks: dict[str, Ask], prompt: str, length: int) -> None:
    counts = {}
    for name, ask in asks.items():
        probe = median(await _times(ask, length, PROBE))
        counts[name] = max(LEAST, min(MOST, int(settings.seconds * 1e6 / probe / ROUNDS)))
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


if __name__ == "__main__":
    sys.exit(main("engine_roundtrip", __doc__, run, repeat=3, seconds=1.0, contestants=ENGINES))
