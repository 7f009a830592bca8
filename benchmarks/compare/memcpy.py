"""What this machine's memory can do: big blocks from one touched buffer to another, both larger than its caches."""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from benchmarks.framework.crew import Boss, Crew, Hand
from benchmarks.framework.workload import MIB

NAME = "memcpy"
BLOCK_BYTES = 256 * MIB
QUICK_BLOCK_BYTES = 16 * MIB


@asynccontextmanager
async def memcpy_on_stage(nbytes: int, loop_factory: Callable[[], asyncio.AbstractEventLoop]) -> AsyncIterator[Hand]:
    """Start a process that answers each order, a number of blocks, with the bytes/s at which it copied them."""
    with Crew(loop_factory) as crew:
        hand = crew.start(NAME, copy_blocks, nbytes)
        await hand.reply()
        yield hand
        await crew.dismiss([hand])


async def copy_blocks(boss: Boss, nbytes: int) -> None:
    """Role: copy blocks."""
    source, target = mmap.mmap(-1, nbytes), mmap.mmap(-1, nbytes)
    to, at = (ctypes.addressof(ctypes.c_char.from_buffer(memory)) for memory in (target, source))
    ctypes.memset(at, 1, nbytes)
    ctypes.memset(to, 2, nbytes)
    boss.reply("ready")
    while (blocks := await boss.order()) is not None:
        began = time.perf_counter()
        for _ in range(blocks):
            ctypes.memmove(to, at, nbytes)
        boss.reply(blocks * nbytes / (time.perf_counter() - began))
