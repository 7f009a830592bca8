"""A writer that falls silent: ``python silent_child.py FACE HOW LOCAL REMOTE STALL_S``.

It writes its handle, waits for its readers, sends "first", says "silent", and then is so in one of many ways. Where
that ends, it sends "last".
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from contextlib import suppress
from typing import Any

from aioshm import AioshmError, MessageQueue, Options, blocking


def say(text: str) -> None:
    print(text, flush=True)


def arguments(local: str, remote: str, stall_s: str) -> dict[str, Any]:
    return {
        "n_reader": int(local) + int(remote),
        "n_local_reader": int(local),
        "max_chunk_bytes": 4096,
        "max_chunks": 4,
        "slots": 4,
        "connect_ip": "127.0.0.1",
        "options": Options(stall_warning_s=float(stall_s)),
    }


async def asynchronous(how: str, *sizes: str) -> None:
    if how == "never runs":
        writer = MessageQueue(**arguments(*sizes))
        say(writer.export_handle().to_json())
        time.sleep(1000)
    async with MessageQueue(**arguments(*sizes)) as writer:
        say(writer.export_handle().to_json())
        await writer.wait_until_ready(20)
        await writer.enqueue("first")
        say("silent")
        if how == "awaits":
            await asyncio.sleep(1000)
        elif how == "is full":
            with suppress(AioshmError):  # the readers leave, and then this is killed
                for number in range(100):
                    await writer.enqueue(number)
            await asyncio.sleep(1000)
        time.sleep(2.5 if how == "pauses" else 1000)  # the loop does not run
        await writer.enqueue("last")
        await asyncio.sleep(1000)


def blocked(_how: str, *sizes: str) -> None:
    with blocking.MessageQueue(**arguments(*sizes)) as writer:
        say(writer.export_handle().to_json())
        writer.wait_until_ready(20)
        writer.enqueue("first")
        say("silent")
        time.sleep(1000)


if __name__ == "__main__":
    logging.disable()  # what is on standard error counts as a complaint
    if sys.argv[1] == "asyncio":
        asyncio.run(asynchronous(*sys.argv[2:]))
    elif sys.argv[1] == "uvloop":
        import uvloop

        uvloop.run(asynchronous(*sys.argv[2:]))
    else:
        blocked(*sys.argv[2:])
