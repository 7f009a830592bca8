"""How old live batches of KV-cache events are when they arrive, while slow clients replay, against without them.

A publisher sends 1,000 batches of 100 events a second. A subscriber in another process notes how old each is on
arrival. In every second phase four clients in a third process each replay 2,500 batches, reading one a millisecond, and
all of them must get all of it.
"""

from __future__ import annotations

import asyncio
import struct
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import zmq

from aioshm.events import EventBatch, ZmqEventPublisher
from aioshm.events.protocol import wire
from benchmarks.events_publish import make_batch
from benchmarks.framework.crew import BenchmarkError, Boss, Crew, Hand
from benchmarks.framework.harness import Settings, main, progress
from benchmarks.framework.report import Report, percentile

CLIENTS = 4
REPLAYED, QUICK_REPLAYED = 2500, 50
RATE = 1000.0
RATIO = 2.0
WITHOUT, WITH = "nobody replays", f"{CLIENTS} slow clients replay"
CASE = f"{RATE:,.0f} batches/s"
PAUSE_S = 0.001
SUBSCRIPTION_S = 0.3
LAST_TS = -1.0


async def run(settings: Settings, report: Report) -> None:
    """Publish with and without clients, in turns."""
    replayed = QUICK_REPLAYED if settings.quick else REPLAYED
    with Crew(settings.loop_factory) as crew:
        async with ZmqEventPublisher(0, "tcp://127.0.0.1:0", "tcp://127.0.0.1:0", bind=True) as publisher:
            live = crew.start("live subscriber", note_ages, publisher.endpoint)
            slow = crew.start("slow clients", replay_slowly, publisher.replay_endpoint)
            for hand in (live, slow):
                await hand.reply()
            await asyncio.sleep(SUBSCRIPTION_S)
            progress(f"{replayed} batches first, then {settings.repeat} times two phases of {settings.seconds:g} s")
            phases = [("warm-up", await publish(publisher, replayed + 1))]
            for _ in range(settings.repeat):
                count = max(1, int(RATE * settings.seconds))
                phases.append((WITHOUT, await publish(publisher, count)))
                slow.order((publisher.stats().published - replayed, replayed))
                await slow.reply()  # they have asked
                phases.append((WITH, await publish(publisher, count)))
                await _check_all_were_served(slow, replayed)
            publisher.publish(EventBatch(LAST_TS, []))
            await publisher.flush()
            ages: dict[int, float] = await live.reply()
            await crew.dismiss([live, slow])
    for name, numbers in phases[1:]:
        lost = [seq for seq in numbers if seq not in ages]
        if lost:
            raise BenchmarkError(f"{len(lost)} live batches have not arrived, the first is {lost[0]}")
        found = [ages[seq] * 1e6 for seq in numbers]
        report.result(CASE, name).add(age_p50_us=percentile(found, 50), age_p99_us=percentile(found, 99))
    text = (
        f"p99 of the age of live batches while {CLIENTS} slow clients replay {replayed:,} batches each, against without"
    )
    report.hold(text, report.ratio(CASE, WITH, WITHOUT, "age_p99_us", of_repetitions=True), "x", RATIO)


async def publish(publisher: ZmqEventPublisher, count: int) -> range:
    """Publish at a steady rate; return the numbers. A turn that comes late sends what is due, stamped when it is."""
    stored = make_batch(1).events
    first, began = publisher.stats().published, time.monotonic()
    for number in range(count):
        await asyncio.sleep(max(0.0, began + number / RATE - time.monotonic()))
        publisher.publish(EventBatch(time.time(), stored))
    await publisher.flush()
    return range(first, first + count)


async def _check_all_were_served(slow: Hand, replayed: int) -> None:
    counts = await slow.reply()
    if counts != [replayed] * CLIENTS:
        raise BenchmarkError(f"of {replayed} batches each, the slow clients got {counts}")


def note_ages(boss: Boss, endpoint: str) -> None:
    """Role: receive until the last batch; reply with how old each was, in seconds, by its number."""
    subscriber: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
    subscriber.set_hwm(0)
    subscriber.subscribe(b"")
    subscriber.connect(endpoint)
    boss.reply("connected")
    ages = {}
    while True:
        _, seq, payload = subscriber.recv_multipart()
        (ts,) = struct.unpack_from(">d", payload, 2)  # an array of 3, then a float
        if ts == LAST_TS:
            break
        ages[int.from_bytes(seq, "big")] = time.time() - ts
    boss.reply(ages)
    boss.plain_order()
    subscriber.close(0)


def replay_slowly(boss: Boss, endpoint: str) -> None:
    """Role: an order is where to begin and how many to read; reply when all have asked, and how many each got."""
    boss.reply("ready")
    while (order := boss.plain_order()) is not None:
        asked = threading.Barrier(CLIENTS + 1)
        with ThreadPoolExecutor(CLIENTS) as pool:
            start, most = order
            answers = [pool.submit(_replay, endpoint, start, most, asked) for _ in range(CLIENTS)]
            asked.wait()
            boss.reply("asked")
        boss.reply([answer.result() for answer in answers])


def _replay(endpoint: str, start: int, most: int, asked: threading.Barrier) -> int:
    """Ask for everything from ``start`` on and read so many; return how many came."""
    client: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    client.rcvhwm = 10
    client.connect(endpoint)
    client.send_multipart(wire.request(start))
    asked.wait()
    count = 0
    while count < most and wire.parse_reply(client.recv_multipart()) is not None:
        count += 1
        time.sleep(PAUSE_S)
    client.close(0)
    return count


if __name__ == "__main__":
    sys.exit(main("events_replay", __doc__, run, repeat=5, seconds=2.5))
