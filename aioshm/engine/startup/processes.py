"""The engine processes of a front end's host, under vLLM's name."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Self

from aioshm.arguments import check_int, check_plain
from aioshm.engine.security.keys import EngineKeys, as_attributes, keys_to_hand_over
from aioshm.process.child import Child
from aioshm.process.manager import Job, ProcessManager
from aioshm.process.stopping import SHUTDOWN_TIMEOUT_S


class CoreEngineProcManager(ProcessManager):
    """The engine processes of this machine, named ``EngineCore_0`` and so on by their global index.

    Each runs ``target_fn(*args, **kwargs, dp_rank=global index, local_dp_rank=local index)``. The constructor starts
    the processes, and `wait_for_engine_startup` reports their progress. It blocks for some milliseconds for each
    process, longer to pickle arguments of more than a few MiB, and never waits for a process; it may run in a thread.
    `start` lets the loop run in between.

    Args:
        target_fn: The target of each process.
        local_engine_count: The number of engines of this machine; 0 if all engines are on other hosts.
        start_index: The first global index.
        local_start_index: The first index on this machine.
        args: Positional arguments of the target.
        shutdown_timeout: See `ProcessManager`.
        capture_stderr: See `ProcessManager`.
        keys: Each process starts with the keys of its engine, for `run_engine_core`; None: from the keys of this
            process.
        kwargs: Every other keyword argument of the target.

    Attributes:
        max_engines: None: `start_engine` starts any number of engines.
    """

    max_engines: int | None = None

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
        check_plain("target_fn", target_fn)
        check_int("local_engine_count", local_engine_count, minimum=0)
        check_int("start_index", start_index, minimum=0)
        check_int("local_start_index", local_start_index, minimum=0)
        self._args = args
        self._kwargs = kwargs
        self._keys = keys
        self._offset = local_start_index - start_index
        self._started: dict[int, int] = {}  # starts so far, by rank
        jobs = [self._job(start_index + number) for number in range(local_engine_count)]
        super().__init__(target_fn, jobs, shutdown_timeout=shutdown_timeout, capture_stderr=capture_stderr)
        self._started = dict.fromkeys(range(start_index, start_index + local_engine_count), 1)

    @classmethod
    async def start(
        cls, target_fn: Callable[..., object], local_engine_count: int, start_index: int = 0, **options: Any
    ) -> Self:
        """Create a manager, and let the loop run after the start of each engine. Cancelling this leaves nothing.

        Args:
            target_fn: The target of each process.
            local_engine_count: The number of engines of this machine.
            start_index: The first global index.
            options: The other arguments of the class.
        """
        check_int("local_engine_count", local_engine_count, minimum=0)
        manager = cls(target_fn, 0, start_index, **options)
        try:
            for rank in range(start_index, start_index + local_engine_count):
                # Not in a thread: the kernel ends only the children of this process' main thread with it, see
                # `die_with_parent`.
                manager.start_engine(rank)
                await asyncio.sleep(0)
        except BaseException:
            manager._shutdown_timeout = 0
            await manager.aclose()
            raise
        return manager

    def start_engine(self, rank: int) -> Child:
        """Start one more engine, or restart one that has exited, and return its process; see `start_more`.

        Each process of an engine gets keys of its own, see `EngineKeys`.

        Raises:
            RoleError: The manager is closed, or that engine still runs.
            Exception: The process could not be started.
        """
        job = self._job(rank)
        if any(process.name == job.name for process in self.processes):
            child = self.start_again(job.name, job)
        else:
            child = self.start_more(job)
        self._started[rank] = self.next_incarnation(rank) + 1
        return child

    def next_incarnation(self, rank: int) -> int:
        """Return the incarnation of the next process of this rank."""
        return self._started.get(rank, 0)

    def is_local(self, rank: int) -> bool:
        """Return whether an engine runs on this host: always."""
        return True

    async def stop_engine(self, rank: int) -> None:
        """Stop an engine, see `stop`.

        Raises:
            ValueError: There is no such engine.
        """
        await self.stop(engine_name(rank))

    def _job(self, rank: int) -> Job:
        return Job(
            engine_name(rank),
            self._args,
            self._kwargs | {"dp_rank": rank, "local_dp_rank": rank + self._offset},
            as_attributes(keys_to_hand_over(self._keys, rank, self.next_incarnation(rank))),
        )


def engine_name(rank: int) -> str:
    """Return the process name of an engine."""
    return f"EngineCore_{rank}"
