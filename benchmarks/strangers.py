"""Messages per second to a remote reader while strangers annoy every open port, against the same without them.

The strangers run at the lowest priority, as on a machine of their own: what counts is what they cost the queue, not
what they cost its CPUs.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time

from aioshm import Handle, MessageQueue, Options
from benchmarks.framework.crew import Boss, Crew
from benchmarks.framework.harness import Settings, main, progress
from benchmarks.framework.report import Report
from benchmarks.framework.workload import BYTES_4K

QUIET, ANNOYED = "quiet", "with strangers"
RATIO = 0.8
READY_TIMEOUT_S = 30.0
BATCH = 256
LEAST_S = 1.0


async def run(settings: Settings, report: Report) -> None:
    """Measure both in turns, and hold one against the other."""
    with Crew(settings.loop_factory) as crew:
        async with MessageQueue(1, 0, connect_ip="127.0.0.1", codec="raw", options=Options()) as queue:
            handle = queue.export_handle()
            hand = crew.start("reader", read, handle)
            await queue.wait_until_ready(READY_TIMEOUT_S)
            assert handle.remote is not None
            ports = [endpoint.removeprefix("tcp://") for endpoint in (handle.remote.data, handle.remote.control)]
            for number in range(settings.repeat):
                progress(f"{number + 1} of {settings.repeat}: {settings.seconds:g} s each")
                rate = await _rate(queue, settings.seconds)
                report.result(BYTES_4K.name, QUIET).add(messages_per_s=rate)
                seconds = max(LEAST_S, settings.seconds)
                attack = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    "benchmarks.attackers",
                    str(seconds + LEAST_S),
                    "0",
                    *ports,
                    stdout=asyncio.subprocess.PIPE,
                )
                try:
                    assert attack.stdout is not None
                    await attack.stdout.readline()  # it begins
                    rate = await _rate(queue, settings.seconds)
                finally:
                    output, _ = await attack.communicate()
                report.result(BYTES_4K.name, ANNOYED).add(messages_per_s=rate)
                report.remarks.append(f"strangers: {output.decode().strip()}")
            await queue.enqueue(b"")
            await hand.reply()
            await crew.dismiss([hand])
    ratio = report.ratio(BYTES_4K.name, ANNOYED, QUIET, "messages_per_s")
    text = f"messages/s of {BYTES_4K.name} with strangers at every port, against those without"
    report.hold(text, ratio, "x", RATIO, at_least=True)


async def _rate(queue: MessageQueue, seconds: float) -> float:
    """Send for a while; return the messages/s, up to the last one's acknowledgement."""
    began, sent = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        for message in BYTES_4K.numbered(range(BATCH)):
            await queue.enqueue(message)
        sent += BATCH
    while queue.stats().backlog:  # noqa: ASYNC110 - no call waits for the readers to catch up
        await asyncio.sleep(0.0005)
    return sent / (time.perf_counter() - began)


async def read(boss: Boss, handle: Handle) -> None:
    """Role: read until an empty message."""
    async with MessageQueue.create_from_handle(handle, 0) as queue:
        while await queue.dequeue():
            pass
    boss.reply(os.getpid())
    await boss.order()


if __name__ == "__main__":
    sys.exit(main("strangers", __doc__, run, repeat=3, seconds=10.0))
