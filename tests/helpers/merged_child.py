"""Writers of queues that are merged, in processes that are forked on request: ``python merged_child.py``.

Each line of standard input asks for a process, which says on standard output the handles of its queues; both are JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from typing import Any

from aioshm import MessageQueue, Options

MESSAGES = 5
LATER_S = 0.01


def new_writer(name: str | None, remote: bool, ending: str, slots: int) -> MessageQueue[Any]:
    """Make a queue for one reader; a small one, because there are thousands."""
    arguments: dict[str, Any] = {"max_chunk_bytes": 1024, "max_chunks": slots, "slots": slots}
    if not remote:
        return MessageQueue(1, 1, name=name, **arguments)
    options = Options(remote_timeout=0.5) if ending == "dies" else None
    return MessageQueue(1, 0, connect_ip="127.0.0.1", options=options, **arguments)


async def write(writer: MessageQueue[Any], ending: str) -> None:
    """Send all messages, then close the queue, immediately or later, or leave it open."""
    await writer.enqueue_many(range(MESSAGES))
    if ending == "later":
        await asyncio.sleep(LATER_S)
    if ending != "dies":
        await writer.aclose()


async def write_all(names: list[str | None], remote: bool, ending: str, slots: int) -> None:
    """Write to one queue for each name, then end."""
    writers = [new_writer(name, remote, ending, slots) for name in names]
    print(json.dumps([writer.export_handle().to_json() for writer in writers]), flush=True)
    await asyncio.gather(*(write(writer, ending) for writer in writers))
    if ending == "dies":
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that were forked
    for line in iter(sys.stdin.readline, ""):
        if not os.fork():
            status = 1
            try:
                asyncio.run(write_all(*json.loads(line)))
                status = 0
            finally:
                os._exit(status)
