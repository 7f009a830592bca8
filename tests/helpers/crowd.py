"""A process for each reader of a queue."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from aioshm import Handle


class Crowd:
    """Spawned processes that read a queue, one for each rank.

    Args:
        read: Runs in each of them: reads, and sends what came of it through the connection.
        handle: The queue's.
        n_reader: How many they are.
    """

    def __init__(self, read: Callable[[Handle, int, Connection], None], handle: Handle, n_reader: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._results: list[Connection] = []
        self._processes: list[multiprocessing.process.BaseProcess] = []
        for rank in range(n_reader):
            mine, theirs = context.Pipe(duplex=False)
            process = context.Process(target=read, args=(handle, rank, theirs))
            process.start()
            theirs.close()
            self._results.append(mine)
            self._processes.append(process)

    def results(self) -> list[Any]:
        """Return what each of them sends, once all have ended as they should; blocks."""
        received = []
        for process, result in zip(self._processes, self._results, strict=True):
            process.join(60)
            assert process.exitcode == 0
            received.append(result.recv())
            result.close()
            process.close()
        return received
