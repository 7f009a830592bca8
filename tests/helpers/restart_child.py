"""Writers that are killed and started again, and their readers: ``python restart_child.py ROLE ARGUMENTS...``.

It says on standard output, line by line, what it has done.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
import struct
import sys
from pathlib import Path
from typing import Any

import uvloop

from aioshm import Handle, MessageQueue, QueueRestarted, blocking

END = "end"
BURST = 8


def say(text: str) -> None:
    print(text, flush=True)


# Writers


def write_on_demand(where: str, readers: str, ip: str, journal: str) -> None:
    """Start a writer at each line that is read, and wait for its end; which line says whether it ends by itself."""
    file = os.open(journal, os.O_RDWR)
    for line in sys.stdin:
        pid = os.fork()  # nothing has been started here: a new process would take a second to import everything
        if not pid:
            run = asyncio.run if int(line) % 2 else uvloop.run
            run(_write(where, int(readers), ip, file, ends=int(line) < 0))
            os._exit(0)
        say(f"started {pid}")
        os.waitpid(pid, 0)
        say("ended")


async def _write(where: str, readers: int, ip: str, file: int, *, ends: bool) -> None:
    journal = mmap.mmap(file, 8)
    journal[:] = bytes(8)
    arguments: dict[str, Any] = {"max_chunk_bytes": 256, "max_chunks": 16}
    if ip:
        writer = MessageQueue(readers, 0, connect_ip=ip, identity=where, **arguments)
    else:
        writer = MessageQueue(readers, readers, name=where, **arguments)
    async with writer:
        if ip:  # for the readers, of whom none knows where it will be
            Path(f"{where}.handle").write_text(writer.export_handle().to_json())
        await writer.wait_until_ready(60)
        if ends:
            await writer.enqueue(END)
            return
        number = 0
        while True:
            for _ in range(BURST):
                await writer.enqueue((os.getpid(), number))
                number += 1
                if not ip:
                    journal[:] = struct.pack("<Q", number)
            while ip and writer.stats().kept:  # what a killed writer has sent last may not have left its process
                await asyncio.sleep(0)
            journal[:] = struct.pack("<Q", number)


# Readers


class Log:
    """What one reader has received from the writer that it has, which must begin with 0 and have no gap."""

    def __init__(self) -> None:
        self.pid = 0
        self.count = 0

    def take(self, message: Any) -> bool:
        """Check a message; return whether it was not the last."""
        if message == END:
            return False
        pid, number = message
        if not self.pid:
            self.pid = pid
            say(f"back {pid}")
        if (pid, number) != (self.pid, self.count):
            say(f"wrong: {message} instead of {(self.pid, self.count)}")
        self.count += 1
        return True

    def restarted(self, error: QueueRestarted) -> None:
        say(f"got {self.count} of {self.pid}")
        if error.old_pid != self.pid:
            say(f"wrong: {error.old_pid} instead of {self.pid}")
        self.pid, self.count = error.pid, 0
        say(f"back {error.pid}")


def _attach(face: Any, where: str, rank: str, remote: str) -> Any:
    if remote == "remote":
        handle = Handle.from_json(Path(f"{where}.handle").read_text())
        return face.create_from_handle(handle, int(rank), reconnect=True)
    return face.attach(where, int(rank), timeout=None, reconnect=True)


async def _read(where: str, rank: str, remote: str) -> None:
    log = Log()
    async with _attach(MessageQueue, where, rank, remote) as reader:
        while True:
            try:
                if not log.take(await reader.dequeue()):
                    break
            except QueueRestarted as error:
                log.restarted(error)


def _read_blocking(where: str, rank: str, remote: str) -> None:
    log = Log()
    with _attach(blocking.MessageQueue, where, rank, remote) as reader:
        while True:
            try:
                if not log.take(reader.dequeue()):
                    break
            except QueueRestarted as error:
                log.restarted(error)


def read(how: str, where: str, rank: str, remote: str) -> None:
    """Read until a writer says that it is the last one."""
    if how == "blocking":
        _read_blocking(where, rank, remote)
    elif how == "uvloop":
        uvloop.run(_read(where, rank, remote))
    else:
        asyncio.run(_read(where, rank, remote))
    say("done")


if __name__ == "__main__":
    logging.disable()  # what is on standard error counts as a complaint
    globals()[sys.argv[1]](*sys.argv[2:])
