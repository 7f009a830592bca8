"""Frames that nobody copies, filled where two other processes look at them: ``python examples/loans.py``."""

from __future__ import annotations

import asyncio
import multiprocessing

import numpy as np

from aioshm import MessageQueue
from aioshm.queue import Handle

FRAMES = 5
SHAPE = (2160, 3840, 3)


async def show(handle: Handle, rank: int) -> None:
    """Look at every frame where it lies."""
    async with MessageQueue.create_from_handle(handle, rank) as mq:
        for _ in range(FRAMES):
            async with mq.lease() as message:
                frame = message["frame"]
                print(f"reader {rank}: frame {message['number']} of {frame.nbytes / 1e6:.0f} MB, all {frame[0, 0, 0]}")
                del message, frame  # what is kept longer than the block becomes a copy
        print(f"reader {rank}: {mq.stats().copied_bytes} bytes copied")


def in_a_process(handle: Handle, rank: int) -> None:
    """Run a reader."""
    asyncio.run(show(handle, rank))


async def main() -> None:
    """Send the frames to two readers."""
    spawn = multiprocessing.get_context("spawn")
    async with MessageQueue(2) as mq:
        readers = [spawn.Process(target=in_a_process, args=(mq.export_handle(), rank)) for rank in range(2)]
        for reader in readers:
            reader.start()
        await mq.wait_until_ready(timeout=30)
        for number in range(FRAMES):
            async with mq.build(nbytes=int(np.prod(SHAPE))) as message:
                message["number"] = number
                message["frame"] = message.empty(SHAPE, "uint8")
                message["frame"][:] = number
        while any(reader.is_alive() for reader in readers):  # noqa: ASYNC110 - the readers have what was sent then
            await asyncio.sleep(0.01)
    for reader in readers:
        reader.join()


if __name__ == "__main__":
    asyncio.run(main())
