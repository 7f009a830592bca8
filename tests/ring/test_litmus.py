"""Publish against take, and park against wake, between processes: every byte is checked, no wake-up may be lost.

``LITMUS_SECONDS=60`` lets each of these run for longer, in the slow lane.
"""

from __future__ import annotations

import itertools
import os
from multiprocessing import get_context
from multiprocessing.process import BaseProcess

import pytest
from hammering import check, hammer, park_and_read, park_and_write
from rings import CORES, NewRing

from aioshm.ring import ShmRingBuffer, cores

LONG_S = float(os.environ.get("LITMUS_SECONDS", "0.7"))

spawn = get_context("spawn")
kinds = [kind for kind in CORES if kind != "ordered"] if cores.STRONG_ORDER else [*CORES]
for_long = [pytest.mark.slow, pytest.mark.timeout(LONG_S + 180)]
for_a_while_and_for_long = pytest.mark.parametrize(
    ("writer", "reader", "seconds"),
    [
        *((one, other, 0.2) for one, other in itertools.product(kinds, kinds) if one != other or len(kinds) == 1),
        *(pytest.param(one, other, LONG_S, marks=for_long) for one, other in itertools.product(kinds, kinds)),
    ],
)


def run(ring: ShmRingBuffer, processes: list[BaseProcess], seconds: float) -> None:
    for process in processes:
        process.start()
    for process in processes:
        process.join(seconds + 90)
    for process in processes:
        process.kill()
        process.join()
    assert [process.exitcode for process in processes] == [0] * len(processes)
    writer = ring.writer()
    readers = range(ring.layout.n_reader)
    assert [writer.messages_read(reader) for reader in readers] == [writer.messages_written()] * len(readers)
    writer.close()


@for_a_while_and_for_long
@pytest.mark.parametrize(("n_reader", "chunks"), [(1, 5), pytest.param(2, 1, marks=pytest.mark.slow)])
def test_every_byte_arrives(
    new_ring: NewRing, writer: str, reader: str, n_reader: int, chunks: int, seconds: float
) -> None:
    ring = new_ring(n_reader, 3000, chunks)
    readers = [spawn.Process(target=check, args=(ring, reader, index)) for index in range(n_reader)]
    run(ring, [*readers, spawn.Process(target=hammer, args=(ring, writer, seconds, 1000))], seconds)


@for_a_while_and_for_long
@pytest.mark.skipif(not cores.FULL_FENCE, reason="without a full fence parked ends look again by the clock")
@pytest.mark.parametrize(("n_reader", "chunks"), [pytest.param(1, 1, marks=pytest.mark.slow), (2, 3)])
def test_no_wake_up_is_lost(
    new_ring: NewRing, writer: str, reader: str, n_reader: int, chunks: int, seconds: float
) -> None:
    ring = new_ring(n_reader, 1000, chunks)
    woken, wakes = zip(*(spawn.Pipe(duplex=False) for _ in range(1 + n_reader)), strict=True)
    slept = [spawn.Value("Q", 0) for _ in range(1 + n_reader)]
    processes: list[BaseProcess] = [
        spawn.Process(target=park_and_read, args=(ring, reader, index, woken[1 + index], wakes[0], slept[1 + index]))
        for index in range(n_reader)
    ]
    processes.append(
        spawn.Process(target=park_and_write, args=(ring, writer, seconds, 100, woken[0], list(wakes[1:]), slept[0]))
    )
    try:
        run(ring, processes, seconds)
    finally:
        for bell in (*woken, *wakes):
            bell.close()
    assert all(each.value > 0 for each in slept), "each end slept"
