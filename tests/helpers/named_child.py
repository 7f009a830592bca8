"""One end of a named queue in a process that prints each step: ``python named_child.py ROLE ARGUMENTS...``."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

from aioshm import MessageQueue
from aioshm.queue.names import files


def say(text: str) -> None:
    print(text, flush=True)


async def write(name: str, count: str, identity: str = "") -> None:
    """Write messages, each with this process' id, then stay."""
    arguments: dict[str, Any] = {"identity": identity, "connect_ip": "127.0.0.1"} if identity else {"name": name}
    writer = MessageQueue(1, 0 if identity else 1, max_chunk_bytes=4096, max_chunks=4, **arguments)
    say(writer.export_handle().to_json())
    await writer.wait_until_ready(20)
    for number in range(int(count)):
        await writer.enqueue((os.getpid(), number))
    say("written")
    await asyncio.sleep(1000)


async def have_and_fork(name: str) -> None:
    """Have a name, and a child that has nothing to do with it and lives on."""
    writer = MessageQueue(1, 1, name=name)
    forked, tells = os.pipe()
    pid = os.fork()
    if not pid:
        for fd in (0, 1, 2, forked, tells):  # the last one tells that it has let go of the rest
            os.close(fd)
        while True:
            signal.pause()
    os.close(tells)
    os.read(forked, 1)
    say(f"child {pid}")
    await asyncio.sleep(1000)
    await writer.aclose()


def _die(name: str, step: str, after: bool) -> None:
    """Be killed before, or after, a step of having a name; else exit."""
    owner: Any = files if hasattr(files, step) else os
    step_itself = getattr(owner, step)

    def stepping(*arguments: Any, **keywords: Any) -> Any:
        if after:
            step_itself(*arguments, **keywords)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, step, stepping)
    MessageQueue(1, 1, name=name)
    os._exit(0)


async def die_at_every_step(name: str, directory: str) -> None:
    """Let others be killed at each step of having a name, new or stale; look whether it can be had after each."""
    path = Path(directory) / f"{name}.queue"
    async with MessageQueue(1, 1, name=name):
        content = path.read_bytes()
    killed = 0
    for step, after, stale in itertools.product(["_lock", "_write", "link", "rename"], [False, True], [False, True]):
        if stale:
            path.touch(0o600)
            path.write_bytes(content)
        pid = os.fork()
        if not pid:
            _die(name, step, after)
        killed += os.WIFSIGNALED(os.waitpid(pid, 0)[1])
        async with MessageQueue.attach(name, 0) as reader:
            with contextlib.suppress(TimeoutError):
                await reader.wait_until_ready(0.01)
            async with MessageQueue(1, 1, name=name) as writer:
                await writer.enqueue(step, 20)
                assert await reader.dequeue(20) == step
        assert os.listdir(directory) == [], (step, after, stale, os.listdir(directory))
    say(f"killed {killed}")


if __name__ == "__main__":
    logging.disable()  # what is on standard error counts as a complaint
    asyncio.run(globals()[sys.argv[1]](*sys.argv[2:]))
