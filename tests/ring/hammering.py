"""What the processes of the litmus tests do: spawned children import it, so nothing of pytest here."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from time import monotonic
from typing import Any

from rings import CORES, content

from aioshm.ring import ShmRingBuffer

PLAIN = 3
AT_LEAST = 300  # messages
LOST_S = 30.0
"""A wake-up that takes longer was lost."""


def wait(possible: Callable[[], bool], parked: memoryview, fence: Callable[[], None], bell: Connection | None) -> int:
    """Wait, as an end of a queue does that sleeps at once; return how often it slept."""
    slept = 0
    while not possible():
        if bell is None:
            os.sched_yield()
            continue
        parked[0] = 1
        fence()
        if possible():  # it came in between; the other end may have seen the flag, and then a ring is on its way
            parked[0] = 0
            break
        assert bell.poll(LOST_S), "a wake-up was lost"
        bell.recv_bytes()
        slept += 1
    return slept


def ring_if(flags: Sequence[memoryview], bells: Sequence[Connection]) -> None:
    for flag, bell in zip(flags, bells, strict=True):
        if flag[0]:
            flag[0] = 0
            bell.send_bytes(b"!")


def write(
    ring: ShmRingBuffer, kind: str, seconds: float, bell: Connection | None, readers: Sequence[Connection], slept: Any
) -> None:
    """Publish in every way there is, for a while; an empty message ends it."""
    cores = CORES[kind]
    core: Any = cores.writer(ring.layout, ring.view)
    room = ring.layout.max_chunk_bytes
    flags = [core.readers_parked[index : index + 1] for index in range(len(readers))]
    core.bind(bytes, PLAIN, True, lambda: ring_if(flags, readers))
    deadline = monotonic() + seconds
    ended = False
    while not ended:
        slept.value += wait(core.free, core.parked, cores.module.memory_fence, bell)
        number = core.seq
        message = content(number, room)
        if monotonic() >= deadline and number >= AT_LEAST:
            ended = core.put(b"")
        elif number % 3 == 0:
            assert core.put(message)
        elif number % 3 == 1:
            assert core.put_many([message, content(number + 1, room)], 0) > 0
        else:
            slot = core.claim(len(message))
            slot.body[: len(message)] = message
            words = slot.header.cast("Q")
            words[0], words[1], words[2], words[3] = PLAIN, number, 0, len(message)
            words.release()
            if core.commit():
                ring_if(flags, readers)
    for flag in flags:
        flag.release()
    core.close()
    ring.close()


def read(ring: ShmRingBuffer, kind: str, index: int, bell: Connection | None, writer: Connection, slept: Any) -> None:
    """Take in every way there is, and check each byte."""
    cores = CORES[kind]
    core: Any = cores.reader(ring.layout, ring.view, index)
    room = ring.layout.max_chunk_bytes
    core.bind(bytes, PLAIN, True, lambda: ring_if([core.writer_parked], [writer]))
    ended = False
    while not ended:
        slept.value += wait(core.ready, core.parked, cores.module.memory_fence, bell)
        number = core.seq
        if number % 3 == 0:
            messages = core.take_many(4)
        elif number % 3 == 1:
            messages = [core.take()]
        else:
            slot = core.peek()
            messages = [bytes(slot.body[: int.from_bytes(slot.header[24:32], "little")])]
            if core.release():
                ring_if([core.writer_parked], [writer])
        for offset, message in enumerate(messages):
            ended = message == b""
            assert ended or message == content(number + offset, room), f"message {number + offset}"
    assert not core.ready()
    core.close()
    ring.close()
