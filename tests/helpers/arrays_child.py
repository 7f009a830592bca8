"""Receives each array twice, wrapped and by itself, in every way, and compares: ``python arrays_child.py HANDLE``.

Says how many there were. The wrapped ones are decoded from what the codec has made of them.
"""

from __future__ import annotations

import asyncio
import random
import sys
from typing import Any

from aioshm import MessageQueue


def check(received: Any, wrapped: Any) -> None:
    """Assert that both are the same, and neither has what belongs to the other's process."""
    assert (type(received), received.dtype, received.shape) == (type(wrapped), wrapped.dtype, wrapped.shape)
    assert received.dtype.str == wrapped.dtype.str
    for flag in ("c_contiguous", "f_contiguous", "aligned"):
        assert getattr(received.flags, flag) == getattr(wrapped.flags, flag), flag
    if received.dtype.hasobject:
        assert received.tolist() == wrapped.tolist()
    else:
        assert received.tobytes() == wrapped.tobytes()


async def receive(reader: MessageQueue[Any], way: int, wrapped: Any) -> None:
    """Receive the next message, which is like the last one."""
    if way == 0:
        check(await reader.dequeue(), wrapped)
    elif way == 1:
        async for received in reader:
            check(received, wrapped)
            break
    elif way == 2:
        [received] = await reader.dequeue_many(1)
        check(received, wrapped)
    else:
        async with reader.lease() as received:
            check(received, wrapped)


async def main() -> None:
    """Read to the end."""
    chance, count = random.Random(0), 0
    async with MessageQueue.create_from_handle(sys.argv[1], 0) as reader:
        async for (wrapped,) in reader:
            await receive(reader, chance.randrange(4), wrapped)
            count += 1
    print(count)


if __name__ == "__main__":
    asyncio.run(main())
