"""One contestant of `benchmarks.vllm_executor`: vLLM's ``MultiprocExecutor``, with workers that compute nothing.

Runs in the environment that ``make vllm`` builds.
"""

from __future__ import annotations

import os
import time
from typing import Any

N_REQUESTS = 32
WORKERS = 2


class Worker:
    """The worker of vLLM's processes, without a model; vLLM makes it by the name of its class."""

    def __init__(self, rank: int, **_kwargs: Any) -> None:
        self.rank = rank

    def init_device(self) -> None:
        """Open no device."""

    def load_model(self, **_kwargs: Any) -> None:
        """Load no model."""

    def shutdown(self) -> None:
        """Close nothing."""

    def execute_model(self, step: Any) -> Any:
        """Return one token for each request, as a worker of vLLM does."""
        from vllm.v1.outputs import ModelRunnerOutput

        ids = list(step.num_scheduled_tokens)
        return ModelRunnerOutput(ids, {name: n for n, name in enumerate(ids)}, [[self.rank]] * len(ids))

    def cpu_seconds(self) -> float:
        """Return how much CPU time this process has used."""
        return time.process_time()


class NoModel:
    """Stands in for the model of vLLM's configuration."""

    supports_multimodal_inputs = False

    def __bool__(self) -> bool:
        return False


def engine(boss: Any, replaced: bool) -> None:
    """Make an executor, run as many steps as each order says, and answer with their times and the workers' CPU."""
    os.environ["AIOSHM_VLLM"] = "1" if replaced else "0"
    executor = make_executor()
    number = 0
    try:
        boss.reply(type(executor.rpc_broadcast_mq).__module__)
        while (order := boss.plain_order()) is not None:
            count, period_s = order
            times = []
            cpu, began = executor.collective_rpc("cpu_seconds"), time.monotonic()
            due = time.monotonic()
            for _ in range(count):
                number += 1
                step = scheduled(number)
                started = time.perf_counter()
                outputs = executor.collective_rpc("execute_model", args=(step,))
                times.append((time.perf_counter() - started) * 1e6)
                check(outputs)
                due += period_s
                if due > time.monotonic():
                    time.sleep(due - time.monotonic())
            wall = time.monotonic() - began
            spent = [after - before for before, after in zip(cpu, executor.collective_rpc("cpu_seconds"), strict=True)]
            boss.reply((times, [100 * seconds / wall for seconds in spent]))
    finally:
        executor.shutdown()


def make_executor(workers: int = WORKERS) -> Any:
    """Start vLLM's executor with `Worker` for a worker, as its engine core does."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    from vllm.config import ParallelConfig, VllmConfig
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    config = VllmConfig(parallel_config=ParallelConfig(tensor_parallel_size=workers, distributed_executor_backend="mp"))
    config.parallel_config.worker_cls = "benchmarks.vllm_engine.Worker"
    config.model_config = NoModel()
    return MultiprocExecutor(config)


def scheduled(number: int) -> Any:
    """Return what vLLM's scheduler sends for a decode step of `N_REQUESTS` requests."""
    from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput

    ids = [f"cmpl-{n:032x}-0" for n in range(N_REQUESTS)]
    cached = CachedRequestData(ids, set(), [], {}, [None] * N_REQUESTS, [number] * N_REQUESTS, [number] * N_REQUESTS)
    return SchedulerOutput(
        scheduled_new_reqs=[],
        scheduled_cached_reqs=cached,
        num_scheduled_tokens=dict.fromkeys(ids, 1),
        total_num_scheduled_tokens=N_REQUESTS,
        scheduled_spec_decode_tokens={},
        scheduled_encoder_inputs={},
        finished_req_ids=set(),
        free_encoder_mm_hashes=[],
    )


def check(outputs: list[Any]) -> None:
    """Raise unless every worker has answered for every request."""
    ranks = [output.sampled_token_ids[0][0] for output in outputs]
    if ranks != list(range(len(outputs))) or any(len(output.req_ids) != N_REQUESTS for output in outputs):
        raise RuntimeError(f"wrong answers, of ranks {ranks}")
