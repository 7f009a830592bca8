"""A reader that moves, but too slowly, is named: who it is, for how long, how far behind."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time

import pytest
from faces import reading
from pairs import EITHER_PLACE
from remotes import ready_ends
from support import eventually

from aioshm import MessageQueue, QueueClosed
from aioshm.queue.ends.room import LagWatch

pytestmark = pytest.mark.slow_on_uvloop

Report = tuple[int, float, float]


class TestTheSum:
    """Times are made up."""

    @pytest.fixture
    def reports(self) -> list[Report]:
        return []

    @pytest.fixture
    def watch(self, reports: list[Report]) -> LagWatch:
        return LagWatch(10, 60, lambda *report: reports.append(report))

    def test_of_waits_for_the_same_reader(self, watch: LagWatch, reports: list[Report]) -> None:
        for second in range(25):
            watch.waited([3], second, second + 0.75)
        assert reports == [(3, 10.75, 8.25), (3, 20.75, 15.75)]

    def test_is_forgotten_when_the_writer_has_waited_for_less_than_half_of_the_time(
        self, watch: LagWatch, reports: list[Report]
    ) -> None:
        for second in range(100):
            watch.waited([3], second, second + 0.25)
        assert reports == []

    def test_begins_anew_after_a_pause(self, watch: LagWatch, reports: list[Report]) -> None:
        for start in (0, 20, 40):
            for second in range(start, start + 9):
                watch.waited([3], second, second + 0.75)
        assert reports == []

    def test_is_each_readers_own(self, watch: LagWatch, reports: list[Report]) -> None:
        for second in range(0, 40, 2):
            watch.waited([1], second, second + 1)
            watch.waited([2], second + 1, second + 1.9)
        assert {rank for rank, *_ in reports} == {1}

    def test_has_no_part_in_what_is_reported_as_a_stall(self, watch: LagWatch, reports: list[Report]) -> None:
        watch.waited([3], 0, 60)
        watch.waited([3], 60, 61)
        assert reports == []


async def read_slowly(reader: MessageQueue, pause_s: float) -> None:
    try:
        while True:
            await reader.dequeue(20)
            await asyncio.sleep(pause_s)
    except QueueClosed:
        pass


def lags(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text for record in caplog.records if "held back" in (text := record.getMessage())]


@EITHER_PLACE
async def test_the_slowest_of_two_readers(n_local: int, n_remote: int, caplog: pytest.LogCaptureFixture) -> None:
    async with ready_ends(n_local * 2, n_remote * 2, chunks=2, remote_window=4, lag_warning_s=0.3) as (
        writer,
        (quick, slow),
    ):
        readings = [asyncio.ensure_future(read_slowly(quick, 0)), asyncio.ensure_future(read_slowly(slow, 0.02))]
        deadline = time.monotonic() + 20
        while len(lags(caplog)) < 2:
            assert time.monotonic() < deadline
            await writer.enqueue("x", 20)
        closing = asyncio.ensure_future(writer.aclose())
        await asyncio.gather(*readings, closing)
    for report in lags(caplog):
        assert f"by rank 1 (pid {os.getpid()}" in report
        assert "rank 0" not in report
        assert re.search(r", [1-9]\d* messages behind: \d+% of that time", report)


async def test_nobody_where_the_writer_is_what_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    async with ready_ends(1, 0, chunks=64, lag_warning_s=0.1) as (writer, (reader,)):
        receiving = asyncio.ensure_future(read_slowly(reader, 0))
        for _ in range(60):
            await writer.enqueue("x", 20)
            await asyncio.sleep(0.005)
        await writer.aclose()
        await receiving
    assert lags(caplog) == []


def test_on_the_blocking_face(caplog: pytest.LogCaptureFixture) -> None:
    def read(reader: object) -> None:
        for _ in reader:  # type: ignore[attr-defined]
            time.sleep(0.02)

    with caplog.at_level(logging.WARNING, "aioshm"), reading(read, chunks=2, lag_warning_s=0.3) as (writer, thread):

        def reported() -> bool:
            writer.enqueue("x", 20)
            return bool(lags(caplog))

        eventually(reported, "the report", 20)
        writer.close()
        thread.result()
    held = rf"held back for \d\.\d s by rank 0 \(pid {os.getpid()}, .*\), [12] messages behind"
    assert re.search(held, lags(caplog)[0])
