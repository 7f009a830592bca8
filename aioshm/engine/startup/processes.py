"""The engine processes of a front end's host, under vLLM's name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from aioshm.arguments import check_int
from aioshm.engine.security.keys import EngineKeys, as_attributes, keys_to_hand_over
from aioshm.process.manager import Job, ProcessManager
from aioshm.process.stopping import SHUTDOWN_TIMEOUT_S


class CoreEngineProcManager(ProcessManager):
    """The engine processes of this machine, named ``EngineCore_0`` and so on by their global index.

    Each runs ``target_fn(*args, **kwargs, dp_rank=global index, local_dp_rank=local index)``. When the constructor
    returns they have been started, not more: `wait_for_engine_startup` says how they fare. It blocks for some
    milliseconds for each; it may be called in a thread, too.

    Args:
        target_fn: What each process runs.
        local_engine_count: How many engines this machine has; none where all of them are on other hosts.
        start_index: The first one's global index.
        local_start_index: The first one's index on this machine.
        args: For the target.
        shutdown_timeout: See `ProcessManager`.
        capture_stderr: See `ProcessManager`.
        keys: Each process starts with those of its engine, for `run_engine_core`; None: from those of this process.
        kwargs: For the target; every other argument by name.
    """

    def __init__(
        self,
        target_fn: Callable[..., object],
        local_engine_count: int,
        start_index: int = 0,
        local_start_index: int = 0,
        *,
        args: Sequence[Any] = (),
        shutdown_timeout: float = SHUTDOWN_TIMEOUT_S,
        capture_stderr: bool = True,
        keys: EngineKeys | None = None,
        **kwargs: Any,
    ) -> None:
        check_int("local_engine_count", local_engine_count, minimum=0)
        check_int("start_index", start_index, minimum=0)
        check_int("local_start_index", local_start_index, minimum=0)
        jobs = [
            Job(
                f"EngineCore_{start_index + number}",
                args,
                kwargs | {"dp_rank": start_index + number, "local_dp_rank": local_start_index + number},
                as_attributes(keys_to_hand_over(keys, start_index + number)),
            )
            for number in range(local_engine_count)
        ]
        super().__init__(target_fn, jobs, shutdown_timeout=shutdown_timeout, capture_stderr=capture_stderr)
