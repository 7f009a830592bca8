"""Queues: writers that come again, readers that come and go, near and far; every message checked, and every number."""

from __future__ import annotations

import asyncio
import signal
import threading
from contextlib import suppress
from typing import Any

import numpy

from aioshm import (
    AioshmError,
    MessageQueue,
    Options,
    PeerClosed,
    QueueEmpty,
    QueueRestarted,
    ReaderDied,
    ReaderJoined,
    ReaderLeft,
    blocking,
)
from tools.campaign.stage import Actor, Part

PATIENCE_S = 90.0
"""How long a call may take that others hold up: some of them are stopped, or have no room."""
MOST_AT_ONCE = 8
LOOK_S = 0.5  # how long a blocking reader waits at a time
SLOTS, CHUNKS, CHUNK_BYTES = 64, 16, 4096

QUEUES: dict[str, dict[str, Any]] = {
    "comers": {"places": 5, "readers": 4, "options": {"on_reader_death": "evict"}},
    "holders": {"places": 2, "readers": 2, "options": {"on_reader_death": "hold", "linger_s": 5.0}},
    "named": {
        "places": 3,
        "readers": 2,
        "options": {"on_reader_death": "evict", "backing": "named", "lifeline": "directory"},
    },
    "far": {
        "places": 3,
        "readers": 3,
        "remote": True,
        "options": {"on_reader_death": "evict", "remote_timeout": 5.0, "remote_window": 64, "remote_history": 32},
    },
}
"""Each with a writer and so many readers; the far one's come through links that are cut."""


def actors() -> list[Actor]:
    """Return who plays here."""
    found = []
    for name, spec in QUEUES.items():
        told = spec | {"queue": name}
        found.append(Actor(f"{name}.writer", "queues:write", told, 0.7))
        for number in range(spec["readers"]):
            play = "queues:read_blocking" if number == 1 and not spec.get("remote") else "queues:read"
            found.append(Actor(f"{name}.reader.{number}", play, told | {"rank": number}, 1.5))
    return found


def body(number: int) -> bytes:
    """Return what a message carries: mostly little, seldom more than a slot, a chunk, or a pipe takes."""
    size = 40_000 if number % 211 == 7 else 9000 if number % 97 == 5 else 3000 if number % 53 == 3 else number % 60
    return bytes([number % 251]) * size


def message(epoch: int, number: int) -> Any:
    """Return a message: a writer, a number and a body; or an array, of one of three kinds, of the same."""
    if number % 13 != 4:
        return epoch, number, body(number)
    array = numpy.full((8, 384, 1200)[number // 13 % 3], number)  # less than a slot, a chunk, more than that
    array[0] = epoch
    return array


def content(received: Any) -> tuple[int, int, bytes | None]:
    """Return writer, number and body of a message, a copy; None for a body if an array has not the right numbers."""
    if not isinstance(received, numpy.ndarray):
        epoch, number, carried = received
        return epoch, number, bytes(carried)
    epoch, number = int(received[0]), int(received[1])
    sent = message(epoch, number)
    alike = numpy.array_equal(received, sent) and received.dtype == sent.dtype
    return epoch, number, body(number) if alike else None


# Writing


async def write(part: Part) -> None:
    """Send numbered messages until the end."""
    spec, journal, chance = part.spec, part.journal, part.chance
    remote = spec.get("remote", False)
    seated = spec["places"] if remote or spec["options"]["on_reader_death"] == "hold" else 0
    options = Options(max_readers=spec["places"], **spec["options"])
    queue: MessageQueue[Any] = MessageQueue(
        seated,
        0 if remote else seated,
        max_chunk_bytes=CHUNK_BYTES,
        max_chunks=CHUNKS,
        slots=SLOTS,
        connect_ip="127.0.0.1" if remote else None,
        options=options,
        name=None if remote else spec["queue"],
        identity=part.work / "far.identity" if remote else None,
    )
    async with queue:
        path = part.work / "handles" / spec["queue"]
        path.with_suffix(".new").write_text(queue.export_handle().to_json())
        path.with_suffix(".new").rename(path)
        watching = asyncio.ensure_future(_watch(queue, part))
        if seated:
            await queue.wait_until_ready(PATIENCE_S)
        number, epoch = 0, int(journal.now() * 1e9)  # process ids come again, this does not
        journal.note("epoch", epoch)
        while not part.stopping.is_set():
            count = chance.choice((1, 1, 1, 2, MOST_AT_ONCE))
            messages = [message(epoch, each) for each in range(number, number + count)]
            async with asyncio.timeout(PATIENCE_S):
                await (queue.enqueue(messages[0]) if count == 1 else queue.enqueue_many(messages))
            number += count
            journal.note("sent", number)
            await asyncio.sleep(0.5 if chance.random() < 0.002 else chance.uniform(0, 0.02))
        journal.note("closing", number)
    with suppress(TimeoutError, asyncio.CancelledError):
        await asyncio.wait_for(watching, 5.0)


async def _watch(queue: MessageQueue[Any], part: Part) -> None:
    async for change in queue.membership():
        if isinstance(change, ReaderJoined):
            part.journal.note("joined", change.rank, change.pid, change.first)
        elif isinstance(change, ReaderDied):
            part.journal.note("died", change.rank, change.pid, change.read, change.held)
        elif isinstance(change, ReaderLeft):
            part.journal.note("left", change.rank, change.pid, change.read, change.evicted)
        else:
            part.journal.note("odd", f"{change}: it was read all the time")


# Reading


def reader(part: Part, face: Any) -> Any:
    """Return a reader's end, found by name or by handle."""
    queue, chance = part.spec["queue"], part.chance
    held = part.spec["options"]["on_reader_death"] == "hold"
    again = chance.random() < 0.5
    if part.spec.get("remote"):
        handle = (part.work / "handles" / f"{queue}.linked").read_text()
        return face.create_from_handle(handle, part.spec["rank"], reconnect=again, history=chance.choice((0, 0, 5)))
    if again or chance.random() < 0.5:
        return face.attach(queue, timeout=None, reconnect=again)
    handle = (part.work / "handles" / queue).read_text()
    return face.create_from_handle(handle, history=0 if held else chance.choice((0, 5)))


def stays_for(part: Part) -> int | None:
    """Return after how many messages a reader leaves; None: it stays."""
    held = part.spec["options"]["on_reader_death"] == "hold"  # one that leaves is not waited for
    return None if held or part.chance.random() < 0.6 else part.chance.randrange(1, 3000)


def note_messages(part: Part, messages: list[tuple[int, int, bytes | None]]) -> None:
    """Write down what came at once."""
    writer, first, _ = messages[0]
    for offset, (who, number, carried) in enumerate(messages):
        if (who, number) != (writer, first + offset) or carried != body(number):
            size = "wrong numbers" if carried is None else f"{len(carried)} bytes"
            part.journal.note("wrong", f"{number} of {who} after {first} of {writer}, with {size}")
    part.journal.note("got", writer, first, len(messages))


async def read(part: Part) -> None:
    """Read until the end, or leave before."""
    await part.until_stopped(_read(part))


async def _read(part: Part) -> None:
    journal, chance = part.journal, part.chance
    try:
        queue: MessageQueue[Any] = reader(part, MessageQueue)
    except FileNotFoundError:  # nobody has begun yet
        return
    left, begun = stays_for(part), False
    try:
        async with queue:
            while left is None or left > 0:
                try:
                    messages = await _receive(queue, chance.random() if begun else 0.0)
                except QueueRestarted:
                    journal.note("restarted")
                    begun = False
                    continue
                except TimeoutError:
                    continue
                if messages:
                    begun = True
                    note_messages(part, messages)
                    left = None if left is None else left - len(messages)
            journal.note("end", "left")
    except PeerClosed:
        journal.note("end", "closed")
    except AioshmError as error:
        journal.note("end", type(error).__name__)
        journal.failed(error)


async def _receive(queue: MessageQueue[Any], way: float) -> list[tuple[int, int, bytes | None]]:
    if way < 0.3:
        return [content(await queue.dequeue())]
    if way < 0.4:
        async for received in queue:
            return [content(received)]
        raise PeerClosed("the iteration has ended")
    if way < 0.6:
        return [content(received) for received in await queue.dequeue_many(MOST_AT_ONCE)]
    if way < 0.7:
        async with queue.lease() as leased:
            return [content(leased)]
    if way < 0.9:  # given up again and again, which loses nothing
        async with asyncio.timeout(0.003):
            return [content(await queue.dequeue())]
    with suppress(QueueEmpty):
        return [content(queue.dequeue_nowait())]
    await asyncio.sleep(0)
    return []


async def read_blocking(part: Part) -> None:
    """Read in a thread without a loop, until the end."""
    asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)
    told = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: told.set())
    await asyncio.to_thread(_read_blocking, part, told)


def _read_blocking(part: Part, told: threading.Event) -> None:
    try:
        queue = reader(part, blocking.MessageQueue)
    except FileNotFoundError:
        return
    left = stays_for(part)
    try:
        with queue:
            while not told.is_set() and (left is None or left > 0):
                try:
                    if part.chance.random() < 0.5:
                        messages = [queue.dequeue(LOOK_S)]
                    else:
                        messages = queue.dequeue_many(MOST_AT_ONCE, LOOK_S)
                except QueueRestarted:
                    part.journal.note("restarted")
                    continue
                except TimeoutError:
                    continue
                note_messages(part, [content(received) for received in messages])
                left = None if left is None else left - len(messages)
            part.journal.note("end", "told" if told.is_set() else "left")
    except PeerClosed:
        part.journal.note("end", "closed")
    except AioshmError as error:
        part.journal.note("end", type(error).__name__)
        part.journal.failed(error)
