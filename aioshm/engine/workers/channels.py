"""The queues of the workers that are called alone: made when a worker is first called, closed when it has gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine
from typing import Any

from aioshm.config import Options
from aioshm.engine.workers.channel import Channel
from aioshm.engine.workers.crew import WorkerCrew
from aioshm.errors import AioshmError, PeerDied, QueueClosed


class Channels:
    """Makes a channel to each worker that is there and was ever wanted, and to its successor as soon as there is one.

    Args:
        crew: The processes.
        sizes: The bytes of a chunk, and the chunks, of each queue.
        options: Of each queue.
        steps: Returns how many steps were sent to all workers.
        on_open: Called with each new channel.
        on_failure: Called with the rank of a worker whose queues cannot be made, and why; the next call tries again.

    Attributes:
        open: The channels, by rank.
        opening: The tasks that make channels, by rank.
    """

    def __init__(
        self,
        crew: WorkerCrew,
        sizes: tuple[int, int],
        options: Options,
        *,
        steps: Callable[[], int],
        on_open: Callable[[Channel], None],
        on_failure: Callable[[int, AioshmError], None],
    ) -> None:
        self._crew, self._sizes, self._options, self._steps = crew, sizes, options, steps
        self._on_open, self._on_failure = on_open, on_failure
        self._bases: dict[int, int] = {}  # how many steps were sent before each worker that is there
        self._wanted: set[int | None] = set()  # the ranks that were ever called; None: any
        self.open: dict[int, Channel] = {}
        self.opening: dict[int, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def present(self) -> Collection[int]:
        """The ranks of the workers that are there."""
        return self._bases.keys()

    def want(self, rank: int | None) -> None:
        """Have a channel to a worker from now on; None: to each of them."""
        if rank not in self._wanted:
            self._wanted.add(rank)
            self.open_wanted()

    def back(self, rank: int, base: int) -> None:
        """Note that there is a worker of this rank, and how many steps were sent before the first that it has to do."""
        self._bases[rank] = base
        self.open_wanted()

    def gone(self, rank: int) -> Channel | None:
        """Note that a worker has gone; return the channel to it, if there was one, which is to be closed."""
        self._bases.pop(rank, None)
        if (opening := self.opening.pop(rank, None)) is not None:
            opening.cancel()
        return self.open.pop(rank, None)

    def open_wanted(self) -> None:
        """Make the channels that are wanted, to the workers that are there and have none."""
        for rank in self._bases:
            if not self._wanted.isdisjoint((rank, None)) and rank not in self.open and rank not in self.opening:
                self.opening[rank] = self._spawn(self._open(rank))

    async def _open(self, rank: int) -> None:
        member, base = self._crew.workers[rank], self._bases[rank]
        try:
            channel = await Channel.open(member, rank, self._sizes, self._options, lambda: self._steps() - base)
        except (EOFError, OSError, PeerDied, QueueClosed):
            return  # it has died; as long as that has not been noticed, it is not tried again
        except AioshmError as error:
            self.opening.pop(rank, None)
            self._on_failure(rank, error)
            return
        self.opening.pop(rank, None)
        self.open[rank] = channel
        self._on_open(channel)

    def stop_opening(self) -> None:
        """Make no channel any more that is being made."""
        for opening in self.opening.values():
            opening.cancel()

    def close(self, channel: Channel) -> None:
        """Begin to close a channel: its worker ends what it does."""
        self._spawn(channel.aclose())

    def close_all(self) -> None:
        """Begin to close all channels."""
        channels, self.open = self.open, {}
        for channel in channels.values():
            self.close(channel)

    async def closed(self) -> None:
        """Wait until nothing is being made or closed."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
