"""A rank of the model in a process of its own. The ranks add up their partial results among themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from aioshm import Handle, MessageQueue
from engine_frontend.batch import Best, Chunk, Config
from engine_frontend.model import Model

CHUNK_BYTES, CHUNKS = 1 << 18, 8


class ModelWorker:
    """What a `WorkerGroup` makes in each of its processes."""

    def __init__(self, config: Config, size: int, rank: int) -> None:
        torch.set_num_threads(1)  # the ranks are what runs in parallel
        self._rank, self._size = rank, size
        self._model = Model(config, rank, size)
        self._mine: MessageQueue | None = None
        self._others: dict[int, MessageQueue] = {}

    def open(self) -> Handle | None:
        """Make the queue on which the other ranks get this one's partial results."""
        if self._size > 1:
            readers = self._size - 1
            self._mine = MessageQueue(readers, readers, None, CHUNK_BYTES, CHUNKS)
            return self._mine.export_handle()
        return None

    async def connect(self, handles: Sequence[Handle]) -> None:
        """Attach to the queues of the other ranks, and wait until they have attached to this one's."""
        for rank, handle in enumerate(handles):
            if rank != self._rank:  # which reader this is, among those that are not the writer
                self._others[rank] = MessageQueue.create_from_handle(handle, self._rank - (rank < self._rank))
        if self._mine is not None:
            await asyncio.gather(*(queue.wait_until_ready() for queue in (self._mine, *self._others.values())))

    async def step(self, batch: Sequence[Chunk], finished: Sequence[str]) -> list[Best]:
        """Forget requests, then return this rank's best token for what follows each chunk."""
        self._model.forget(finished)
        best = (await self.logits(batch)).max(1)
        return [
            Best(logit, -(self._model.first_token + index))
            for logit, index in zip(best.values.tolist(), best.indices.tolist(), strict=True)
        ]

    async def logits(self, batch: Sequence[Chunk]) -> Tensor:
        """Return this rank's logits for what follows each chunk."""
        with torch.inference_mode():
            return await self._model.forward(batch, self._add)

    def kept(self) -> list[str]:
        return self._model.kept()

    async def close(self) -> None:
        for queue in (self._mine, *self._others.values()):
            if queue is not None:
                await queue.aclose()

    async def _add(self, partial: Tensor) -> Tensor:
        """Return the sum over all ranks, added in the same order by each of them."""
        if self._mine is None:
            return partial
        await self._mine.enqueue(partial)
        parts: Mapping[int, Tensor] = {rank: await queue.dequeue() for rank, queue in self._others.items()}
        total = torch.zeros_like(partial)
        for rank in range(self._size):
            total += partial if rank == self._rank else parts[rank]
        return total
