"""Ends of a queue with a network at its worst between them: ``python network_child.py LOOP ROLE ARGUMENTS...``.

Each ends by saying, as JSON, what became of the messages.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from typing import Any

import uvloop
from proxy import proxied
from remotes import wide_writer

from aioshm import AioshmError, Handle, MessageQueue
from aioshm.queue.remote import wire

LARGEST = 1 << 20
EVERY_S = 0.1
DELAY_S = 0.004
PACE_S = 0.009
"""On average: some 12 MB/s, which leaves the machine to others."""

wire.PART_BYTES = 64 * 1024  # so that every tenth message goes in parts
_POOL = random.Random(0).randbytes(2 * LARGEST)


def say(what: object) -> None:
    print(json.dumps(what), flush=True)


def _message(number: int) -> tuple[int, bytes]:
    """Return a message of 64 bytes to 1 MiB, small ones as often as large ones."""
    rng = random.Random(number)
    size = int(64 * (LARGEST / 64) ** rng.random())
    offset = rng.randrange(len(_POOL) - size)
    return number, _POOL[offset : offset + size]


async def _send(writer: MessageQueue, seconds: float) -> dict[str, Any]:
    number, error = 0, None
    try:
        async with writer:
            await writer.wait_until_ready(20)
            async with asyncio.timeout(seconds):
                while True:
                    await writer.enqueue(_message(number))
                    number += 1
                    await asyncio.sleep(random.uniform(0, 2 * PACE_S))
    except TimeoutError:
        pass
    except AioshmError as caught:
        error = f"{type(caught).__name__}: {caught}"
    return {"sent": number, "resent": writer.stats().resent, "writer's error": error}


async def _receive(handle: Handle | str, *, tell: bool = False) -> dict[str, Any]:
    expected = lost = twice_or_late = damaged = 0
    error = None
    async with MessageQueue.create_from_handle(handle, 0) as reader:
        try:
            async for received in reader:
                number = received[0]
                lost += max(0, number - expected)
                twice_or_late += number < expected
                damaged += received != _message(number)
                expected = number + 1
                if tell and not number:
                    say("begun")
        except AioshmError as caught:
            error = f"{type(caught).__name__}: {caught}"
        received = reader.stats().messages
    return {
        "received": received,
        "lost": lost,
        "twice or late": twice_or_late,
        "damaged": damaged,
        "reconnects": reader.stats().reconnects,
        "reader's error": error,
    }


async def through_proxies(seconds: str, seed: str) -> None:
    """Both ends, and proxies that misbehave."""
    writer = wide_writer(0, 1, remote_timeout=5.0, remote_window=200, remote_window_bytes=8 << 20)
    async with proxied(writer.export_handle(), random.Random(int(seed))) as (handle, data, control):
        receiving = asyncio.ensure_future(_receive(handle))
        await writer.wait_until_ready(10)
        for proxy in (data, control):
            proxy.misbehave(EVERY_S, DELAY_S)
        verdict = await _send(writer, float(seconds)) | await receiving
    say(verdict | {"cpu_s": time.process_time()})


async def write(ip: str, timeout: str, seconds: str) -> None:
    """The writer alone, which says its handle first."""
    writer = wide_writer(0, 1, connect_ip=ip, remote_timeout=float(timeout), remote_window=200)
    print(writer.export_handle().to_json(), flush=True)
    say(await _send(writer, float(seconds)))


async def read(handle: str) -> None:
    """The reader alone, which says when the first message has come."""
    say(await _receive(handle, tell=True))


if __name__ == "__main__":
    run = uvloop.run if sys.argv[1] == "uvloop" else asyncio.run
    run(globals()[sys.argv[2]](*sys.argv[3:]))
