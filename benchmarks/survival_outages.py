"""The parts of `benchmarks.survival` about one process at a time: an engine is killed, a front end is stopped.

How soon the engine is back, and what the others do meanwhile; how much an engine keeps for a front end that is stopped.

The engines take a fixed time for each step, as those do that wait for a device: so the processors have time for the
start of an engine, and what is measured is what its death and its return do to the others, not what its imports do.
Each request is for one engine: what the dead one cannot do nobody else does for it. How soon an engine is back is told
beside what its start takes alone on the machine, and beside what the start of one more takes under the same load.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from itertools import count
from statistics import median
from typing import Any

import psutil

from aioshm.engine import (
    APIServerProcessManager,
    EngineClient,
    EngineSupervisor,
    EngineZmqAddresses,
    Restart,
    die_with_parent,
    launch_core_engines,
    run_engine_core,
)
from aioshm.engine.core.sockets import MAX_PENDING_BYTES
from aioshm.errors import EngineDead
from benchmarks.framework.report import Report, Result, percentile

ENGINES, ASKING_EACH, TOKENS = 4, 4, 4
STEP_S = 0.01
STARTS = 5
BEFORE_S = 1.0  # how long throughput is measured before each kill
PATIENCE_S = 60.0
BACK_MS, SHARE = 100.0, 0.9
STREAMS, OUTPUT_BYTES = 20, 1 << 16
KEPT_MIB = MAX_PENDING_BYTES / 2**20 + 24  # and the messages that ZeroMQ and the kernel have


class Requests:
    """The requests of an engine.

    Attributes:
        given: How many tokens each has been given.
    """

    def __init__(self) -> None:
        self.given: dict[str, int] = {}

    def add_request(self, request: dict[str, Any]) -> None:
        """Begin."""
        self.given[request["request_id"]] = 0

    def abort_requests(self, ids: list[str]) -> None:
        """Drop them."""
        for request_id in ids:
            self.given.pop(request_id, None)


class Device(Requests):
    """Takes a fixed time for each step, in which each request gets a token."""

    def initialize(self, _metadata: object) -> dict[str, Any]:
        """Be ready at once."""
        return {}

    async def step(self) -> list[dict[str, Any]]:
        """Give each request its next token."""
        await asyncio.sleep(STEP_S)
        outputs = []
        for request_id in list(self.given):
            self.given[request_id] += 1
            output: dict[str, Any] = {"request_id": request_id}
            if self.given[request_id] == TOKENS:
                output["finish_reason"] = "length"
                del self.given[request_id]
            outputs.append(output)
        return outputs


def serve(handshake_address: str, dp_rank: int, local_dp_rank: int) -> None:
    """Run an engine; the target of a process."""
    die_with_parent()
    asyncio.run(run_engine_core(Device(), handshake_address, dp_rank))


class _Load:
    """Clients that ask one engine each, again and again."""

    def __init__(self, supervisor: EngineSupervisor) -> None:
        self._client = supervisor.client
        self.completed = [0] * ENGINES
        self.waiting = asyncio.Event()  # set while no engine is dead
        self.waiting.set()
        self.stopping = False

    async def ask(self, rank: int, who: int) -> None:
        number = 0
        while not self.stopping:
            number += 1
            try:
                async with asyncio.timeout(PATIENCE_S):
                    async for _ in self._client.submit({"request_id": f"{rank} {who} {number}"}, engine=rank):
                        pass
                self.completed[rank] += 1
            except EngineDead:
                await self.waiting.wait()

    def others(self, rank: int) -> int:
        return sum(self.completed) - self.completed[rank]


async def own_start_ms() -> float:
    """Return what an engine takes from the start of its process until it is ready, while nothing else runs."""
    ready: list[float] = []
    began = time.monotonic()
    async with launch_core_engines(
        serve,
        1,
        coordinator=False,
        on_progress=lambda each: ready.append(time.monotonic()) if each.moved == 0 else None,
    ):
        return (ready[-1] - began) * 1e3 if ready else (time.monotonic() - began) * 1e3


async def _start_beside_ms(supervisor: EngineSupervisor) -> float:
    """Return what an engine that nobody had before takes until it is ready, while the others have their load."""
    began = time.monotonic()
    await supervisor.scale(ENGINES + 1)
    took = time.monotonic() - began
    await supervisor.scale(ENGINES)
    return took * 1e3


async def outages(result: Result, report: Report, rounds: int) -> None:
    """Kill one engine after the other, and measure.

    Args:
        result: Gets the figures.
        report: Gets the promises.
        rounds: How many are killed.
    """
    starts = [await own_start_ms() for _ in range(STARTS)]
    back_ms: list[float] = []
    shares: list[float] = []
    policy = Restart(max_restarts=1_000_000, backoff_s=0.001, backoff_max_s=0.001)  # as if each death were the first
    async with EngineSupervisor(serve, ENGINES, restart=policy) as supervisor:
        load, client = _Load(supervisor), supervisor.client
        work = [asyncio.create_task(load.ask(rank, who)) for rank in range(ENGINES) for who in range(ASKING_EACH)]
        await asyncio.sleep(BEFORE_S)
        for number in range(rounds):
            rank = number % ENGINES
            counted, began = load.others(rank), time.monotonic()
            await asyncio.sleep(BEFORE_S)
            killed = time.monotonic()
            rate = (load.others(rank) - counted) / (killed - began)
            counted = load.others(rank)
            load.waiting.clear()
            os.kill(supervisor.engines[rank].pid or 0, signal.SIGKILL)
            async with asyncio.timeout(PATIENCE_S):
                while rank not in client.deaths:  # noqa: ASYNC110 -- not its end alone: that it is known
                    await asyncio.sleep(0.001)
                await client.wait_until_ready()
            back = time.monotonic()
            load.waiting.set()
            back_ms.append((back - killed) * 1e3)
            shares.append((load.others(rank) - counted) / (back - killed) / rate)
        beside = [await _start_beside_ms(supervisor) for _ in range(STARTS)]
        load.stopping = True
        await asyncio.gather(*work)
    own = median(starts)
    result.add(own_start_ms=own, start_beside_ms=median(beside))
    result.add(back_p50_ms=median(back_ms), back_p90_ms=percentile(back_ms, 90), share=median(shares))
    for which, found in (("median", median(back_ms)), ("p90", percentile(back_ms, 90))):
        text = (
            f"an engine that is killed is back, {which} of {rounds}, later than after its own start of {own:.0f} ms by"
        )
        report.hold(text, found - own, "ms", BACK_MS)
    text = f"throughput of the other {ENGINES - 1} engines in {rounds} outages, median, of what it was before"
    report.hold(text, median(shares), "x", SHARE, at_least=True)


class Endless(Requests):
    """Gives each request a large output in each step."""

    def initialize(self, _metadata: object) -> dict[str, Any]:
        """Be ready at once."""
        return {}

    async def step(self) -> list[dict[str, Any]]:
        """Give each request its next output."""
        await asyncio.sleep(STEP_S)
        return [{"request_id": request_id, "text": "x" * OUTPUT_BYTES} for request_id in self.given]


def serve_endlessly(handshake_address: str, dp_rank: int, local_dp_rank: int) -> None:
    """Run an engine; the target of a process."""
    die_with_parent()
    asyncio.run(run_engine_core(Endless(), handshake_address, dp_rank))


def read_on(_listen_address: str, _sock: object, _args: object, config: dict[str, Any]) -> None:
    """Run a front end that reads its streams, and begins again when they are lost; the target of a process."""
    die_with_parent()

    async def read(client: EngineClient, who: int) -> None:
        for number in count():
            await client.wait_until_ready(PATIENCE_S)
            try:
                async for _ in client.submit({"request_id": f"{who} {number}"}):
                    pass
            except EngineDead:
                await asyncio.sleep(STEP_S)

    async def work() -> None:
        addresses = EngineZmqAddresses([config["input_address"]], [config["output_address"]])
        where = config["membership_address"]
        async with EngineClient(addresses, 1, on_engine_death="continue", membership_address=where) as client:
            await asyncio.gather(*(read(client, who) for who in range(STREAMS)))

    asyncio.run(work())


async def stopped_front_end(result: Result, report: Report) -> None:
    """Stop a front end while its engine streams to it, and let it go on when the engine has dropped it."""
    async with EngineSupervisor(serve_endlessly, 1, num_api_servers=1) as supervisor:
        launch = supervisor.launch
        async with APIServerProcessManager(
            read_on, "", None, None, 1, launch.addresses.inputs, launch.addresses.outputs,
            membership_address=launch.membership_address,
        ) as servers:  # fmt: skip
            engine, front_end = (psutil.Process(each.pid) for each in (launch.processes[0], servers.processes[0]))

            async def streaming() -> None:
                """Wait until the front end takes time to read."""
                before = front_end.cpu_times().user
                while front_end.cpu_times().user < before + 0.5:  # noqa: ASYNC110 -- of another process
                    await asyncio.sleep(STEP_S)

            dropped, back, kept = False, False, 0.0
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await streaming()
                    before = engine.memory_info().rss
                    front_end.suspend()
                    stopped = time.monotonic()
                    while not dropped:
                        await asyncio.sleep(STEP_S)
                        kept = max(kept, (engine.memory_info().rss - before) / 2**20)
                        said = launch.engine_manager.last_lines(launch.processes[0].name, 5)
                        dropped = any("dropped front end 0" in line for line in said)
                    result.add(dropped_after_s=time.monotonic() - stopped, kept_mib=kept)
                    front_end.resume()
                    await streaming()
                    back = True
            except TimeoutError:
                front_end.resume()
    report.hold("an engine whose front end is stopped has kept for it", kept, "MiB", KEPT_MIB)
    report.hold("stopped front ends that their engine has not dropped by name", float(not dropped), "", 0)
    report.hold("front ends that are not served again when they go on", float(not back), "", 0)
