"""A step of vLLM between its executor and its workers: its own message queue against this one.

Both contestants are vLLM's own ``MultiprocExecutor`` with two worker processes that compute nothing: a step is what its
scheduler sends for 32 requests, and each worker's answer has a token for each. ``make vllm`` builds the environment.
"""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from typing import Any

from benchmarks.framework.crew import BenchmarkError, Crew, Hand
from benchmarks.framework.harness import Settings, main, progress
from benchmarks.framework.report import Report, latencies
from benchmarks.vllm_engine import N_REQUESTS, WORKERS, engine

CADENCES = {"back to back": 0.0, "every 20 ms": 0.020}
CONTESTANTS = {"aioshm": True, "vLLM": False}
MODULES = {"aioshm": "aioshm.engine.compat.vllm", "vLLM": "vllm.distributed.device_communicators.shm_broadcast"}
QUIET_S = 1.5
"""vLLM's readers spin for a second after their last message: only then has the other contestant the CPUs."""

STEP_S = 0.0004  # about, for the number of steps
WARM_UP = 30


async def run(settings: Settings, report: Report) -> None:
    """Measure the two in turns."""
    if importlib.util.find_spec("vllm") is None or importlib.util.find_spec("transformers") is None:
        raise BenchmarkError("vLLM's executor is not installed here: `make vllm` runs this in .venv-vllm")
    report.remarks.append(f"{WORKERS} workers, {N_REQUESTS} requests; 'CPU' is that of the busiest worker.")
    with Crew(settings.loop_factory) as crew:
        hands = {}
        for name, replaced in CONTESTANTS.items():
            progress(f"starting {name}")
            hands[name] = crew.start(name, engine, replaced, has_children=True)
            module = await hands[name].reply()
            if module != MODULES[name]:
                raise BenchmarkError(f"{name}: its queue is from {module}")
        for hand in hands.values():
            await _steps(hand, WARM_UP, 0.0)
        for number in range(settings.repeat):
            for case, period_s in CADENCES.items():
                count = max(WARM_UP, int(settings.seconds / max(period_s, STEP_S)))
                # Whoever is second finds the machine as the first has left it: they swap places.
                for name in list(hands)[:: 1 if number % 2 else -1]:
                    progress(f"{case}, {number + 1} of {settings.repeat}, {name}")
                    await asyncio.sleep(0 if settings.quick else QUIET_S)
                    times, cpu = await _steps(hands[name], count, period_s)
                    report.result(case, name, WORKERS).add(**latencies(times), worker_cpu_percent=max(cpu))
        await crew.dismiss(list(hands.values()))
    for case in CADENCES:
        ratios = report.ratios(case, "aioshm", "vLLM", "p50_us", n_reader=WORKERS)
        report.hold(f"a step {case}: p50 against vLLM's queue", ratios, "x", 1)


async def _steps(hand: Hand, count: int, period_s: float) -> tuple[list[float], list[float]]:
    hand.order((count, period_s))
    answer: Any = await hand.reply()
    return answer  # type: ignore[no-any-return]


if __name__ == "__main__":
    sys.exit(main("vllm_executor", __doc__, run, repeat=4, seconds=2.0))
