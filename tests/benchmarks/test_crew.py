"""The processes of a benchmark: orders, failures, deaths."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import forkserver

import pytest

from benchmarks.contestants import CONTESTANTS
from benchmarks.framework.crew import BenchmarkError, Boss, Crew
from benchmarks.framework.stage import on_stage
from benchmarks.framework.workload import SMALL_DICT
from benchmarks.throughput import EVERYWHERE


async def obey(boss: Boss, answer: str) -> None:
    while (order := await boss.order()) is not None:
        if order == "fail":
            raise RuntimeError("as ordered")
        if order == "die":
            os._exit(7)
        boss.reply(f"{answer} {order}")


def fail_at_once(*_: object) -> None:
    raise RuntimeError("no reader today")


@pytest.fixture(scope="module", autouse=True)
def fork_server() -> Iterator[None]:
    """Have what all processes are forked from while these tests run, and not afterwards."""
    with Crew(asyncio.new_event_loop):
        forkserver.ensure_running()
    yield
    forkserver._forkserver._stop()  # type: ignore[attr-defined]


@pytest.fixture
def crew() -> Iterator[Crew]:
    with Crew(asyncio.new_event_loop) as crew:
        yield crew


async def test_a_failure_comes_with_its_reason(crew: Crew) -> None:
    hand = crew.start("a hand", obey, "done:")
    hand.order("fail")
    with pytest.raises(BenchmarkError, match=r"(?s)a hand failed.*as ordered"):
        await hand.reply()


async def test_a_death_is_noticed(crew: Crew) -> None:
    hand = crew.start("a hand", obey, "done:")
    hand.order("die")
    with pytest.raises(BenchmarkError, match="a hand died with exit code 7"):
        await hand.reply()


@pytest.mark.slow_on_uvloop
@pytest.mark.parametrize("name", EVERYWHERE)
async def test_a_reader_that_fails_while_lines_open_ends_the_wait(name: str) -> None:
    [contestant] = [one for one in CONTESTANTS if one.name == name]
    failing = replace(contestant, reader=fail_at_once)
    with pytest.raises(BenchmarkError, match="no reader today"):
        async with on_stage(failing, SMALL_DICT, 1, asyncio.new_event_loop):
            pytest.fail("it opened")
