"""The processes of a benchmark: orders, failures, deaths."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence

import pytest

from benchmarks.cast import on_stage
from benchmarks.crew import BenchmarkError, Boss, Crew
from benchmarks.payloads import SMALL_DICT, Payload
from benchmarks.rivals import RIVALS, ReaderEnd, Rival, WriterEnd


async def obey(boss: Boss, answer: str) -> None:
    while (order := await boss.order()) is not None:
        if order == "fail":
            raise RuntimeError("as ordered")
        if order == "die":
            os._exit(7)
        boss.reply(f"{answer} {order}")


async def fail_at_once(
    _boss: Boss, _ends: Sequence[ReaderEnd], _back: Sequence[WriterEnd], _payloads: Sequence[Payload]
) -> None:
    raise RuntimeError("no reader today")


@pytest.fixture
def crew() -> Iterator[Crew]:
    with Crew(asyncio.new_event_loop) as crew:
        yield crew


async def test_orders_are_answered(crew: Crew) -> None:
    hand = crew.start("a hand", obey, "done:")
    hand.order("sweep")
    assert await hand.reply() == "done: sweep"
    await crew.dismiss([hand])
    assert hand.process.exitcode == 0


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
@pytest.mark.parametrize("rival", RIVALS, ids=lambda rival: rival.name)
async def test_a_reader_that_fails_while_lines_open_ends_the_wait(crew: Crew, rival: Rival) -> None:
    with pytest.raises(BenchmarkError, match="no reader today"):
        async with on_stage(crew, rival, fail_at_once, [SMALL_DICT]):
            pytest.fail("it opened")
