"""Starts readers that write down what they receive, one after the other: ``python journal_child.py HANDLE RANK PATH``.

Each line on standard input starts one; its process id is said on standard output. They are forked, which takes a
hundredth of the time of a start.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys

from aioshm import AioshmError, Handle, MessageQueue


async def _read(handle: str, rank: int, journal: int) -> None:
    reader = MessageQueue.create_from_handle(handle, rank)
    async with reader:
        try:
            async for number in reader:
                os.write(journal, f"{os.getpid()} {number}\n".encode())
        except AioshmError as error:
            os.write(journal, f"{os.getpid()} {type(error).__name__}\n".encode())


def main() -> None:
    handle, rank, path = sys.argv[1:]
    if Handle.from_json(handle).remote is not None:
        import aioshm.queue.remote.source  # noqa: F401 - once for all of them
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    for _ in sys.stdin:
        pid = os.fork()
        if not pid:
            journal = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            try:
                asyncio.run(_read(handle, int(rank), journal))
            finally:
                os._exit(0)
        print(pid, flush=True)


if __name__ == "__main__":
    main()
