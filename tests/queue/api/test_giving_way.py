"""A reader that attaches where every CPU is busy: for a while the other ends hand theirs on, once in a turn."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
from pairs import attached

from aioshm import MessageQueue, merge
from aioshm.queue.state import YIELD_AFTER_MESSAGES
from aioshm.ring.ends import GIVE_WAY_NS

ONE_MORE_PLACE: dict[str, Any] = {
    "max_readers": 2,
    "wait": "park",
    "slots": 2 * YIELD_AFTER_MESSAGES,
    "chunks": 2 * YIELD_AFTER_MESSAGES,
}


@pytest.fixture
def handed_on(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Count how often a CPU is handed on, by who does it; spins, which have reasons of their own, are off."""
    who: list[str] = []
    monkeypatch.setattr(os, "sched_yield", lambda: who.append(doing[0]))
    return who


doing = [""]
"""Which end is being used."""


async def pass_turn(writer: MessageQueue, *readers: MessageQueue) -> None:
    """Let each end have its turn, and begin another one."""
    for number in range(YIELD_AFTER_MESSAGES + 1):
        doing[0] = "writer"
        await writer.enqueue(number)
    for index, reader in enumerate(readers):
        doing[0] = f"reader {index}"
        for number in range(YIELD_AFTER_MESSAGES + 1):
            assert await reader.dequeue() == number


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Set what time it is for who gives way, in nanoseconds from now."""
    now = time.monotonic_ns()
    monkeypatch.setattr("aioshm.ring.ends.monotonic_ns", lambda: now + passed[0])
    passed: list[int] = [0]
    return lambda ns: passed.__setitem__(0, ns)


async def test_once_in_a_turn_until_a_newcomer_must_be_there(
    handed_on: list[str], clock: Callable[[int], None]
) -> None:
    async with attached(1, **ONE_MORE_PLACE) as (writer, (reader,)):
        clock(GIVE_WAY_NS)  # since those two have attached
        await pass_turn(writer, reader)
        assert handed_on == []
        async with MessageQueue.create_from_handle(writer.export_handle()) as newcomer:
            await newcomer.wait_until_ready(20)
            clock(2 * GIVE_WAY_NS - 1)
            await pass_turn(writer, reader, newcomer)
            assert sorted(set(handed_on)) == ["reader 0", "reader 1", "writer"]
            handed_on.clear()
            clock(2 * GIVE_WAY_NS)
            await pass_turn(writer, reader, newcomer)
            assert handed_on == []


async def test_so_does_a_merge(handed_on: list[str], clock: Callable[[int], None]) -> None:
    async with attached(1, **ONE_MORE_PLACE) as (writer, (reader,)):
        async with merge({0: reader}) as merged:
            clock(GIVE_WAY_NS)
            for someone_attaches in (False, True):
                handed_on.clear()
                doing[0] = "writer"
                for number in range(YIELD_AFTER_MESSAGES + 1):
                    await writer.enqueue(number)
                doing[0] = "merge"
                for number in range(YIELD_AFTER_MESSAGES + 1):
                    assert await anext(merged) == (0, number)
                assert ("merge" in handed_on) is someone_attaches  # more than once where turns end by the clock
                if not someone_attaches:
                    newcomer = MessageQueue.create_from_handle(writer.export_handle())
                    await newcomer.wait_until_ready(20)
        await newcomer.aclose()
