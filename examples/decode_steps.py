"""A scheduler sends decode steps to two workers, which work on while they wait: ``python examples/decode_steps.py``.

Shows tensors that arrive as the worker's own, a step that is larger than a slot, other tasks on the worker's loop,
a worker that stops being needed, and what a worker's death looks like to the scheduler.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal

import torch

from aioshm import Handle, MessageQueue, PeerDied

WORKERS = 2
STEPS = 50


async def work(handle: Handle, rank: int) -> None:
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0.001)

    ticking = asyncio.create_task(tick())
    async with MessageQueue.create_from_handle(handle, rank) as mq:
        steps = 0
        async for step in mq:
            tokens: torch.Tensor = step["tokens"]
            tokens += rank  # it is this worker's own copy
            steps += 1
            if step["last"]:
                break
    ticking.cancel()
    print(f"worker {rank}: {steps} steps, and the loop went on: {ticks > 0}", flush=True)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)  # on purpose


def start(handle: Handle, rank: int, again: Handle) -> None:
    async def main() -> None:
        async with MessageQueue.create_from_handle(again, rank) as second:
            await second.wait_until_ready()
            await work(handle, rank)
            await second.dequeue()

    asyncio.run(main())


async def schedule() -> None:
    context = multiprocessing.get_context("spawn")
    async with (
        MessageQueue(WORKERS, max_chunk_bytes=1 << 20) as mq,
        MessageQueue(WORKERS, max_chunk_bytes=1 << 20) as second,
    ):
        handles = mq.export_handle(), second.export_handle()
        workers = [context.Process(target=start, args=(handles[0], rank, handles[1])) for rank in range(WORKERS)]
        for worker in workers:
            worker.start()
        await second.wait_until_ready(60)
        for number in range(STEPS):
            size = 1000 if number % 10 else 1_000_000  # 8 MB do not fit a slot, and arrive all the same
            await mq.enqueue({"tokens": torch.arange(size), "last": number == STEPS - 1}, timeout=30)
        try:
            while True:
                await second.enqueue("more?", timeout=30)
                await asyncio.sleep(0.01)
        except PeerDied as error:
            print(f"scheduler: {error}")
    for worker in workers:
        worker.join()


if __name__ == "__main__":
    asyncio.run(schedule())
