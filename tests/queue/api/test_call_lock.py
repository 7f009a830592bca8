"""The call lock of an end admits one call at a time, in order, and survives every cancellation."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from time import monotonic

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st
from loops import turns
from support import examples, until

from aioshm.errors import QueueCancelled
from aioshm.queue.state import CallLock


class TestCallLock:
    async def test_an_empty_one_needs_no_turn_of_the_loop(self) -> None:
        lock = CallLock()
        for _ in range(3):
            with pytest.raises(StopIteration):
                lock.acquire(None, None).send(None)
            lock.release()

    async def test_the_deadline_and_the_event_leave_the_others_in_line(self) -> None:
        lock, cancel = CallLock(), asyncio.Event()
        await lock.acquire(None, None)
        late = asyncio.ensure_future(lock.acquire(monotonic() + 0.01, None))
        off = asyncio.ensure_future(lock.acquire(None, cancel))
        patient = asyncio.ensure_future(lock.acquire(None, None))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(late, 10)
        await turns(2)
        cancel.set()
        with pytest.raises(QueueCancelled):
            await asyncio.wait_for(off, 10)
        assert not patient.done()
        lock.release()
        await asyncio.wait_for(patient, 10)


actions = st.one_of(
    st.just(("join", 0)),
    st.just(("leave", 0)),
    st.tuples(st.just("cancel"), st.integers(0, 20)),
    st.tuples(st.just("call off"), st.integers(0, 20)),
    st.tuples(st.just("turns"), st.integers(1, 6)),
)


@pytest.mark.slow_on_uvloop
@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
@settings(deadline=None, max_examples=examples(100))
@given(st.lists(actions, max_size=40))
def test_whatever_happens_in_whatever_order(new_loop: object, script: list[tuple[str, int]]) -> None:
    """At most one has the turn, those who get it get it in the order of their coming, and it is free in the end."""

    async def run() -> None:
        lock = CallLock()
        tasks: list[asyncio.Task[None]] = []
        events: list[asyncio.Event] = []
        has_turn: list[int] = []
        served: list[int] = []

        async def join(number: int, cancel: asyncio.Event) -> None:
            await lock.acquire(None, cancel)
            assert has_turn == []
            has_turn.append(number)
            served.append(number)

        for action, argument in script:
            if action == "join":
                events.append(asyncio.Event())
                tasks.append(asyncio.ensure_future(join(len(tasks), events[-1])))
            elif action == "leave" and has_turn:
                has_turn.clear()
                lock.release()
            elif action == "cancel" and tasks:
                tasks[argument % len(tasks)].cancel()
            elif action == "call off" and events:
                events[argument % len(events)].set()
            elif action == "turns":
                await turns(argument)
        while not all(task.done() for task in tasks):
            await until(lambda: has_turn or all(task.done() for task in tasks), "somebody's turn")
            if has_turn:
                has_turn.clear()
                lock.release()
        for task in tasks:
            with suppress(asyncio.CancelledError, QueueCancelled):
                task.result()
        assert served == sorted(served)
        if has_turn:
            lock.release()
        await asyncio.wait_for(lock.acquire(None, None), 10)

    with asyncio.Runner(loop_factory=new_loop) as runner:  # type: ignore[arg-type]
        runner.run(run())
