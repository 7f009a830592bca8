"""Live latency while slow clients replay: p99 of live batches with and without them, in one run.

A publisher sends ``--rate`` batches a second. A subscriber in another process measures how old each is when
it arrives. In every second phase four clients in a third process each replay 2,500 batches, reading one a
millisecond.

    python -m benchmarks.events_replay [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import time

from aioshm.events import BlockStored, EventBatch, ZmqEventPublisher

CLIENTS = 4
REPLAYED = 2500

LIVE = """
import struct, sys, time, zmq
sub = zmq.Context().socket(zmq.SUB)
sub.set_hwm(0)
sub.subscribe(b"")
sub.connect(sys.argv[1])
print("ready", flush=True)
while True:
    topic, seq, payload = sub.recv_multipart()
    age = time.time() - struct.unpack(">d", payload[2:10])[0]
    print(int.from_bytes(seq, "big"), age)
    if age > 1e9:
        break
"""

SLOW = """
import sys, threading, time, zmq
context = zmq.Context()
def replay():
    client = context.socket(zmq.DEALER)
    client.rcvhwm = 10
    client.connect(sys.argv[1])
    client.send_multipart([b"", int(sys.argv[2]).to_bytes(8, "big")])
    count = 0
    while client.recv_multipart()[-2] != b"\\xff" * 8 and count < int(sys.argv[3]):
        count += 1
        time.sleep(0.001)
    print(f"{count}\\n", end="", flush=True)
    client.close(0)
threads = [threading.Thread(target=replay) for _ in range(int(sys.argv[4]))]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""


async def start(code: str, *arguments: str) -> asyncio.subprocess.Process:
    """Start a Python process whose output can be read."""
    return await asyncio.create_subprocess_exec(sys.executable, "-c", code, *arguments, stdout=asyncio.subprocess.PIPE)


async def publish_for(publisher: ZmqEventPublisher, rate: float, seconds: float, events: int) -> None:
    """Publish at a steady rate; a turn that comes late sends what is due, stamped when it is sent."""
    begin = time.monotonic()
    stored = [BlockStored([n], None, list(range(16)), 16, None, "GPU") for n in range(events)]
    for number in range(int(rate * seconds)):
        await asyncio.sleep(max(0.0, begin + number / rate - time.monotonic()))
        publisher.publish(EventBatch(time.time(), stored))
    await publisher.flush()


async def measure(options: argparse.Namespace) -> dict[str, list[float]]:
    """Return the ages of live batches on arrival, in seconds, without and with clients that replay."""
    phases: list[tuple[str, range]] = []
    async with ZmqEventPublisher(0, "tcp://127.0.0.1:0", "tcp://127.0.0.1:0", bind=True) as publisher:
        live = await start(LIVE, publisher.endpoint)
        assert live.stdout is not None
        await live.stdout.readline()
        await asyncio.sleep(0.3)
        received = asyncio.create_task(live.stdout.read())

        async def phase(name: str, seconds: float) -> None:
            begin = publisher.stats().published
            await publish_for(publisher, options.rate, seconds, options.events)
            phases.append((name, range(begin, publisher.stats().published)))

        await phase("warm-up", REPLAYED / options.rate + 0.5)
        for _ in range(options.rounds):
            await phase("without", options.seconds)
            begin = publisher.stats().published - REPLAYED
            assert publisher.replay_endpoint is not None
            requests = publisher.stats().replay_requests
            slow = await start(SLOW, publisher.replay_endpoint, str(begin), str(REPLAYED), str(CLIENTS))
            while publisher.stats().replay_requests < requests + CLIENTS:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await phase("with", options.seconds)
            done, _ = await slow.communicate()
            counts = [int(count) for count in done.split()]
            assert counts == [REPLAYED] * CLIENTS, f"not served fully: {counts}"
        publisher.publish(EventBatch(-1.0, []))  # the subscriber ends
        await publisher.flush()
        lines = (await received).splitlines()
        await live.wait()
    age_of = {int(seq): float(age) for seq, age in (line.split() for line in lines)}
    ages: dict[str, list[float]] = {"without": [], "with": [], "warm-up": []}
    for name, numbers in phases:
        ages[name] += [age_of[number] for number in numbers]
    del ages["warm-up"]
    return ages


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=1000.0, help="live batches a second")
    parser.add_argument("--events", type=int, default=10, help="events in a batch")
    parser.add_argument("--seconds", type=float, default=2.5, help="length of a phase")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    ages = asyncio.run(measure(options))
    figures = {
        phase: {
            "batches": len(found),
            "median_us": statistics.median(found) * 1e6,
            "p99_us": sorted(found)[int(len(found) * 0.99)] * 1e6,
        }
        for phase, found in ages.items()
    }
    ratio = figures["with"]["p99_us"] / figures["without"]["p99_us"]
    machine = f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}"
    if options.json:
        print(json.dumps({"machine": machine, "figures": figures, "p99_ratio": ratio}))
        return
    print(f"{options.rate:.0f} batches/s, {CLIENTS} slow clients replaying {REPLAYED} batches each; {machine}")
    for phase, one in figures.items():
        print(f"  {phase:8} replay: median {one['median_us']:8.1f} us, p99 {one['p99_us']:8.1f} us")
    print(f"  p99 with / without: {ratio:.2f}")


if __name__ == "__main__":
    main()
