"""Typed steps and a worker without an event loop: ``python examples/typed_steps.py``.

An asyncio scheduler sends structs with an array each, three at a time; the worker is a plain loop that blocks, decodes
them as the same struct, and looks at the arrays where they lie in the ring.
"""

from __future__ import annotations

import asyncio
import multiprocessing

import msgspec
import numpy as np

from aioshm import Handle, MessageQueue
from aioshm.blocking import MessageQueue as BlockingQueue


class Step(msgspec.Struct):
    number: int
    requests: list[str]
    logits: np.ndarray


def work(handle: Handle) -> None:
    total = 0.0
    with BlockingQueue.create_from_handle(handle, rank=0, type=Step) as mq:
        mq.wait_until_ready(30)
        for _ in range(6):
            with mq.lease() as step:  # no copy; the slot goes back when the block ends
                total += float(step.logits.sum())
                print(f"step {step.number} for {' and '.join(step.requests)}", flush=True)
    print(f"the sum of all logits is {total:.0f}", flush=True)


async def main() -> None:
    async with MessageQueue(1, max_chunk_bytes=1 << 20, codec="msgpack", type=Step) as mq:
        worker = multiprocessing.get_context("spawn").Process(target=work, args=(mq.export_handle(),))
        worker.start()
        for first in range(0, 6, 3):
            await mq.enqueue_many(
                Step(number, ["ann", "bob"], np.full(50_000, number, np.float32)) for number in range(first, first + 3)
            )
        await asyncio.to_thread(worker.join)


if __name__ == "__main__":
    asyncio.run(main())
