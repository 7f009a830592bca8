"""What waiting costs on a machine: the writer tells it in the ring's header, and readers begin with it."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from aioshm import MessageQueue, Options
from aioshm.lifeline.bell import HAVE_EVENTFD, Bell
from aioshm.process.loop_thread import process_lock
from aioshm.queue.ends import waiting
from aioshm.queue.ends.waiting import new_poller
from aioshm.ring import RingReader, RingWriter, ShmRingBuffer
from aioshm.ring import layout as at
from aioshm.wait import poller as poller_module
from aioshm.wait.calibration import Calibration
from aioshm.wait.costs import TIMER_BOUNDS_NS, TYPICAL, WAKE_UP_BOUNDS_NS, YIELD_BOUNDS_NS, Costs

WRITERS = Costs(wake_up_ns=5_000, timer_ns=3_000, yield_ns=300)
OWN = Costs(wake_up_ns=30_000, timer_ns=20_000, yield_ns=800)

Wait = Callable[[RingWriter | RingReader], None]


class Process(Calibration):
    """What a process knows, and how often it has measured."""

    def __init__(self, costs: Costs) -> None:
        super().__init__(self._measured)
        self.measurements = 0
        self._found = costs

    def _measured(self) -> Costs:
        self.measurements += 1
        return self._found


@pytest.fixture
def ring() -> Iterator[ShmRingBuffer]:
    it = ShmRingBuffer(2, 4096, 4)
    yield it
    it.close()


@pytest.fixture
def ends(ring: ShmRingBuffer) -> Iterator[tuple[RingWriter, RingReader, RingReader]]:
    cursors = ring.writer(), ring.reader(0), ring.reader(1)
    yield cursors
    for cursor in cursors:
        cursor.close()


@pytest.fixture(params=["awaited", "blocking"])
def wait(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Wait:
    """Wait once at an end of a ring whose other ends are in other processes, as `process` has it."""
    monkeypatch.setattr(waiting, "usable_cpus", lambda **_: 4)

    def once(cursor: RingWriter | RingReader) -> None:
        blocks = request.param == "blocking"
        loop = asyncio.new_event_loop()
        bell = Bell.create() if blocks and HAVE_EVENTFD else None
        poller = new_poller(loop, Options(), cursor, [os.getppid()], lambda _: True, bell, bool if blocks else None)
        looks = iter([False])
        waiting_once = poller.wait(lambda: next(looks, True), 0, 0)
        try:
            if blocks:
                with pytest.raises(StopIteration):
                    waiting_once.send(None)
                process_lock.owner = 0
            else:
                loop.run_until_complete(waiting_once)
        finally:
            poller.close()
            loop.close()
            if bell is not None:
                bell.close()

    return once


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Callable[[Costs], Process]:
    """Go on as another process, whose machine has these figures."""

    def other(costs: Costs) -> Process:
        it = Process(costs)
        monkeypatch.setattr(poller_module, "calibration", it)
        return it

    return other


class TestWaits:
    def test_a_reader_that_finds_figures_does_not_measure(self, ends: Any, wait: Wait, process: Any) -> None:
        writer, reader, other = ends
        writers = process(WRITERS)
        wait(writer)
        assert writers.measurements == 1
        for cursor in (reader, other):
            readers = process(OWN)
            wait(cursor)
            assert readers.measurements == 0
            assert readers.costs() == WRITERS

    def test_a_writer_that_has_not_measured_leaves_zeros(self, ends: Any, wait: Wait, process: Any) -> None:
        _, reader, _ = ends
        assert reader.costs() == (0, 0, 0)
        readers = process(OWN)
        wait(reader)
        assert readers.measurements == 1
        assert readers.costs() == OWN
        assert reader.costs() == (0, 0, 0), "what a reader knows stays with it"

    def test_a_writer_whose_process_knows_tells_before_it_waits(self, ends: Any, wait: Wait, process: Any) -> None:
        writer, reader, _ = ends
        process(WRITERS).costs()
        poller = new_poller(asyncio.new_event_loop(), Options(), writer, [os.getppid()], lambda _: True, None, None)
        poller._loop.close()
        poller.close()
        assert reader.costs() == (5_000, 3_000, 300)

    def test_what_the_writer_learns_is_told_too(self, ends: Any, wait: Wait, process: Any) -> None:
        writer, reader, _ = ends
        writers = process(WRITERS)
        wait(writer)
        for _ in range(200):
            writers.woke(100_000)
        wait(writer)
        assert reader.costs()[0] > 50_000
        assert Costs.told(reader.costs()) == writers.costs()

    def test_who_knows_already_keeps_to_that(self, ends: Any, wait: Wait, process: Any) -> None:
        writer, reader, _ = ends
        process(WRITERS)
        wait(writer)
        readers = process(OWN)
        readers.costs()
        wait(reader)
        assert readers.costs() == OWN

    @pytest.mark.parametrize("place", range(at.N_COSTS))
    @pytest.mark.parametrize("nonsense", [0, 1, 10**6, (1 << 63) + 5_000, (1 << 64) - 1])
    def test_nonsense_is_ignored(self, ends: Any, wait: Wait, process: Any, place: int, nonsense: int) -> None:
        writer, reader, _ = ends
        figures = [5_000, 3_000, 300]
        figures[place] = nonsense
        writer.set_costs(figures)
        readers = process(OWN)
        wait(reader)
        assert readers.measurements == 1
        assert readers.costs() == OWN


class TestTold:
    def test_the_bounds_are_within(self) -> None:
        for figures in zip(WAKE_UP_BOUNDS_NS, TIMER_BOUNDS_NS, YIELD_BOUNDS_NS, strict=True):
            assert Costs.told(figures) == Costs(*figures)

    def test_what_is_told_is_understood(self) -> None:
        assert Costs.told(TYPICAL.to_tell()) == TYPICAL
        assert len(TYPICAL.to_tell()) == at.N_COSTS

    def test_nothing_told(self) -> None:
        assert Costs.told(()) is None


CHILD = """
import asyncio, sys
from aioshm import MessageQueue
from aioshm.queue import Handle
from aioshm.queue.merge import merge
from aioshm.wait.calibration import calibration, measured

measurements = []
def probe():
    measurements.append(1)
    return measured()
calibration._measure = probe

async def main():
    async with MessageQueue.create_from_handle(Handle.from_json(sys.argv[1]), 0) as reader:
        await reader.wait_until_ready(20)
        messages = aiter(merge({0: reader})) if sys.argv[2] == "merged" else aiter(reader)
        waiting = asyncio.ensure_future(anext(messages))
        while calibration.known is None:
            await asyncio.sleep(0)
        print(len(measurements), *calibration.known.to_tell(), flush=True)
        await waiting
asyncio.run(main())
"""


@pytest.mark.slow_on_uvloop
@pytest.mark.parametrize("how", ["alone", "merged"])
async def test_a_reader_in_a_process_of_its_own(process: Any, how: str) -> None:
    process(WRITERS).costs()
    async with MessageQueue(1, 1) as writer:
        handle = writer.export_handle().to_json()
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", CHILD, handle, how, stdout=asyncio.subprocess.PIPE
        )
        assert child.stdout is not None
        try:
            await writer.wait_until_ready(20)
            said = await asyncio.wait_for(child.stdout.readline(), 20)
            await writer.enqueue("done")
            assert await asyncio.wait_for(child.wait(), 20) == 0
        finally:
            if child.returncode is None:
                child.kill()
                await child.wait()
    assert said.split()[0] == b"0"
