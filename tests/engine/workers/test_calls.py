"""Calls of one worker of a group: by rank, or of an idle worker."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import worker_targets as targets
from managed import open_things
from support import eventually, until

from aioshm import CodecError, MessageTooLarge, Options, QueueClosed, WorkerDied, WorkerError
from aioshm.engine import WorkerGroup

pytestmark = pytest.mark.slow_on_uvloop


def group_of(n_workers: int = 2, worker: Any = targets.Streaming, **options: Any) -> WorkerGroup:
    return WorkerGroup(worker, n_workers, **options)


async def sent_step(group: WorkerGroup, method: str, *args: Any) -> asyncio.Task[Any]:
    """Begin a call of all workers, and wait until it was sent."""
    session = group._session
    assert session is not None
    sent = session.calls._last_broadcast
    step = asyncio.create_task(group.collective_rpc(method, args))
    await until(lambda: session.calls._last_broadcast > sent)
    return step


def calls_of(group: WorkerGroup, rank: int) -> list[Any]:
    """Return the calls that were sent to a worker and not answered."""
    session = group._session
    assert session is not None
    return session.calls.sent_to(rank)


class TestCall:
    async def test_calls_the_one_worker_with_its_arguments(self) -> None:
        async with group_of(3) as group:
            assert await group.call(1, "pid") == group.pids[1]
            assert await group.call(2, "add", 1, 2, times=10) == 32
            assert await group.call(0, "slowly", 0, "awaited") == "awaited"
            assert await group.call(1, targets.rank_of, 10) == 11
            assert await group.collective_rpc("history") == [[], [], [(1, 2)]]
            array = np.arange(200_000, dtype=np.float32)
            doubled = await group.call(0, "double", array)
            assert (doubled == array * 2).all()
            doubled += 1  # a private copy

    async def test_many_at_once_are_done_in_their_order_side_by_side_with_steps(self) -> None:
        async with group_of() as group:
            await group.call(0, "begin", "first")
            work: list[Any] = []
            for number in range(40):
                work.append(asyncio.create_task(group.call(0, "begin", number)))
                if number % 10 == 5:
                    work.append(await sent_step(group, "begin", f"step {number}"))  # before the calls that follow
            await asyncio.gather(*work)
            [begun, others] = await group.collective_rpc("begin", ("last",))
            expected: list[Any] = ["first"]
            for number in range(40):
                expected.append(number)
                if number % 10 == 5:
                    expected.append(f"step {number}")
            assert begun == [*expected, "last"]
            assert others == ["step 5", "step 15", "step 25", "step 35", "last"]

    async def test_awaited_step_keeps_its_position_in_the_order(self) -> None:
        async with group_of(1) as group:
            await group.call(0, "begin", "first")
            step = await sent_step(group, "begin_slowly", "step", 0.02)
            calls = [asyncio.create_task(group.call(0, "begin", number)) for number in range(3)]
            assert await step == ["step"]
            assert (await asyncio.gather(*calls))[-1] == ["first", "step", 0, 1, 2]

    async def test_other_workers_are_not_waited_for(self, tmp_path: Path) -> None:
        go = tmp_path / "go"
        async with group_of() as group:
            waiting = asyncio.create_task(group.call(0, "wait_for", str(go), "held up", 0))
            assert await group.call(1, "add", 1) == 2
            assert not waiting.done()
            go.touch()
            assert await waiting == "held up"

    async def test_exception_of_a_call_names_the_rank_and_has_the_traceback(self) -> None:
        async with group_of() as group:
            with pytest.raises(WorkerError, match="fail failed: rank 1: ValueError: rank 1 does not like it") as caught:
                await group.call(1, "fail")
            assert list(caught.value.errors) == [1]
            assert "in fail\n" in caught.value.errors[1].traceback
            assert "serving" not in caught.value.errors[1].traceback
            with pytest.raises(WorkerError, match=r"AttributeError.*nothing_of_the_kind"):
                await group.call(0, "nothing_of_the_kind")
            assert await group.call(1, "add") == 1


@pytest.mark.parametrize("alone", [False, True], ids=["of all", "of one"])
class TestCallOfAllAndOfOne:
    async def test_arrays_larger_than_a_chunk_go_both_ways(self, alone: bool) -> None:
        array = np.arange(200_000, dtype=np.float32)
        async with group_of(max_chunk_bytes=1 << 16, max_chunks=2) as group:
            calls = [call(group, alone, "double", array + number) for number in range(6)]
            for number, results in enumerate(await asyncio.gather(*calls)):
                for doubled in results:
                    assert (doubled == (array + number) * 2).all()
                    doubled += 1  # a private copy

    async def test_exceptions_and_results_that_cannot_be_sent_are_errors_of_the_call(self, alone: bool) -> None:
        async with group_of() as group:
            for way, kind in (
                ("cancelled", "asyncio.exceptions.CancelledError"),
                ("mute", "worker_targets.Mute"),
                ("lambda", "aioshm.errors.CodecError"),
                ("faulty", "aioshm.errors.CodecError"),
            ):
                with pytest.raises(WorkerError) as caught:
                    await call(group, alone, "fail_in_a_strange_way", way)
                errors = {rank: error.kind for rank, error in caught.value.errors.items()}
                assert errors == dict.fromkeys([1] if alone else [0, 1], kind)
            assert (await call(group, alone, "add", 1))[-1] == 2

    async def test_arguments_that_cannot_be_sent_or_received_fail_their_call_alone(self, alone: bool) -> None:
        async with group_of(options=Options(max_message_bytes=100_000)) as group:
            slow = asyncio.create_task(group.call(1, "begin_slowly", "slow", 0.05))
            with pytest.raises(CodecError, match="pickle"):
                await call(group, alone, "add", lambda: None)
            with pytest.raises(MessageTooLarge):
                await call(group, alone, "double", np.zeros(100_000))
            with pytest.raises(WorkerError, match=r"rank 1: aioshm.errors.CodecError.*not in the worker"):
                await call(group, alone, "begin", targets.FaultyAt("worker"))
            with pytest.raises(WorkerError, match="MessageTooLarge"):
                await call(group, alone, "double", "x" * 60_000)
            assert await slow == "slow"
            assert (await call(group, alone, "begin", 1))[-1] == ["slow", 1]


async def call(group: WorkerGroup, alone: bool, method: str, *args: Any) -> list[Any]:
    """Call all workers, or only the last one; return the results."""
    if alone:
        return [await group.call(1, method, *args)]
    return await group.broadcast(method, *args)


class TestTime:
    async def test_cancelled_call_is_dropped_from_the_queue_or_cancelled_in_the_worker(self) -> None:
        async with group_of() as group:
            seen = group.stream(0, "watch", prefetch=1)
            assert await anext(seen) == []
            under_way = asyncio.create_task(group.call(0, "begin_slowly", "a"))
            while await anext(seen) != ["a"]:
                pass
            behind = asyncio.create_task(group.call(0, "begin", "b"))
            later = asyncio.create_task(group.call(0, "begin", "c"))
            await asyncio.sleep(0)
            for task in (behind, under_way):  # in this order: the next queued call begins when "a" is cancelled
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            assert await later == ["a", "a cancelled", "c"]
            await seen.aclose()

    async def test_timeout_names_the_worker_and_late_answers_are_dropped(self, tmp_path: Path) -> None:
        go = tmp_path / "go"
        async with group_of() as group:
            for number in range(4):
                with pytest.raises(
                    TimeoutError, match=rf"^wait_for: no answer from Worker_1 \(pid {group.pids[1]}\) wit"
                ):
                    await group.call(1, "wait_for", str(go), number, 1, timeout=0.02)
            assert await group.call(0, "add") == 0
            go.touch()
            assert await group.call(1, "slowly", 0, "on time", timeout=60) == "on time"

    @pytest.mark.parametrize("kind", ["all", "call", "any", "stream"])
    async def test_call_cancelled_at_any_moment_leaves_the_next_one_its_own_answer(self, kind: str) -> None:
        async def one(group: WorkerGroup, number: int) -> Any:
            if kind == "stream":
                return [item async for item in group.stream(number % 2, "count", 3)]
            if kind == "all":
                return await group.broadcast("add", number)
            if kind == "any":
                return await group.call_any("add", number)
            return await group.call(0, "add", number)

        async with group_of() as group:
            for number in range(80):
                call = asyncio.create_task(one(group, number))
                for _ in range(number % 20):
                    await asyncio.sleep(0)
                call.cancel()
                if kind == "all":
                    assert await group.broadcast("add", 1000 + number, timeout=60) == [1000 + number, 1001 + number]
                assert await group.call(0, "add", 1000 + number, timeout=60) == 1000 + number
                await asyncio.gather(call, return_exceptions=True)
            seen: set[int] = set()
            while seen != set(group.pids):  # both are idle again
                seen.add(await group.call_any("pid", timeout=60))

    async def test_any_queued_call_may_be_cancelled(self) -> None:
        async with group_of() as group:
            calls = [asyncio.create_task(group.call(n % 2, "slowly", 0.002, n)) for n in range(30)]
            calls += [asyncio.create_task(group.call_any("slowly", 0.001, n)) for n in range(30, 60)]
            for number, call in enumerate(calls):
                if number % 3 == 0:
                    await asyncio.sleep(0.001)
                    call.cancel()
            results = await asyncio.gather(*calls, return_exceptions=True)
            for number, result in enumerate(results):
                assert result == number or (number % 3 == 0 and isinstance(result, asyncio.CancelledError))


class TestAny:
    async def test_call_any_goes_to_the_worker_that_has_been_idle_longest(self) -> None:
        async with group_of(3) as group:
            await asyncio.gather(*(group.call(rank, "pid") for rank in range(3)))  # opens all queues
            seen = [await group.call_any("pid") for _ in range(6)]
            assert sorted(seen[:3]) == sorted(group.pids)
            assert seen[3:] == seen[:3]
            await group.call(group.pids.index(seen[0]), "add")
            assert await group.call_any("pid") == seen[1]

    async def test_call_any_waits_for_an_idle_worker_in_order(self, tmp_path: Path) -> None:
        async with group_of(2) as group:
            flags = [tmp_path / "0", tmp_path / "1"]
            busy = [
                asyncio.create_task(group.call(rank, "wait_for", str(flag), "", rank))
                for rank, flag in enumerate(flags)
            ]
            done: list[int] = []

            async def ask(number: int) -> int:
                pid: int = await group.call_any("pid")
                done.append(number)
                return pid

            asking = [asyncio.create_task(ask(number)) for number in range(6)]
            await asyncio.sleep(0.02)
            with pytest.raises(TimeoutError, match=rf"no idle worker: Worker_0 \(pid {group.pids[0]}\), Worker_1"):
                await group.call_any("pid", timeout=0.01)
            asking.pop(2).cancel()
            assert not done
            flags[1].touch()
            assert await asyncio.gather(*asking) == [group.pids[1]] * 5
            assert done == [0, 1, 3, 4, 5]
            flags[0].touch()
            await asyncio.gather(*busy)

    async def test_calls_of_one_worker_do_not_starve_call_any(self) -> None:
        async with group_of(1) as group:
            stopping = False

            async def hammer() -> None:
                while not stopping:
                    await group.call(0, "add")

            hammers = [asyncio.create_task(hammer()) for _ in range(4)]
            for number in range(20):
                assert await group.call_any("add", number, timeout=60) == number
            stopping = True
            await asyncio.gather(*hammers)

    async def test_worker_with_an_unanswered_call_of_all_is_not_idle(self, tmp_path: Path) -> None:
        go = tmp_path / "go"
        async with group_of() as group:
            await group.call_any("add")
            step = asyncio.create_task(group.collective_rpc("wait_for", (str(go), "", 1)))
            await asyncio.sleep(0)
            for _ in range(3):
                assert await group.call_any("pid") == group.pids[0]  # worker 0 has answered
            assert not step.done()
            step.cancel()
            for _ in range(3):
                assert await group.call_any("pid") == group.pids[0]
            asking = asyncio.create_task(group.collective_rpc("add", (1,)))
            go.touch()
            assert await asking == [1, 2]
            with pytest.raises(TimeoutError):
                await group.collective_rpc("slowly", (0.1,), timeout=0.01)
            assert await group.call_any("add", timeout=60) in (0, 1)

    async def test_workers_with_a_stream_are_not_idle_but_can_be_called(self) -> None:
        async with group_of(2) as group:
            streams = [group.stream(None, "count") for _ in range(2)]
            assert [await anext(stream) for stream in streams] == [0, 0]
            asking = asyncio.create_task(group.call_any("pid"))
            assert [await group.call(rank, "add", timeout=60) for rank in range(2)] == [0, 1]
            assert not asking.done()
            await streams[1].aclose()
            assert await asking in group.pids
            await streams[0].aclose()


class TestDeath:
    async def test_death_without_restart_fails_every_call(self) -> None:
        async with group_of() as group:
            calls = [asyncio.create_task(group.call(rank, "slowly", targets.LONG_S)) for rank in (0, 1, 1)]
            calls.append(asyncio.create_task(group.call_any("add")))
            calls.append(asyncio.create_task(group.call(1, "end_or_wait", 1, "SIGKILL")))
            await until(lambda: len(calls_of(group, 1)) == 2)
            os.kill(pid := group.pids[1], signal.SIGKILL)
            for outcome in await asyncio.gather(*calls, return_exceptions=True):
                assert isinstance(outcome, WorkerDied)
                assert (outcome.rank, outcome.pid) == (1, pid)
            with pytest.raises(WorkerDied, match="killed by SIGKILL"):
                await group.call(0, "add")
            with pytest.raises(WorkerDied, match="killed by SIGKILL"):
                await anext(group.stream(None, "count"))


class TestClosing:
    async def test_ends_calls_and_streams_and_leaves_nothing(self, tmp_path: Path) -> None:
        async with group_of(1):  # what multiprocessing opens for good
            pass
        before = open_things()
        group = group_of(kwargs={"log": str(tmp_path)})
        async with group:
            calls = [asyncio.create_task(group.call(rank, "begin_slowly", "a")) for rank in (0, 1, 1)]
            calls.append(asyncio.create_task(group.call_any("add")))
            stream = group.stream(0, "count_slowly")
            waiting = asyncio.create_task(anext(group.stream(1, "count")))  # behind the call
            await until(lambda: len(calls_of(group, 1)) == 2)
        for outcome in await asyncio.gather(*calls, waiting, return_exceptions=True):
            assert isinstance(outcome, QueueClosed)
        with pytest.raises(QueueClosed):
            await anext(stream)
        assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"0": "closed", "1": "closed"}
        eventually(lambda: open_things() <= before, f"the end of {open_things() - before}")
