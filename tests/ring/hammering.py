"""What the processes of the litmus tests do: spawned children import it, so nothing of pytest here."""

from __future__ import annotations

import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from time import monotonic
from typing import Any

from rings import CORES, content

from aioshm.ring import ShmRingBuffer

PLAIN = 3
LOST_S = 30.0
"""A wake-up that takes longer was lost."""


def hammer(ring: ShmRingBuffer, kind: str, seconds: float, at_least: int) -> None:
    """Publish as fast as it goes, in every way there is, for a while and so many messages; an empty one ends it."""
    writer = CORES[kind].writer(ring.layout, ring.view)
    core, room = writer, ring.layout.max_chunk_bytes
    core.bind(bytes, PLAIN, True, None)
    deadline = monotonic() + seconds
    while monotonic() < deadline or core.seq < at_least:
        for _ in range(50):
            number = core.seq
            if number % 3:
                sent = core.put(content(number, room))
            else:
                sent = core.put_many([content(number + more, room) for more in range(3)], 0) > 0
            if not sent:
                os.sched_yield()
    while not core.put(b""):
        os.sched_yield()
    writer.close()
    ring.close()


def check(ring: ShmRingBuffer, kind: str, index: int) -> None:
    """Take as fast as it goes, in every way there is, and check each byte."""
    reader = CORES[kind].reader(ring.layout, ring.view, index)
    core, room = reader, ring.layout.max_chunk_bytes
    core.bind(bytes, PLAIN, True, None)
    nothing = CORES[kind].module.EMPTY
    ended = False
    while not ended:
        number = core.seq
        if number % 3 == 0:
            messages = core.take_many(4)
        elif number % 3 == 1:
            message = core.take()
            messages = [] if message is nothing else [message]
        else:
            slot = core.peek()
            messages = [] if slot is None else [bytes(slot.body[: int.from_bytes(slot.header[24:32], "little")])]
            if slot is not None:
                core.release()
        for offset, message in enumerate(messages):
            ended = message == b""
            assert ended or message == content(number + offset, room), f"message {number + offset}"
        if not messages:
            os.sched_yield()
    assert not core.ready()
    reader.close()
    ring.close()


def sleep_until(possible: Callable[[], bool], parked: memoryview, fence: Callable[[], None], bell: Connection) -> int:
    """Wait as an end of a queue does that sleeps at once; return how often it slept."""
    slept = 0
    while not possible():
        parked[0] = 1
        fence()
        if possible():  # it came in between; the other end may have seen the flag, and then a ring is on its way
            parked[0] = 0
            break
        assert bell.poll(LOST_S), "a wake-up was lost"
        bell.recv_bytes()
        slept += 1
    return slept


def ring_if(flags: list[memoryview], bells: list[Connection]) -> None:
    for flag, bell in zip(flags, bells, strict=True):
        if flag[0]:
            flag[0] = 0
            bell.send_bytes(b"!")


def park_and_write(
    ring: ShmRingBuffer,
    kind: str,
    seconds: float,
    at_least: int,
    bell: Connection,
    readers: list[Connection],
    slept: Any,
) -> None:
    """Publish, by hand and in one call, for a while and so many messages.

    Sleep where no slot is free, wake the readers that sleep.
    """
    cores = CORES[kind]
    writer = cores.writer(ring.layout, ring.view)
    core: Any = writer
    flags = [writer.readers_parked[index : index + 1] for index in range(len(readers))]
    core.bind(bytes, PLAIN, True, lambda: ring_if(flags, readers))
    deadline = monotonic() + seconds
    ended = False
    while not ended:
        slept.value += sleep_until(writer.free, writer.parked, cores.module.memory_fence, bell)
        ended = monotonic() >= deadline and core.seq >= at_least
        message = b"" if ended else content(core.seq, ring.layout.max_chunk_bytes)
        if core.seq % 2:
            assert core.put(message)
            continue
        slot = core.claim(len(message))
        slot.body[: len(message)] = message
        words = slot.header.cast("Q")
        words[0], words[1], words[2], words[3] = PLAIN, core.seq, 0, len(message)
        words.release()
        if core.commit():
            ring_if(flags, readers)
    for flag in flags:
        flag.release()
    writer.close()
    ring.close()


def park_and_read(ring: ShmRingBuffer, kind: str, index: int, bell: Connection, writer: Connection, slept: Any) -> None:
    """Take, by hand and in one call; sleep where there is nothing; wake the writer if it sleeps."""
    cores = CORES[kind]
    reader = cores.reader(ring.layout, ring.view, index)
    core: Any = reader
    flags = [reader.writer_parked]
    core.bind(bytes, PLAIN, True, lambda: ring_if(flags, [writer]))
    ended = False
    while not ended:
        slept.value += sleep_until(reader.ready, reader.parked, cores.module.memory_fence, bell)
        number = core.seq
        if number % 3:
            message = core.take()
        else:
            slot = core.peek()
            message = bytes(slot.body[: int.from_bytes(slot.header[24:32], "little")])
            if core.release():
                ring_if(flags, [writer])
        ended = message == b""
        assert ended or message == content(number, ring.layout.max_chunk_bytes), f"message {number}"
    reader.close()
    ring.close()
