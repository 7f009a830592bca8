"""Round trips between two processes, and how long it takes to wake a reader that is just going to sleep."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from statistics import median

from benchmarks.cast import Cast, on_stage
from benchmarks.crew import Boss, Crew
from benchmarks.harness import Settings, main, percentile, progress
from benchmarks.payloads import SHORT_BYTES, Payload
from benchmarks.report import Promise, Report
from benchmarks.rivals import ReaderEnd, Receiver, Sender, WriterEnd

ROUND_TRIP_SHARE = 0.1
"""The promised p50 of a 64-byte round trip, as a share of zmq.asyncio's."""

LOST_WAKE_UP_MS = 100.0
"""The promised bound of the slowest wake-up: a reader that was not woken would sleep until something else happens."""

PAIRS = 2000
QUICK_PAIRS = 50
MAX_GAP_US = 400.0
"""The longest time between a pair's messages: longer than any reader here looks around before it sleeps."""

PROBE_ROUND_TRIPS = 20
MIN_ROUND_TRIPS = 20
MAX_ROUND_TRIPS = 20_000
WARM_UP = 0.1
"""The share of the round trips that come before the clock starts."""

PARKING = "parking reader"


@dataclass(frozen=True)
class Echo:
    """An order: send back so many messages of a kind."""

    kind: int
    count: int


@dataclass(frozen=True)
class Pairs:
    """An order: receive so many pairs of messages, acknowledge each pair, and reply with `Wakes`."""

    kind: int
    count: int


@dataclass(frozen=True)
class Wakes:
    """How pairs' second messages arrived.

    Attributes:
        late_ns: How long after it was sent each one was there.
        parked: How many of them found the reader asleep, if it can tell.
    """

    late_ns: list[int]
    parked: int | None


async def run(settings: Settings, report: Report) -> None:
    """Measure, and hold the results against the promises."""
    payloads = [SHORT_BYTES, *settings.payloads]
    with Crew(settings.loop_factory) as crew:
        async with AsyncExitStack() as stack:
            progress("starting a reader of each contestant")
            casts = [
                await stack.enter_async_context(on_stage(crew, rival, answer, payloads, both_ways=True))
                for rival in settings.rivals
            ]
            for kind, payload in enumerate(payloads):
                progress(f"{payload.name}: round trips, {settings.repeat} time(s)")
                await _contest_of_round_trips(settings, report, casts, kind, payload)
            progress(f"{PARKING}: pairs, {settings.repeat} time(s)")
            await _contest_of_wakes(settings, report, casts, payloads.index(SHORT_BYTES))
    _hold_against_promises(report)


async def _contest_of_round_trips(
    settings: Settings, report: Report, casts: Sequence[Cast], kind: int, payload: Payload
) -> None:
    counts = []
    for cast in casts:
        probe = await _round_trips(cast, kind, payload, PROBE_ROUND_TRIPS)
        wanted = int(settings.seconds * 1e6 / median(probe))
        counts.append(max(MIN_ROUND_TRIPS, min(MAX_ROUND_TRIPS, wanted)))
    for _ in range(settings.repeat):
        for cast, count in zip(casts, counts, strict=True):
            times = await _round_trips(cast, kind, payload, count)
            report.result(payload.name, cast.name).add(
                p50_us=percentile(times, 50), p99_us=percentile(times, 99), max_us=max(times)
            )


async def _round_trips(cast: Cast, kind: int, payload: Payload, count: int) -> list[float]:
    """Return how long each took, in microseconds."""
    warm_up = max(1, int(count * WARM_UP))
    cast.hands[0].order(Echo(kind, warm_up + count))
    send, receive = cast.senders[kind].send, cast.receivers[kind].receive
    times = []
    for number in range(warm_up + count):
        message = payload.message(number)
        began = time.perf_counter()
        await send(message)
        answer = await receive()
        times.append((time.perf_counter() - began) * 1e6)
        payload.check(answer, number)
    await cast.hands[0].reply()
    return times[warm_up:]


async def _contest_of_wakes(settings: Settings, report: Report, casts: Sequence[Cast], kind: int) -> None:
    count = QUICK_PAIRS if settings.quick else PAIRS
    gaps = [MAX_GAP_US * n / count for n in range(count)]
    random.Random(count).shuffle(gaps)
    for _ in range(settings.repeat):
        for cast in casts:
            wakes = await _wakes(cast, kind, gaps)
            times = [late / 1e3 for late in wakes.late_ns]
            result = report.result(PARKING, cast.name)
            result.add(p50_us=percentile(times, 50), p99_us=percentile(times, 99), max_us=max(times))
            if wakes.parked is not None:
                result.add(parked_percent=100 * wakes.parked / count)


async def _wakes(cast: Cast, kind: int, gaps_us: Sequence[float]) -> Wakes:
    """Send pairs whose second message comes at any moment in which the reader, done with the first, may be parking."""
    cast.hands[0].order(Pairs(kind, len(gaps_us)))
    send, receive = cast.senders[kind].send, cast.receivers[kind].receive
    for gap in gaps_us:
        await send(None)
        _pause(gap / 1e6)
        await send(time.monotonic_ns())
        await receive()
    wakes = await cast.hands[0].reply()
    assert isinstance(wakes, Wakes)
    return wakes


def _pause(seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        time.sleep(0)  # lets a contestant's own threads work


async def answer(boss: Boss, ends: Sequence[ReaderEnd], back: Sequence[WriterEnd], payloads: Sequence[Payload]) -> None:
    """Role: send messages back, or acknowledge pairs of them."""
    receivers, senders = [], []
    for reader, writer in zip(ends, back, strict=True):
        receivers.append(await reader.open())
        senders.append(await writer.open())
    boss.reply("ready")
    while (order := await boss.order()) is not None:
        receiver, sender = receivers[order.kind], senders[order.kind]
        if isinstance(order, Echo):
            await _echo(receiver, sender, payloads[order.kind], order.count)
            boss.reply("done")
        else:
            boss.reply(await _acknowledge_pairs(receiver, sender, order.count))
    for receiver, sender in zip(receivers, senders, strict=True):
        await receiver.aclose()
        await sender.aclose()


async def _echo(receiver: Receiver, sender: Sender, payload: Payload, count: int) -> None:
    receive, send, check = receiver.receive, sender.send, payload.check
    for number in range(count):
        message = await receive()
        check(message, number)
        await send(message)


async def _acknowledge_pairs(receiver: Receiver, sender: Sender, count: int) -> Wakes:
    late_ns = []
    parked = 0
    for _ in range(count):
        await receiver.receive()
        parks_before = receiver.parks()
        sent_ns = await receiver.receive()
        late_ns.append(time.monotonic_ns() - sent_ns)
        parks = receiver.parks()
        parked += parks != parks_before
        await sender.send(None)
    return Wakes(late_ns, None if parks is None else parked)


def _hold_against_promises(report: Report) -> None:
    ours, theirs = report.find(SHORT_BYTES.name, "aioshm"), report.find(SHORT_BYTES.name, "zmq.asyncio")
    if ours and theirs:
        report.promises.append(
            Promise(
                f"p50 of a 64-byte round trip, against zmq.asyncio (at most {ROUND_TRIP_SHARE:g}x)",
                ours.median("p50_us") / theirs.median("p50_us"),
                "x",
                ROUND_TRIP_SHARE,
            )
        )
    parking = report.find(PARKING, "aioshm")
    if parking:
        report.promises.append(
            Promise(
                f"slowest of all wake-ups of a reader that was just parking (at most {LOST_WAKE_UP_MS:g} ms)",
                parking.worst("max_us") / 1e3,
                "ms",
                LOST_WAKE_UP_MS,
            )
        )


if __name__ == "__main__":
    sys.exit(main("latency", __doc__, run, repeat=3, seconds=0.5))
