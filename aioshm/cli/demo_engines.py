"""``aioshm demo --engines``: requests to engines, one of which is killed and replaced."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import sys
from collections.abc import Callable
from functools import partial
from statistics import median
from time import monotonic
from typing import Any

import msgspec

from aioshm.cli.outcome import CommandFailed, loop_factory
from aioshm.engine import (
    ClientOptions,
    EngineClient,
    EngineLayout,
    EngineSupervisor,
    EngineZmqAddresses,
    OutputStream,
    StartupOptions,
    run_engine_core,
)
from aioshm.errors import EngineDead

REQUESTS = 8
"""Requests for each engine; then two long ones for each, while one engine is killed."""
STEP_S = 0.02
START_S = 60.0

Say = Callable[[str], None]


class Request(msgspec.Struct, frozen=True):
    """Send back the words of a line so many times, one word in each step."""

    request_id: str
    line: bytes
    times: int = 1


class Word(msgspec.Struct, frozen=True, omit_defaults=True):
    """The next word of a request."""

    request_id: str
    word: bytes
    finish_reason: str | None = None


class _Engine:
    def __init__(self) -> None:
        self._words: dict[str, list[bytes]] = {}

    def initialize(self, metadata: object) -> dict[str, Any]:
        return {}

    def add_request(self, request: Request) -> None:
        self._words[request.request_id] = request.line.split()[::-1] * request.times

    def abort_requests(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            del self._words[request_id]

    async def step(self) -> list[Word]:
        await asyncio.sleep(STEP_S)
        words = []
        for request_id, left in list(self._words.items()):
            words.append(Word(request_id, left.pop(), None if left else "stop"))
            if not left:
                del self._words[request_id]
        return words


def _run_engine(loop: str, handshake_address: str, dp_rank: int, local_dp_rank: int) -> None:
    with asyncio.Runner(loop_factory=loop_factory(loop)) as runner:
        runner.run(run_engine_core(_Engine(), handshake_address, dp_rank, request_type=Request))


async def run_engines(lines: list[bytes], n_engines: int, loop: str, say: Say) -> dict[str, Any]:
    """Start engines, send requests, kill the last engine; return the measurements."""
    logging.getLogger("aioshm").addHandler(logging.NullHandler())  # deaths are printed here
    places: dict[str, Any] = {}
    if sys.platform == "linux":  # abstract addresses leave no files if this process is killed
        handshake, requests, outputs = (f"ipc://@aioshm-{secrets.token_hex(8)}" for _ in range(3))
        places["handshake_address"] = handshake
        places["addresses"] = EngineZmqAddresses([requests], [outputs])
    texts = [line for line in lines if line.split()] or [b"blank"]
    async with EngineSupervisor(
        _run_engine,
        n_engines,
        kwargs={"loop": loop},
        start_timeout=START_S,
        layout=EngineLayout(coordinator=False, **places),
        client=ClientOptions(request_type=Request, output_type=Word),
        startup=StartupOptions(
            on_progress=lambda progress: say(str(progress).partition(";")[0]), progress_timeout=START_S
        ),
    ) as supervisor:
        asked = [texts[number % len(texts)] for number in range(REQUESTS * n_engines)]
        say(f"sending {len(asked)} requests")
        first_word_ms = median(await asyncio.gather(*map(partial(_ask, supervisor.client), asked)))
        words = sum(len(line.split()) for line in asked)
        say(f"{len(asked)} requests: all {words:,} words are right")
        say(f"first word after {first_word_ms:.1f} ms (median); a step takes {STEP_S * 1e3:.0f} ms")
        killed = await _kill(supervisor, texts[0], say)
    return {"requests": len(asked), "words": words, "first_word_p50_ms": first_word_ms} | killed


async def _ask(client: EngineClient, line: bytes, engine: int | None = None) -> float:
    """Send a request and check its words; return the milliseconds to the first word."""
    began = monotonic()
    first_ms = 0.0
    words = []
    stream = client.submit(Request(secrets.token_hex(8), line), engine=engine)
    async for output in stream:
        first_ms = first_ms or (monotonic() - began) * 1e3
        words.append(output.word)
    if words != line.split():
        raise CommandFailed(f"engine {stream.engine} sent wrong words")
    return first_ms


async def _kill(supervisor: EngineSupervisor, line: bytes, say: Say) -> dict[str, Any]:
    """Kill the last engine: its requests fail, the others continue, and a new engine comes."""
    victim = supervisor.engines[-1]
    assert victim.pid is not None
    streams = [
        supervisor.client.submit(Request(secrets.token_hex(8), line, 1000), engine=engine.rank)
        for engine in supervisor.engines
        for _ in range(2)
    ]
    await asyncio.gather(*map(anext, streams))
    say(f"kill -9 {victim.pid}: engine {victim.rank}, with 2 requests in flight")
    began = monotonic()
    os.kill(victim.pid, signal.SIGKILL)
    *others, first, second = streams
    error, _ = await asyncio.gather(_failure(first), _failure(second))
    noticed_ms = (monotonic() - began) * 1e3
    say(f"both failed after {noticed_ms:.1f} ms: {error}")
    await supervisor.wait_until_ready(START_S)
    back_s = monotonic() - began
    for stream in others:
        await anext(stream)
        await stream.aclose()
    say(f"{len(others)} requests of other engines continued")
    new_pid = supervisor.engines[-1].pid
    await _ask(supervisor.client, line, victim.rank)
    say(f"engine {victim.rank} came back after {back_s:.2f} s with pid {new_pid}, and answers")
    report = {"killed": victim.pid, "error": str(error), "noticed_ms": noticed_ms}
    return report | {"continued": len(others), "back_s": back_s, "new_pid": new_pid}


async def _failure(stream: OutputStream[Word]) -> EngineDead:
    try:
        async for _ in stream:
            pass
    except EngineDead as error:
        return error
    raise CommandFailed("a request ended although its engine was killed")
