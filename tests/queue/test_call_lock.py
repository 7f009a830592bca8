"""Waiting for the lock of an end: in order, until a deadline, until called off; and no turn is ever lost."""

from __future__ import annotations

import asyncio
import random
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

    async def test_first_come_first_served(self) -> None:
        lock, order = CallLock(), []

        async def use(number: int) -> None:
            await lock.acquire(None, None)
            order.append(number)
            await turns(number % 3)
            assert order[-1] == number, "nobody else has the turn meanwhile"
            lock.release()

        await asyncio.wait_for(asyncio.gather(*(use(number) for number in range(50))), 30)
        assert order == list(range(50))

    async def test_who_joins_while_a_turn_is_handed_over_waits(self) -> None:
        lock = CallLock()
        await lock.acquire(None, None)
        second = asyncio.ensure_future(lock.acquire(None, None))
        await turns(2)
        lock.release()  # the second has the turn, and has not noticed
        third = asyncio.ensure_future(lock.acquire(None, None))
        await asyncio.wait_for(second, 10)
        await turns(5)
        assert not third.done()
        lock.release()
        await asyncio.wait_for(third, 10)

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

    @pytest.mark.parametrize("after", range(6))
    async def test_cancelled_right_after_the_hand_over(self, after: int) -> None:
        """Whoever is handed the turn and is cancelled before noticing hands it on."""
        lock = CallLock()
        await lock.acquire(None, None)
        unlucky = asyncio.ensure_future(lock.acquire(None, None))
        next_one = asyncio.ensure_future(lock.acquire(None, None))
        await turns(3)
        lock.release()
        await turns(after)
        if not unlucky.done():
            unlucky.cancel()
            with pytest.raises(asyncio.CancelledError):
                await unlucky
        else:
            lock.release()
        await asyncio.wait_for(next_one, 10)

    async def test_the_turn_comes_together_with_the_cancel_event(self) -> None:
        lock, cancel = CallLock(), asyncio.Event()
        await lock.acquire(None, None)
        both = asyncio.ensure_future(lock.acquire(None, cancel))
        last = asyncio.ensure_future(lock.acquire(None, None))
        await turns(3)
        cancel.set()
        lock.release()
        await asyncio.wait_for(both, 10)  # the turn counts
        lock.release()
        await asyncio.wait_for(last, 10)

    async def test_random_comings_and_goings(self) -> None:
        rng = random.Random(6)
        lock = CallLock()
        inside: list[int] = []
        served = 0

        async def use(number: int) -> None:
            nonlocal served
            cancel = asyncio.Event()
            if rng.random() < 0.2:
                asyncio.get_running_loop().call_later(rng.random() * 0.01, cancel.set)
            deadline = monotonic() + rng.random() * 0.01 if rng.random() < 0.2 else None
            try:
                await lock.acquire(deadline, cancel if rng.random() < 0.5 else None)
            except (TimeoutError, QueueCancelled):
                return
            try:
                assert inside == []
                inside.append(number)
                await turns(rng.randrange(3))
                served += 1
            finally:
                inside.clear()
                lock.release()

        tasks = []
        for number in range(1000):
            tasks.append(asyncio.ensure_future(use(number)))
            if rng.random() < 0.4:
                await turns(rng.randrange(5))
            if rng.random() < 0.3:
                rng.choice(tasks).cancel()
        await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
        for task in tasks:
            assert task.cancelled() or task.exception() is None
        assert served > 100
        await asyncio.wait_for(lock.acquire(None, None), 10)


actions = st.one_of(
    st.just(("join", 0)),
    st.just(("leave", 0)),
    st.tuples(st.just("cancel"), st.integers(0, 20)),
    st.tuples(st.just("call off"), st.integers(0, 20)),
    st.tuples(st.just("turns"), st.integers(1, 6)),
)


@pytest.mark.slow_on_uvloop
@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
@settings(deadline=None, max_examples=examples(150))
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
