"""Sleeping for an event loop that has nobody else to serve."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import pytest

from aioshm.lifeline.bell import HAVE_EVENTFD, Bell
from aioshm.wait.in_place import InPlace
from aioshm.wait.poller import Poller
from aioshm.wait.predictor import Predictor

pytestmark = pytest.mark.skipif(sys.platform != "linux" or not HAVE_EVENTFD, reason="needs epoll and eventfd")


class End:
    """An end on a loop of its own, which another thread rings for."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.bell = Bell.create()
        self.ready = False
        self.parked = bytearray(1)
        self.turns = 0
        self.looks = 0
        flag: Any = memoryview(self.parked)
        self.poller = Poller(loop, flag, Predictor(may_spin=False), "park", lambda _: False, bells=(self.bell,))
        loop.add_reader(self.bell.fd, self._rung)
        run_once: Callable[[], None] = loop._run_once  # type: ignore[attr-defined]

        def counted() -> None:
            self.turns += 1
            run_once()

        loop._run_once = counted  # type: ignore[attr-defined]

    def _rung(self) -> None:
        self.bell.drain()
        self.poller.wake()

    def look(self) -> bool:
        return self.ready

    def publish(self) -> None:
        self.ready = True
        self.bell.ring()

    def once_parked(self, action: Callable[[], object]) -> None:
        """Do something from another thread as soon as the end has parked."""

        def watch() -> None:
            while not self.parked[0]:
                time.sleep(0.0001)
            action()

        threading.Thread(target=watch).start()

    async def wait(self, **kwargs: Any) -> bool:
        return await self.poller.wait(self.look, 0, 0, **kwargs)


@contextmanager
def end() -> Iterator[End]:
    loop = asyncio.SelectorEventLoop()
    end = End(loop)
    try:
        yield end
    finally:
        end.poller.close()
        loop.remove_reader(end.bell.fd)
        end.bell.close()
        loop.close()


def test_a_bell_is_answered_within_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aioshm.wait.poller.MOST_S", 60.0)  # however long the other thread takes
    with end() as here:

        async def main() -> int:
            turns = here.turns
            here.once_parked(here.publish)
            assert await here.wait(), "nobody else had anything to do, as after a turn"
            return here.turns - turns

        assert here.loop.run_until_complete(main()) == 0
        assert not here.parked[0]


def test_what_comes_from_other_threads_is_served() -> None:
    with end() as here:

        async def main() -> None:
            here.once_parked(lambda: here.loop.call_soon_threadsafe(here.publish))
            await here.wait()

        here.loop.run_until_complete(main())


def test_timers_and_tasks_are_served() -> None:
    with end() as here:

        async def main() -> list[str]:
            served: list[str] = []
            asyncio.get_running_loop().call_later(0.01, served.append, "timer")
            task = asyncio.ensure_future(asyncio.sleep(0.005))
            task.add_done_callback(lambda _: served.append("task"))
            here.loop.call_later(0.02, here.publish)
            await here.wait()
            return served

        assert here.loop.run_until_complete(main()) == ["task", "timer"]


def test_cancelling_and_deadlines_end_it() -> None:
    with end() as here:

        async def main() -> None:
            task = asyncio.ensure_future(here.wait())
            here.once_parked(lambda: here.loop.call_soon_threadsafe(task.cancel))
            with pytest.raises(asyncio.CancelledError):
                await task
            with pytest.raises(TimeoutError):
                await here.wait(deadline=here.loop.time() + 0.01)

        here.loop.run_until_complete(main())
        assert not here.parked[0]


def test_an_interrupt_ends_the_run_and_not_the_task() -> None:
    with end() as here:
        task = here.loop.create_task(here.wait())
        in_place: Any = here.poller._in_place

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        def interrupted(_: float) -> NoReturn:
            signal.raise_signal(signal.SIGUSR1)
            raise AssertionError("the handler has raised")

        before = signal.signal(signal.SIGUSR1, interrupt)
        select, in_place._select = in_place._select, interrupted
        try:
            with pytest.raises(KeyboardInterrupt):
                here.loop.run_forever()
        finally:
            signal.signal(signal.SIGUSR1, before)
            in_place._select = select
        assert not task.done()
        here.publish()
        here.loop.run_until_complete(task)


def test_a_loop_that_does_not_show_what_it_does_sleeps_for_itself() -> None:
    uvloop = pytest.importorskip("uvloop")
    bell = Bell.create()
    for make in (uvloop.new_event_loop, type("Mine", (asyncio.SelectorEventLoop,), {})):
        loop = make()
        try:
            assert InPlace.of(loop, (bell,)) is None
        finally:
            loop.close()
    bell.close()


def test_a_loop_that_is_debugged_sleeps_for_itself() -> None:
    with end() as here:
        here.loop.set_debug(True)
        in_place = InPlace.of(here.loop, (here.bell,))
        assert in_place is not None
        assert not in_place.alone()


class TestSpinningInACrowd:
    """A spin hands its CPU on after each look; the loop has its turn where that has somebody else to serve."""

    def spinning(self, end: End, looks: int) -> Callable[[], bool]:
        end.poller.close()
        flag: Any = memoryview(end.parked)
        end.poller = Poller(
            end.loop, flag, Predictor(may_spin=True), "spin", lambda _: False, bells=(end.bell,), crowded=True
        )

        def look() -> bool:
            end.looks += 1
            return end.looks > looks

        return look

    def test_a_loop_with_nobody_else_to_serve_is_left_alone(self) -> None:
        with end() as one:
            look = self.spinning(one, 100)

            async def main() -> tuple[bool, int]:
                before = one.turns
                return await one.poller.wait(look, 0, 0), one.turns - before

            assert one.loop.run_until_complete(main()) == (False, 0)
            assert one.looks == 101

    def test_other_tasks_have_their_turns(self) -> None:
        with end() as one:
            look, ran = self.spinning(one, 100), []

            async def other() -> None:
                while True:
                    ran.append(one.looks)
                    await asyncio.sleep(0)

            async def main() -> bool:
                task = asyncio.ensure_future(other())
                try:
                    return await one.poller.wait(look, 0, 0)
                finally:
                    task.cancel()

            assert one.loop.run_until_complete(main()) is True
            assert len(ran) > 50


def test_an_alarm_of_an_earlier_wait_wakes_it_once() -> None:
    with end() as here:

        async def main() -> None:
            here.poller._alarm.arm(time.monotonic_ns() + 2_000_000)
            here.once_parked(lambda: (time.sleep(0.02), here.publish()))
            await here.wait()

        here.loop.run_until_complete(main())
        assert here.poller.stats.parks <= 2
