"""A writer in a process of its own: sends a message every few milliseconds until its standard input ends."""

from __future__ import annotations

import asyncio
import sys
import threading

from aioshm import MessageQueue


async def main() -> None:
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    async with MessageQueue(1) as writer:
        print(writer.export_handle().to_json(), flush=True)
        await writer.wait_until_ready(20)
        number = 0
        while not ended.is_set():
            await writer.enqueue(number)
            number += 1
            await asyncio.sleep(0.005)


asyncio.run(main())
