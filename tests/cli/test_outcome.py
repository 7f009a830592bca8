"""Commands and signals: whenever one comes, the loop and the work are closed, and the end is that of the signal."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import uvloop

from aioshm.cli import outcome

MAKES = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture(params=[signal.SIGINT, signal.SIGTERM])
def strike(request: pytest.FixtureRequest) -> Iterator[Callable[[], None]]:
    """Return what sends this process a signal; its handlers are the same afterwards."""
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    yield lambda: os.kill(os.getpid(), request.param)
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_more_signals_do_not_interrupt_the_cleaning_up(
    loop: str, strike: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    cleaned: list[str] = []
    loops: list[asyncio.AbstractEventLoop] = []

    async def work() -> None:
        try:
            strike()
            await asyncio.sleep(20)
        finally:
            for _ in range(3):
                strike()
                with suppress(asyncio.CancelledError):
                    await asyncio.sleep(0.01)
                    cleaned.append("the work")
            asyncio.ensure_future(lasting())  # noqa: RUF006 -- which the end of the loop cancels
            await asyncio.sleep(0)

    async def lasting() -> None:
        try:
            await asyncio.sleep(20)
        finally:
            strike()
            await asyncio.sleep(0.01)
            cleaned.append("the loop")

    def make() -> Any:
        loops.append(MAKES[loop]())
        return loops[0]

    monkeypatch.setattr(outcome, "loop_factory", lambda _name: make)
    with pytest.raises(outcome.CommandFailed, match=r"interrupted|terminated"):
        outcome.run_interruptibly(work(), loop)
    assert cleaned == ["the work"] * 3 + ["the loop"]
    assert loops[0].is_closed()


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_what_fails_because_of_a_signal_is_an_interruption(loop: str, strike: Callable[[], None]) -> None:
    async def work() -> None:
        strike()
        raise BrokenPipeError("a process that the signal has reached, too, is gone")

    with pytest.raises(outcome.CommandFailed, match=r"interrupted|terminated"):
        outcome.run_interruptibly(work(), loop)


def test_what_fails_by_itself_is_none() -> None:
    async def work() -> None:
        raise BrokenPipeError("mine")

    with pytest.raises(BrokenPipeError, match="mine"):
        outcome.run_interruptibly(work())
