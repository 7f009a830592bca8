"""Publish against take, and park against wake, between processes: every byte is checked, no wake-up may be lost.

``LITMUS_SECONDS=60`` lets each of these run for longer, in the slow lane.
"""

from __future__ import annotations

import itertools
import os
from multiprocessing import get_context

import pytest
from hammering import read, write
from rings import CORES, NewRing

from aioshm.ring import cores

LONG_S = float(os.environ.get("LITMUS_SECONDS", "0.7"))

spawn = get_context("spawn")
kinds = [kind for kind in CORES if kind != "ordered"] if cores.STRONG_ORDER else [*CORES]
pairs = [*itertools.product(kinds, kinds)]
for_long = [pytest.mark.slow, pytest.mark.timeout(LONG_S + 180)]


@pytest.mark.parametrize(
    ("sleeps", "n_reader", "chunks", "writer", "reader", "seconds"),
    [
        *(
            (*how, *pair, 0.2)
            for how in ((False, 1, 5), (True, 2, 3))
            for pair in pairs
            if len(kinds) == 1 or pair[0] != pair[1]
        ),
        *(pytest.param(*how, *pair, LONG_S, marks=for_long) for how in ((False, 2, 1), (True, 1, 1)) for pair in pairs),
    ],
)
def test_every_byte_arrives_and_no_wake_up_is_lost(
    new_ring: NewRing, sleeps: bool, n_reader: int, chunks: int, writer: str, reader: str, seconds: float
) -> None:
    if sleeps and not cores.FULL_FENCE:
        pytest.skip("without a full fence parked ends look again by the clock")
    ring = new_ring(n_reader, 3000, chunks)
    woken, wakes = zip(*(spawn.Pipe(duplex=False) for _ in range(1 + n_reader)), strict=True)
    slept = [spawn.Value("Q", 0) for _ in woken]
    bells = woken if sleeps else [None] * len(woken)
    processes = [
        spawn.Process(target=read, args=(ring, reader, index, bells[1 + index], wakes[0], slept[1 + index]))
        for index in range(n_reader)
    ]
    processes.append(spawn.Process(target=write, args=(ring, writer, seconds, bells[0], wakes[1:], slept[0])))
    for process in processes:
        process.start()
    for process in processes:
        process.join(seconds + 90)
    for process in processes:
        process.kill()
        process.join()
    for bell in (*woken, *wakes):
        bell.close()
    assert [process.exitcode for process in processes] == [0] * len(processes)
    assert [each.value > 0 for each in slept] == [sleeps] * len(slept), "each end slept, if any"
    end = ring.writer()
    assert [end.messages_read(index) for index in range(n_reader)] == [end.messages_written()] * n_reader
    end.close()
