"""What the workers of a group answer, and to which call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from aioshm.config import Options
from aioshm.errors import LimitReached, OutOfDescriptors, RemoteFailure, SharedMemoryError
from aioshm.queue import Merged, MessageQueue, merge


class WorkerLost(Exception):
    """A worker's queue is closed or broken: the worker has exited, or will soon.

    Attributes:
        rank: Its rank.
    """

    def __init__(self, rank: int) -> None:
        super().__init__(f"the queue of worker {rank} has ended")
        self.rank = rank


class WorkerAnswers:
    """The queues of all workers. Each answers every call exactly once, in order, so its answers need no numbers.

    Args:
        options: Of this end of the queues.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._readers: dict[int, MessageQueue] = {}
        self._merged: Merged | None = None
        self._answered: dict[int, int] = {}
        self._former: list[MessageQueue] = []

    def attach(self, rank: int, handle: str, call: int = 0) -> None:
        """Read this worker's queue, too; also that of the successor of one that has died.

        Args:
            rank: The worker's rank.
            handle: Of its queue.
            call: The number of the first call that it answers.
        """
        self.detach(rank)
        reader = self._readers[rank] = MessageQueue.create_from_handle(handle, 0, options=self._options)
        self._answered[rank] = call
        if self._merged is not None:
            self._merged.add(rank, reader)

    def detach(self, rank: int) -> None:
        """Read the queue of this worker no more, if it was read."""
        former = self._readers.pop(rank, None)
        if former is None:
            return
        self._answered.pop(rank, None)
        self._former.append(former)
        if self._merged is not None:
            self._merged.remove(rank)

    def owing(self, calls: int) -> set[int]:
        """Return the ranks of workers that have not answered all of so many calls."""
        return {rank for rank, number in self._answered.items() if number < calls}

    async def catch_up(self, calls: int, on_answer: Callable[[], None]) -> None:
        """Drop answers to calls for which nobody waits any more, one by one, until there are none to come.

        Args:
            calls: How many calls were sent.
            on_answer: Called after each.

        Raises:
            WorkerLost: A queue is closed or broken.
        """
        if self._merged is None or not self.owing(calls):
            return
        self._merged.needed = frozenset()  # each of them counts by itself
        async for rank, answer in self._merged:
            if rank in self._merged.failed:
                raise WorkerLost(rank)
            if not isinstance(answer, (SharedMemoryError, OutOfDescriptors)):  # else it stays where it is
                self._answered[rank] += 1
                on_answer()
            if not self.owing(calls):
                return

    async def close_former(self) -> None:
        """Close the queues that are not read any more. Idempotent."""
        while self._former:
            await self._former.pop().aclose()

    async def collect(self, call: int, missing: set[int]) -> tuple[list[Any], dict[int, RemoteFailure]]:
        """Wait for all answers to a call.

        Answers to earlier calls, for which nobody waits any more, are dropped. Cancelling this loses no others.

        Args:
            call: Its number; one more than that of the call before it.
            missing: Loses the ranks that have answered.

        Returns:
            The results, by rank, and what went wrong.

        Raises:
            WorkerLost: A queue is closed or broken.
            LimitReached: A queue cannot be attached to, for want of descriptors here.
        """
        if self._merged is None:
            self._merged = merge(self._readers, errors="yield")
        answered = self._answered
        # Where all answers to come are to this call, one wakes it: with earlier ones a worker's ring might fill up.
        self._merged.needed = missing if all(answered[rank] == call for rank in missing) else frozenset()
        try:
            return await self._collect(self._merged, call, missing)
        except asyncio.CancelledError:  # asleep for one of them, it has not looked at the others
            if self._merged.needed:
                missing -= {rank for rank in missing if self._readers[rank].stats().backlog}
            raise

    async def _collect(
        self, merged: Merged, call: int, missing: set[int]
    ) -> tuple[list[Any], dict[int, RemoteFailure]]:
        answered, failed = self._answered, merged.failed
        results: list[Any] = [None] * (max(answered) + 1)
        errors: dict[int, RemoteFailure] = {}
        async for rank, answer in merged:
            if rank in failed:
                error = failed[rank]
                raise error if isinstance(error, LimitReached) else WorkerLost(rank)
            number = answered[rank]
            if isinstance(
                answer, (SharedMemoryError, OutOfDescriptors)
            ):  # it stays where it is: it is late when there is room for it
                number = call
            else:
                answered[rank] = number + 1
            if number != call:
                continue
            missing.discard(rank)
            if not isinstance(answer, tuple):
                errors[rank] = RemoteFailure(f"{type(answer).__module__}.{type(answer).__qualname__}", str(answer))
            elif answer[0]:
                results[rank] = answer[1]
            else:
                errors[rank] = answer[1]
            if not missing:
                return results, errors
        raise WorkerLost(min(missing))

    async def aclose(self) -> None:
        """Close the queues. Idempotent."""
        if self._merged is not None:
            await self._merged.aclose()
        for reader in self._readers.values():
            await reader.aclose()
        await self.close_former()
