"""Processes that are killed or hang while they serve: every request ends, and nothing is left behind.

Four engines with a worker each, under an `EngineSupervisor`, and a `WorkerGroup` of four with a standby have a steady
load. Again and again a process of the tree is killed (SIGKILL), stopped for two seconds (SIGSTOP), or hangs for ever,
in a lock or in C with the GIL, or two are struck at once; never this one. A process that hangs is replaced after
`HANG_S`, a stopped one is not. Every request and every call has to end: with its result, or with an error that names a
process that has died, and the line where it hung. Every fourth request has the id of one that was aborted just before.
Afterwards there are as many processes, descriptors and as much memory as before. The workers of the group are made with
an argument of 4 MiB.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import logging
import os
import random
import re
import signal
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from typing import Any

import psutil

from aioshm import Options
from aioshm.engine import (
    ClientOptions,
    EngineClient,
    EngineSupervisor,
    Restart,
    WorkerGroup,
    die_with_parent,
    run_engine_core,
)
from aioshm.errors import EngineDead, WorkerDied
from aioshm.process.proc import handles_signal
from benchmarks.framework.harness import Settings, main, progress
from benchmarks.framework.report import Report, percentile

ENGINES, WORKERS, STANDBYS = 4, 4, 1
ASKING, CALLING = 16, 2
TOKENS = 6
PERIOD_S, STOPPED_S, HANG_S = 0.3, 2.0, 2.0
ABORTED = 100
"""The first token of requests that are aborted; others begin with 0."""
USED_AGAIN = 4
"""Of so many requests one has the id of one that was aborted just before."""
PATIENCE_S = 60.0
RESTART = Restart(max_restarts=1_000_000, backoff_s=0.01, backoff_max_s=0.1)
OPTIONS = Options(stall_warning_s=HANG_S / 2)
NAMED = re.compile(r"\(pid (\d+)\) (?:is|was) stalled: .*\.py:\d+ in \w+")
HUNG_AT = re.compile(r"hung for \d+ s .*\.py:\d+ in \w+")
WEIGHTS = bytes(4 << 20)
"""An argument that no pipe takes at once."""
MEMORY_MIB = 16.0


def hang_in_a_lock(*_: object) -> None:
    """Wait for ever, without the GIL."""
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def hang_in_c(*_: object) -> None:
    """Sleep for ever, with the GIL."""
    ctypes.PyDLL(None).pause()


HANGS = {signal.SIGUSR1: hang_in_a_lock, signal.SIGUSR2: hang_in_c}
WAYS = {signal.SIGKILL: 6, signal.SIGSTOP: 1, signal.SIGUSR1: 1.5, signal.SIGUSR2: 1.5}
"""How often processes are killed, stopped, and made to hang in either way, in relation to each other."""


def obey() -> None:
    """Hang on a signal, wherever the main thread is; a process that starts does not, as nobody would notice."""
    for number, hang in HANGS.items():
        signal.signal(number, hang)


class Adder:
    """A worker that adds its rank to numbers."""

    def __init__(self, weights: bytes = b"", *, rank: int) -> None:
        self._weights = weights
        self._rank = rank

    def add(self, numbers: list[int]) -> list[int]:
        """Return each number and this worker's rank."""
        obey()
        return [number + self._rank for number in numbers]


class Engine:
    """Gives each request the numbers from its first on, which its worker has added 0 to."""

    def __init__(self) -> None:
        self.given: dict[str, int] = {}
        self._group: WorkerGroup | None = None

    async def initialize(self, _metadata: object) -> dict[str, Any]:
        """Start the worker."""
        self._group = await WorkerGroup(Adder, 1).__aenter__()
        return {}

    def add_request(self, request: dict[str, Any]) -> None:
        """Begin."""
        self.given[request["request_id"]] = request.get("first", 0)

    def abort_requests(self, ids: list[str]) -> None:
        """Drop them."""
        for request_id in ids:
            self.given.pop(request_id, None)

    async def step(self) -> list[dict[str, Any]]:
        """Give each request its next number."""
        obey()
        if not self.given:
            return []
        assert self._group is not None
        [numbers] = await self._group.collective_rpc("add", (list(self.given.values()),))
        outputs = []
        for request_id, number in zip(list(self.given), numbers, strict=True):
            output = {"request_id": request_id, "token": number}
            self.given[request_id] += 1
            if (number + 1) % ABORTED == TOKENS:
                output["finish_reason"] = "length"
                del self.given[request_id]
            outputs.append(output)
        return outputs

    async def shutdown(self) -> None:
        """Stop the worker."""
        if self._group is not None:
            await self._group.aclose()


def serve(handshake_address: str, dp_rank: int, local_dp_rank: int) -> None:
    """Run an engine; the target of a process."""
    die_with_parent()
    asyncio.run(run_engine_core(Engine(), handshake_address, dp_rank))


async def abort_one(client: EngineClient, request_id: str, within_s: float) -> None:
    """Submit a request and leave it after its first output, or when that has not come in time."""
    stream = client.submit({"request_id": request_id, "first": ABORTED})
    with suppress(TimeoutError):
        await asyncio.wait_for(anext(stream), within_s)
    await stream.aclose()


class Survival:
    """The load, and how its requests ended."""

    def __init__(
        self, supervisor: EngineSupervisor, group: WorkerGroup, patience_s: float = PATIENCE_S, pause_s: float = 0.002
    ) -> None:
        self._supervisor, self._group = supervisor, group
        self._patience_s, self._pause_s = patience_s, pause_s
        self.counts: Counter[str] = Counter()
        self.oddities: list[str] = []
        self._killed: set[int] = set()
        self._hanging: set[int] = set()
        self._unnamed: dict[int, float] = {}  # when it was made to hang, by process id
        self.named_s: list[float] = []
        """How long after the hang the log had the line of an engine, or of a worker of the group."""
        logging.getLogger("aioshm.engine").addFilter(self._note_name)
        self.stopping = False

    async def ask(self, who: int) -> None:
        """Send requests one after the other, and check every answer."""
        number = 0
        while not self.stopping:
            number += 1
            self.counts["requests"] += 1
            tokens: list[int] = []
            try:
                async with asyncio.timeout(self._patience_s):
                    if number % USED_AGAIN == 0:
                        self.counts["used again"] += 1
                        await abort_one(self._supervisor.client, f"{who} {number}", number % 7 / 1e3)
                    stream = self._supervisor.client.submit({"request_id": f"{who} {number}"})
                    tokens.extend([output["token"] async for output in stream])
            except EngineDead as error:
                self._failed(error)
                await asyncio.sleep(0.01)  # there may be no engine for a moment
            except Exception as error:
                self._odd(error)
            else:
                self._done(tokens == list(range(TOKENS)), f"request {who} {number} has brought {tokens}")
            await asyncio.sleep(self._pause_s)

    async def call(self, who: int) -> None:
        """Call all workers of the group, one of them, and one that is idle, again and again."""
        number, ranks, patience_s = 0, range(len(self._group.workers)), self._patience_s
        while not self.stopping:
            number += 1
            self.counts["requests"] += 1
            expected: list[Any] = [[[number + rank] for rank in ranks]]
            try:
                if number % 3 == 0:
                    answers: Any = await self._group.collective_rpc("add", ([number],), timeout=patience_s)
                elif number % 3 == 1:
                    rank = who % len(ranks)
                    expected = [[number + rank]]
                    answers = await self._group.call(rank, "add", [number], timeout=patience_s)
                else:
                    expected = expected[0]
                    answers = await self._group.call_any("add", [number], timeout=patience_s)
            except WorkerDied as error:
                self._failed(error)
            except TimeoutError as error:
                if "and its replacement is" in str(error) and any(f"(pid {pid})" in str(error) for pid in self._killed):
                    self.counts["failed"] += 1  # all were never there at once: one after the other was killed
                    self.counts["starved"] += 1
                else:
                    self._odd(error)
            except Exception as error:
                self._odd(error)
            else:
                self._done(answers in expected, f"a call has brought {answers}")
            await asyncio.sleep(self._pause_s)

    async def everyone_answers(self) -> bool:
        """Return whether each engine and each worker answers, when nobody is killed any more."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                for rank in range(ENGINES):
                    request = {"request_id": f"last {rank}"}
                    stream = self._supervisor.client.submit(request, engine=rank)
                    if [output["token"] async for output in stream] != list(range(TOKENS)):
                        return False
                answers: list[list[int]] = await self._group.collective_rpc("add", ([0],))
                return answers == [[rank] for rank in range(WORKERS)]
        except Exception as error:
            self._odd(error)
            return False

    async def strike(self, seed: int) -> None:
        """Kill and stop processes at random."""
        chance, here = random.Random(seed), psutil.Process()
        while True:
            await asyncio.sleep(PERIOD_S)
            trees = [each for each in here.children(recursive=True) if "resource_tracker" not in " ".join(_line(each))]
            [way] = chance.choices([*WAYS], [*WAYS.values()])
            if way in HANGS:
                trees = [each for each in trees if handles_signal(each.pid, way)]
            for victim in chance.sample(trees, min(len(trees), 2 if chance.random() < 0.1 else 1)):
                self.counts[way.name] += 1
                with suppress(psutil.NoSuchProcess):
                    victim.send_signal(way)
                if way in HANGS:
                    self._hanging.add(victim.pid)
                    self._unnamed[victim.pid] = time.monotonic()
                elif way == signal.SIGKILL:
                    self._killed.add(victim.pid)
                else:
                    asyncio.get_running_loop().call_later(STOPPED_S, self._resume, victim)

    def _note_name(self, record: logging.LogRecord) -> bool:
        named = NAMED.search(record.getMessage())
        if named is not None and (since := self._unnamed.pop(int(named[1]), None)) is not None:
            self.named_s.append(time.monotonic() - since)
        return True

    def _resume(self, stopped: psutil.Process) -> None:
        with suppress(psutil.NoSuchProcess):
            alone = stopped.ppid() == os.getpid() and stopped.pid not in self._killed | self._hanging
            if alone and stopped.status() == "zombie":
                self._odd(RuntimeError(f"{stopped} has died while it was stopped"))
            stopped.resume()

    def _done(self, right: bool, what: str) -> None:
        self.counts["completed" if right else "wrong"] += 1
        if not right:
            self.oddities.append(what)

    def _failed(self, error: EngineDead | WorkerDied) -> None:
        named = error.pid is not None or "no engine is left" in str(error)
        if error.pid in self._hanging and "hung for" in str(error):
            self.counts["by hangs"] += 1
            named = HUNG_AT.search(str(error)) is not None
        self.counts["failed" if named else "nameless"] += 1
        if not named:
            self.oddities.append(repr(error))

    def _odd(self, error: Exception) -> None:
        self.counts["hung" if isinstance(error, TimeoutError) else "other errors"] += 1
        self.oddities.append(repr(error)[:300])


def _line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


async def run(settings: Settings, report: Report) -> None:
    """Kill processes for a while, and count how requests end."""
    minutes = settings.more.minutes
    seconds = settings.seconds if minutes is None else 60 * minutes
    if settings.quick:
        seconds = 3.0
    restart = replace(RESTART, hang_s=HANG_S)
    client = ClientOptions(options=OPTIONS)
    async with (
        EngineSupervisor(serve, ENGINES, restart=restart, resubmit="unstarted", client=client) as supervisor,
        WorkerGroup(Adder, WORKERS, args=(WEIGHTS,), restart=restart, standbys=STANDBYS, options=OPTIONS) as group,
    ):
        survival = Survival(supervisor, group)
        work = [asyncio.create_task(survival.ask(who)) for who in range(ASKING)]
        work += [asyncio.create_task(survival.call(who)) for who in range(CALLING)]
        await asyncio.sleep(1.0)
        before = await _settled(supervisor, group)
        striking = asyncio.create_task(survival.strike(settings.more.seed))
        began = time.monotonic()
        while (left := began + seconds - time.monotonic()) > 0:
            await asyncio.sleep(min(left, 10.0))
            progress(f"{time.monotonic() - began:.0f} of {seconds:.0f} s: {dict(survival.counts)}")
        striking.cancel()
        # An engine notices the death of its worker with its next step, so it has work.
        await asyncio.sleep(STOPPED_S + 2 * HANG_S)
        survival.stopping = True
        await asyncio.gather(*work)
        after = await _settled(supervisor, group)
        well = await survival.everyone_answers()
    counts, result = survival.counts, report.result("survival", "aioshm", ENGINES + WORKERS)
    for name in ("requests", "used again", "completed", "failed", "by hangs", *(way.name for way in WAYS)):
        result.add(**{name: counts[name]})
    result.add(hangs_named=len(survival.named_s))
    for oddity in survival.oddities[:10]:
        progress(f"odd: {oddity}")
    unanswered = counts["requests"] - counts["completed"] - counts["failed"]
    report.hold("requests that neither completed nor failed with a process, and its line if it hung", unanswered, "", 0)
    if survival.named_s:
        named_s = percentile(survival.named_s, 99)
        report.hold("a hang is named with its line: p99", named_s, "s", OPTIONS.stall_warning_s + 1)
    report.hold("engines and workers that do not all answer when it is over", float(not well), "", 0)
    for name in ("hung", "wrong", "nameless", "other errors"):
        report.hold(name, counts[name], "", 0)
    for name, bound, unit in (("processes", 0, ""), ("descriptors", 0, ""), ("memory_mib", MEMORY_MIB, "MiB")):
        report.hold(f"more {name} than before", after[name] - before[name], unit, bound)


def _whole(supervisor: EngineSupervisor, group: WorkerGroup) -> bool:
    states = {*(worker.state for worker in group.workers), *(engine.state for engine in supervisor.engines)}
    return group.standbys == STANDBYS and states == {"running"}


async def _settled(supervisor: EngineSupervisor, group: WorkerGroup) -> dict[str, float]:
    """Wait until all that dies is replaced, and return what there is."""
    await supervisor.wait_until_ready(PATIENCE_S)
    async with asyncio.timeout(PATIENCE_S):
        while not _whole(supervisor, group):  # noqa: ASYNC110 -- this need not be quick
            await asyncio.sleep(0.05)
    gc.collect()
    await asyncio.sleep(1.0)  # what was closed in a thread is closed
    here = psutil.Process()
    return {
        "processes": len(here.children(recursive=True)),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "memory_mib": here.memory_info().rss / 2**20,
    }


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--minutes", type=float, help="how long processes are killed, instead of --seconds")
    parser.add_argument("--seed", type=int, default=1, help="of the choice of victims")


if __name__ == "__main__":
    sys.exit(main("survival", __doc__, run, repeat=1, seconds=30.0, more=options))
