"""One writer sends to some readers as fast as it can; all contestants in turn, again and again."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from benchmarks.cast import Cast, on_stage
from benchmarks.crew import Boss, Crew
from benchmarks.harness import Settings, progress
from benchmarks.payloads import MIB, Payload
from benchmarks.report import Report
from benchmarks.rivals import ReaderEnd, Receiver, WriterEnd

WARM_UP = 0.1
"""The share of the messages that pass before the clock starts."""

MIN_MESSAGES = 8
MAX_MESSAGES = 200_000
MAX_BYTES = 1024 * MIB
"""What one measurement sends at most: a contestant without a bound on what is under way may hold all of it."""


@dataclass(frozen=True)
class Stream:
    """An order: read so many messages.

    Attributes:
        kind: Of which kind, as an index.
        warm_up: Messages before the clock starts.
        count: Messages by the clock.
    """

    kind: int
    warm_up: int
    count: int


async def measure_streams(settings: Settings, report: Report, readers: Sequence[int]) -> None:
    """Note the messages/s of each contestant, for each kind of message and each number of readers."""
    with Crew(settings.loop_factory) as crew:
        for n_reader in readers:
            progress(f"starting {n_reader} reader(s) of each contestant")
            async with AsyncExitStack() as stack:
                casts = [
                    await stack.enter_async_context(
                        on_stage(crew, rival, read_streams, settings.payloads, n_reader=n_reader)
                    )
                    for rival in settings.rivals
                ]
                for kind, payload in enumerate(settings.payloads):
                    progress(f"{payload.name} to {n_reader} reader(s), {settings.repeat} time(s)")
                    await _contest(settings, report, casts, kind, payload)


async def _contest(settings: Settings, report: Report, casts: Sequence[Cast], kind: int, payload: Payload) -> None:
    streams = [await _plan(cast, kind, payload, settings.seconds) for cast in casts]
    for _ in range(settings.repeat):
        for cast, stream in zip(casts, streams, strict=True):
            rate = await _run(cast, payload, stream)
            report.result(payload.name, cast.name, len(cast.hands)).add(messages_per_s=rate)


async def _plan(cast: Cast, kind: int, payload: Payload, seconds: float) -> Stream:
    """Find out how many messages take about this long. That also touches each slot for the first time."""
    rate = await _run(cast, payload, Stream(kind, payload.slots, payload.slots))
    most = min(MAX_MESSAGES, MAX_BYTES // payload.nbytes)
    count = max(MIN_MESSAGES, min(most, int(rate * seconds)))
    return Stream(kind, max(1, int(count * WARM_UP)), count)


async def _run(cast: Cast, payload: Payload, stream: Stream) -> float:
    """Return the messages/s at the slowest reader."""
    for hand in cast.hands:
        hand.order(stream)
    send, message = cast.senders[stream.kind].send, payload.message
    for number in range(stream.warm_up + stream.count):
        await send(message(number))
    slowest = max([await hand.reply() for hand in cast.hands])
    return stream.count / float(slowest)


async def read_streams(
    boss: Boss, ends: Sequence[ReaderEnd], _back: Sequence[WriterEnd], payloads: Sequence[Payload]
) -> None:
    """Role: read streams and reply with the seconds that each took."""
    receivers = [await end.open() for end in ends]
    boss.reply("ready")
    while (stream := await boss.order()) is not None:
        boss.reply(await _read(receivers[stream.kind], payloads[stream.kind], stream))
    for receiver in receivers:
        await receiver.aclose()


async def _read(receiver: Receiver, payload: Payload, stream: Stream) -> float:
    receive, check = receiver.receive, payload.check
    for number in range(stream.warm_up):
        check(await receive(), number)
    began = time.perf_counter()
    for number in range(stream.warm_up, stream.warm_up + stream.count):
        check(await receive(), number)
    return time.perf_counter() - began
