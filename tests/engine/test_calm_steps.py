"""Engines and workers that are slow, but below the limit, are never reported as stalled.

``CALM_S=600 python -m pytest tests/engine/test_calm_steps.py`` does that for 10 minutes on each loop.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Awaitable, Callable
from itertools import count
from logging import INFO
from typing import Any

import pytest
import uvloop
from served_engine import Engine

from aioshm import Options, progress
from aioshm.engine import (
    ClientOptions,
    EngineLayout,
    EngineSupervisor,
    RankInfo,
    Restart,
    WorkerGroup,
    die_with_parent,
    run_engine_core,
)

CALM_S = float(os.environ.get("CALM_S", "10"))
LIMIT_S = 2.0
LONGEST_S = 0.8 * LIMIT_S
EXPECTED_S = 3 * LIMIT_S
KINDS = {"burn": 40, "sleep": 30, "wait": 30, "expected": 4}  # and how often
ENGINES, WORKERS = 3, 4
"""More than there are CPUs, and all of them have work all the time."""


async def take(kind: str, seconds: float) -> float:
    """Take a step; return how long it took."""
    began = time.monotonic()
    if kind == "expected":
        with progress.expect(4 * LIMIT_S):
            time.sleep(EXPECTED_S)
            return 0.0
    if kind == "wait":
        await asyncio.sleep(seconds)
    elif kind == "sleep":
        time.sleep(seconds)
    while time.monotonic() < began + seconds:
        pass
    return time.monotonic() - began


class Paced(Engine):
    """An engine that takes one step for each request, or a worker."""

    async def step(self) -> list[dict[str, Any]]:  # type: ignore[override]
        if not self.requests:
            return []
        request_id, request = self.requests.popitem()
        return [{"request_id": request_id, "took": await take(*request["step"]), "finish_reason": "stop"}]

    async def take(self, kind: str, seconds: float) -> float:
        return await take(kind, seconds)


def serve(handshake_address: str, dp_rank: int, local_dp_rank: int, uv: bool) -> None:
    """Run an engine; the target of a process."""
    die_with_parent()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop if uv else None) as runner:
        runner.run(run_engine_core(Paced(), handshake_address, dp_rank))


@pytest.mark.slow
@pytest.mark.timeout(CALM_S + 100)
async def test_random_steps_below_the_limit_are_no_stall(caplog: pytest.LogCaptureFixture) -> None:
    uv = isinstance(asyncio.get_running_loop(), uvloop.Loop)
    options = Options(stall_warning_s=LIMIT_S)
    restart = Restart(hang_s=LIMIT_S)
    changes: list[tuple[str, RankInfo]] = []
    took: list[tuple[float, str, int]] = []
    end = 0.0

    async def work(name: str, rank: int, act: Callable[..., Awaitable[float]]) -> None:
        chance = random.Random(f"{name} {rank}")
        for number in count():
            if time.monotonic() > end:
                break
            [kind] = chance.choices([*KINDS], KINDS.values())
            took.append((await act(rank, number, kind, chance.uniform(0, LONGEST_S)), name, rank))
            await asyncio.sleep(chance.choice([0, 0.1]))

    async def ask(rank: int, number: int, *step: Any) -> float:
        stream = supervisor.client.submit({"request_id": f"{rank} {number}", "step": step}, engine=rank)
        [output] = [output async for output in stream]
        return float(output["took"])

    async def call(rank: int, _number: int, *step: Any) -> float:
        return float(await group.call(rank, "take", *step))

    async def watch(group: WorkerGroup) -> None:
        async for change in group.membership():
            changes.append(("worker", change))

    async with (
        EngineSupervisor(
            serve,
            ENGINES,
            kwargs={"uv": uv},
            restart=restart,
            on_change=lambda change: changes.append(("engine", change)),
            client=ClientOptions(options=options),
            layout=EngineLayout(coordinator=False),
        ) as supervisor,
        WorkerGroup(
            Paced, WORKERS, restart=restart, options=options, loop_factory=uvloop.new_event_loop if uv else None
        ) as group,
    ):
        watching = asyncio.create_task(watch(group))
        end = time.monotonic() + CALM_S
        asking = [work("engine", rank, ask) for rank in range(ENGINES)]
        await asyncio.gather(*asking, *(work("worker", rank, call) for rank in range(WORKERS)))
        watching.cancel()
    print(f"{len(took)} steps, the longest {max(took)[0]:.2f} s")
    late = {step[1:] for step in took if step[0] >= LIMIT_S}  # where a busy machine has made a step longer
    assert [change for change in changes if (change[0], change[1].rank) not in late] == []
    if not late:
        assert not [text for name, level, text in caplog.record_tuples if name == "aioshm.engine" and level > INFO]
