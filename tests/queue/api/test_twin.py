"""The queue without its native core, and on CPUs of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
from faces import make_writer

from aioshm import blocking
from aioshm.process.loop_thread import shared_loop

ROUND_TRIP = """
import asyncio
from aioshm import MessageQueue, native_core

async def main():
    async with MessageQueue(1, 1, max_chunk_bytes=4096, max_chunks=4, slots=4) as writer:
        async with MessageQueue.create_from_handle(writer.export_handle(), 0) as reader:
            await asyncio.gather(writer.wait_until_ready(10), reader.wait_until_ready(10))
            await writer.enqueue_many([1, b"x" * 9000, 3])
            print(native_core, await reader.dequeue(5), len(await reader.dequeue(5)), end=" ")
            async with reader.lease(5) as obj:
                print(obj)

asyncio.run(main())
"""

ECHO = """
import os, sys
from aioshm import blocking
os.sched_setaffinity(0, {int(sys.argv[2])})
with blocking.MessageQueue(1, 1, max_chunk_bytes=4096) as back:
    with blocking.MessageQueue.create_from_handle(sys.argv[1], 0) as reader:
        print(back.export_handle().to_json(), flush=True)
        reader.wait_until_ready(20)
        back.wait_until_ready(20)
        for obj in reader:
            back.enqueue(obj)
        print(reader.stats().spins + back.stats().spins, flush=True)
"""


def test_a_round_trip_without_the_native_core() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ROUND_TRIP],
        env={**os.environ, "AIOSHM_NATIVE": "0"},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert (done.stdout, done.stderr) == ("False 1 9000 3\n", "")


def _spins_of_a_ping_pong(here: int, there: int) -> int:
    """Return how often both ends of a hot ping-pong have spun, each pinned to one CPU."""
    shared_loop()  # its thread may run on all CPUs, but does not wait for messages
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {here})
    try:
        with make_writer() as writer:
            command = [sys.executable, "-c", ECHO, writer.export_handle().to_json(), str(there)]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
                assert child.stdout is not None
                with blocking.MessageQueue.create_from_handle(child.stdout.readline(), 0) as reader:
                    writer.wait_until_ready(20)
                    reader.wait_until_ready(20)
                    for number in range(3000):
                        writer.enqueue(number, 20)
                        assert reader.dequeue(20) == number
                    writer.close()
                    theirs: Any = child.stdout.readline()
                    return int(theirs) + reader.stats().spins + writer.stats().spins
    finally:
        os.sched_setaffinity(0, allowed)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_ends_on_cpus_of_their_own_spin_and_ends_on_one_do_not() -> None:
    first, second, *_ = sorted(os.sched_getaffinity(0))
    assert _spins_of_a_ping_pong(first, second) > 0
    assert _spins_of_a_ping_pong(first, first) == 0
