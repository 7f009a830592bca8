"""A loop that is written once does the same with and without an event loop."""

from __future__ import annotations

from collections import deque
from contextlib import nullcontext
from typing import Any

import pytest

from benchmarks.framework.loops import (
    Ports,
    read,
    read_leased,
    read_waiting,
    without_awaits,
)
from benchmarks.framework.workload import SMALL_DICT, WrongMessageError


def plain_ports(messages: deque[Any]) -> Ports:
    def lease() -> Any:
        return nullcontext(messages.popleft())

    return Ports(SMALL_DICT, messages.append, messages.popleft, lease, lambda: None)


def awaited_ports(messages: deque[Any]) -> Ports:
    async def put(message: Any) -> None:
        messages.append(message)

    async def take() -> Any:
        return messages.popleft()

    async def turn() -> None:
        pass

    return Ports(SMALL_DICT, put, take, lambda: nullcontext(messages.popleft()), turn)


def numbered(count: int) -> deque[Any]:
    return deque({**SMALL_DICT.make(), "n": number} for number in range(count))


@pytest.mark.parametrize("loop", [read, read_leased])
async def test_both_read_the_same_messages_and_notice_a_wrong_one(loop: Any) -> None:
    assert without_awaits(loop)(plain_ports(numbered(8)), 3, 5) > 0
    assert await loop(awaited_ports(numbered(8)), 3, 5) > 0
    wrong = numbered(8)
    del wrong[4]
    with pytest.raises(WrongMessageError, match="expected number 4"):
        without_awaits(loop)(plain_ports(deque(wrong)), 3, 5)
    with pytest.raises(WrongMessageError, match="expected number 4"):
        await loop(awaited_ports(deque(wrong)), 3, 5)


@pytest.mark.parametrize("missing", range(1, 16, 3))
async def test_messages_that_wait_are_read_in_either_way_and_none_is_passed_over(missing: int) -> None:
    for seconds in (
        without_awaits(read_waiting)(plain_ports(numbered(32)), 0, 4, 2),
        await read_waiting(awaited_ports(numbered(32)), 0, 4, 2),
    ):
        assert [len(of_one_way) for of_one_way in seconds] == [4] * 2
    wrong = numbered(32)
    del wrong[missing]
    with pytest.raises(WrongMessageError, match=f"expected number {missing}"):
        without_awaits(read_waiting)(plain_ports(deque(wrong)), 0, 4, 2)
    with pytest.raises(WrongMessageError, match=f"expected number {missing}"):
        await read_waiting(awaited_ports(deque(wrong)), 0, 4, 2)
