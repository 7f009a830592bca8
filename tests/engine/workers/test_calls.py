"""Calls of all workers, of one worker by rank, or of an idle worker; and their messages."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import worker_targets as targets
from loops import turns
from support import cancelled, forked, until

from aioshm import CodecError, MessageTooLarge, Options, RoleError, WorkerError
from aioshm.engine import RankInfo, WorkerGroup
from aioshm.engine.workers.worker import RESULT, MessageCodec, Undecodable
from aioshm.process.proc import process_state

pytestmark = pytest.mark.slow_on_uvloop


def group_of(n_workers: int = 2, worker: Any = targets.Streaming, **options: Any) -> WorkerGroup:
    return WorkerGroup(worker, n_workers, **options)


async def call(group: WorkerGroup, alone: bool, method: str, *args: Any, timeout: float | None = None) -> list[Any]:
    """Call all workers, or only the last one; return the results."""
    if alone:
        return [await group.call(group.n_workers - 1, method, *args, timeout=timeout)]
    return await group.broadcast(method, *args, timeout=timeout)


async def sent_step(group: WorkerGroup, method: str, *args: Any) -> asyncio.Task[Any]:
    """Begin a call of all workers, and wait until it was sent."""
    session = group._session
    before = session.calls._last_of_all
    step = asyncio.create_task(group.collective_rpc(method, args))
    await until(lambda: session.calls._last_of_all is not before)
    return step


async def fill(group: WorkerGroup) -> list[asyncio.Task[Any]]:
    """Stop worker 1, and call it until a call waits for room in its queue; return the calls."""
    process = group._session.ranks[1].process
    assert process is not None
    os.kill(group.pids[1], signal.SIGSTOP)
    calls: list[asyncio.Task[Any]] = []
    while not process.outbox:
        calls.append(asyncio.create_task(group.call(1, "double", "x" * 2000)))
        await asyncio.sleep(0)
    return calls


def calls_of(group: WorkerGroup, rank: int) -> set[Any]:
    """Return the calls that were sent to a worker and not answered."""
    return group._session.ranks[rank].sent


@asynccontextmanager
async def changes_of(group: WorkerGroup) -> AsyncIterator[list[RankInfo]]:
    """Collect the changes of the workers."""
    changes: list[RankInfo] = []

    async def collect() -> None:
        async for change in group.membership():
            changes.append(change)

    collecting = asyncio.create_task(collect())
    await asyncio.sleep(0)
    try:
        yield changes
    finally:
        collecting.cancel()
        with suppress(asyncio.CancelledError):
            await collecting


class TestCall:
    async def test_workers_get_arguments_and_results_come_by_rank(self) -> None:
        async with group_of(3) as group:
            assert await group.collective_rpc("add", (1, 2), {"times": 10}) == [30, 31, 32]
            assert await group.broadcast("add", 1, 2, times=10) == [30, 31, 32]
            assert await group.call(2, "add", 1, 2, times=10) == 32
            assert await group.collective_rpc("add", [5], unique_reply_rank=2) == 7
            for alone, count in ((False, 3), (True, 1)):
                assert await call(group, alone, "slowly", 0, "awaited") == ["awaited"] * count
                assert (await call(group, alone, targets.rank_of, 10))[-1] == 12  # type: ignore[arg-type]
            calls = [group.broadcast("begin", number) for number in range(30)]
            assert (await asyncio.gather(*calls))[-1] == [list(range(30))] * 3

    async def test_calls_of_one_and_of_all_are_done_in_their_order(self) -> None:
        async with group_of() as group:
            work: list[Any] = []
            expected: list[Any] = []
            for number in range(40):
                work.append(asyncio.create_task(group.call(0, "begin", number)))
                expected.append(number)
                if number % 10 == 5:  # each before the calls that follow; one is awaited in the worker
                    method, args = ("begin_slowly", (0.02,)) if number == 15 else ("begin", ())
                    work.append(await sent_step(group, method, f"step {number}", *args))
                    expected.append(f"step {number}")
            await asyncio.gather(*work)
            [begun, others] = await group.collective_rpc("begin", ("last",))
            assert begun == [*expected, "last"]
            assert others == ["step 5", "step 15", "step 25", "step 35", "last"]

    async def test_arrays_larger_than_a_chunk_go_both_ways(self) -> None:
        array = np.arange(200_000, dtype=np.float32)
        async with group_of(max_chunk_bytes=1 << 16, max_chunks=2) as group:
            calls = [call(group, number % 2 == 0, "double", array + number) for number in range(6)]
            for number, results in enumerate(await asyncio.gather(*calls)):
                for doubled in results:
                    assert (doubled == (array + number) * 2).all()
                    doubled += 1  # a private copy


class TestErrors:
    async def test_exception_names_every_rank_and_has_the_traceback(self) -> None:
        async with group_of() as group:
            text = "fail failed: rank 0: ValueError: rank 0 does not like it; rank 1: ValueError"
            with pytest.raises(WorkerError, match=text) as caught:
                await group.collective_rpc("fail")
            assert caught.value.method == "fail"
            assert {rank: error.kind for rank, error in caught.value.errors.items()} == dict.fromkeys(
                (0, 1), "ValueError"
            )
            copy = pickle.loads(pickle.dumps(caught.value))
            assert (str(copy), copy.errors) == (str(caught.value), caught.value.errors)
            for calling in (
                group.collective_rpc("fail", (1,)),
                group.collective_rpc("fail", (1,), unique_reply_rank=0),  # also where that result is not wanted
                group.call(1, "fail"),
            ):
                with pytest.raises(WorkerError, match="rank 1: ValueError: rank 1 does not like it") as caught:
                    await calling
                assert list(caught.value.errors) == [1]
                assert "in fail\n" in caught.value.errors[1].traceback
                assert "engine/workers" not in caught.value.errors[1].traceback.replace("tests/engine/workers", "")
            for alone in (False, True):
                with pytest.raises(WorkerError, match=r"AttributeError.*nothing_of_the_kind"):
                    await call(group, alone, "nothing_of_the_kind")
            with pytest.raises(WorkerError, match="TypeError"):
                await group.collective_rpc(targets.rank_of)
            assert await group.collective_rpc("add", (1,)) == [1, 2]

    async def test_exceptions_and_results_that_cannot_be_sent_are_errors_of_the_call(self) -> None:
        async with group_of() as group:
            for way, kind in (
                ("cancelled", "asyncio.exceptions.CancelledError"),
                ("mute", "worker_targets.Mute"),
                ("syntax", "SyntaxError"),
                ("result", "aioshm.errors.CodecError"),
                ("lambda", "aioshm.errors.CodecError"),
                ("faulty", "aioshm.errors.CodecError"),
            ):
                for alone, ranks in ((False, (0, 1)), (True, (1,))):
                    with pytest.raises(WorkerError) as caught:
                        await call(group, alone, "fail_in_a_strange_way", way)
                    errors = {rank: error.kind for rank, error in caught.value.errors.items()}
                    assert errors == dict.fromkeys(ranks, kind)
            assert await group.broadcast("add", 1) == [1, 2]

    async def test_arguments_that_cannot_be_sent_or_received_fail_their_call_alone(self) -> None:
        async with group_of(options=Options(max_message_bytes=100_000)) as group:
            slow = asyncio.create_task(group.call(1, "begin_slowly", "slow", 0.05))
            for alone in (False, True):
                with pytest.raises(CodecError, match="pickle"):
                    await call(group, alone, "add", lambda: None)
                with pytest.raises(CodecError, match="CancelledError"):
                    await call(group, alone, "add", targets.CancelsPickling(), timeout=20)
                with pytest.raises(MessageTooLarge):
                    await call(group, alone, "double", np.zeros(100_000))
                with pytest.raises(WorkerError, match=r"rank 1: aioshm.errors.CodecError.*not in the worker"):
                    await call(group, alone, "begin", targets.FaultyAt("worker"))
                with pytest.raises(WorkerError, match="MessageTooLarge"):
                    await call(group, alone, "double", "x" * 60_000)
                with pytest.raises(CodecError, match="pickle"):
                    await call(group, alone, "add", lambda: None)
                assert await group.call(0, "add", 1, timeout=20) == 1
            assert await slow == "slow"
            assert await group.call(1, "begin", 1) == ["slow", 1]

    async def test_argument_that_raises_cancelled_error_when_unpickled_fails_its_call_alone(self) -> None:
        async with group_of() as group:
            for alone in (False, True):
                for more in (None, np.zeros(100_000)):
                    bad = targets.CancelledAt("worker")
                    with pytest.raises(
                        WorkerError, match=r"rank 1: aioshm.errors.CodecError: .*CancelledError: not in"
                    ):
                        await call(group, alone, "begin", bad, more, timeout=10)
            assert await group.broadcast("add", 1, timeout=30) == [1, 2]
        with pytest.raises(WorkerError, match="CancelledError: not in the worker"):
            await group_of(args=(targets.CancelledAt("worker"),)).__aenter__()

    async def test_arguments_that_cannot_be_sent_once_there_is_room_fail_their_call_alone(self) -> None:
        async with group_of(max_chunk_bytes=1 << 10, max_chunks=2) as group:
            calls = await fill(group)
            bad = asyncio.create_task(group.call(1, "add", lambda: None))
            await asyncio.sleep(0)
            step = asyncio.create_task(group.broadcast("add", 1, timeout=30))
            await asyncio.sleep(0)
            os.kill(group.pids[1], signal.SIGCONT)
            with pytest.raises(CodecError, match="pickle"):
                await bad
            assert await step == [1, 2]
            assert await asyncio.gather(*calls) == ["x" * 4000] * len(calls)

    @pytest.mark.parametrize(
        ("method", "arguments", "options", "error", "name"),
        [
            ("collective_rpc", ("",), {}, TypeError, "method"),
            ("collective_rpc", ("add", "ab"), {}, TypeError, "args"),
            ("collective_rpc", ("add", (), [1]), {}, TypeError, "kwargs"),
            ("collective_rpc", ("add",), {"timeout": -1}, ValueError, "timeout"),
            ("collective_rpc", ("add",), {"unique_reply_rank": 2}, ValueError, "unique_reply_rank"),
            ("collective_rpc", ("add",), {"unique_reply_rank": True}, TypeError, "unique_reply_rank"),
            ("call", (2, "add"), {}, ValueError, "rank"),
            ("call", (-1, "add"), {}, ValueError, "rank"),
            ("call", ("0", "add"), {}, TypeError, "rank"),
            ("call", (0, ""), {}, TypeError, "method"),
            ("call", (0, "add"), {"timeout": "1"}, TypeError, "timeout"),
        ],
    )
    async def test_bad_arguments_are_named(
        self, method: str, arguments: Any, options: Any, error: type[Exception], name: str
    ) -> None:
        with pytest.raises(error, match=f"{name} must be"):
            await getattr(group_of(), method)(*arguments, **options)


class TestTime:
    async def test_timeout_names_the_worker_and_late_answers_are_dropped(self, tmp_path: Path) -> None:
        async with group_of() as group:
            for alone in (False, True):
                go = tmp_path / f"go {alone}"
                late = rf"wait_for: no answer from Worker_1 \(pid {group.pids[1]}\) within"
                with pytest.raises(TimeoutError, match=late):
                    await call(group, alone, "wait_for", str(go), 0, 1, timeout=0.5)  # enough for worker 0
                with pytest.raises(TimeoutError, match=r"no answer from .*Worker_1"):
                    await call(group, alone, "wait_for", str(go), 1, 1, timeout=0.05)
                assert await group.call(0, "add") == 0
                go.touch()
                assert (await call(group, alone, "slowly", 0, "on time", timeout=60))[-1] == "on time"

    async def test_timeout_reports_a_stopped_worker_as_stopped(self) -> None:
        async with group_of(shutdown_timeout=0.2) as group:
            pid = group.pids[0]
            os.kill(pid, signal.SIGSTOP)
            await until(lambda: process_state(pid) == "stopped")
            with pytest.raises(TimeoutError, match=rf"from Worker_0 \(pid {pid}, stopped\) within 0\.5 s"):
                await group.collective_rpc("add", timeout=0.5)  # enough for worker 1
            os.kill(pid, signal.SIGCONT)
            assert await group.collective_rpc("add", (5,)) == [5, 6]

    async def test_queued_call_of_all_may_time_out_or_be_cancelled(self, tmp_path: Path) -> None:
        go = tmp_path / "go"
        async with group_of() as group:
            first = asyncio.create_task(group.collective_rpc("wait_for", (str(go), "first", 0)))
            second = asyncio.create_task(group.collective_rpc("add", (1,)))
            third = asyncio.create_task(group.collective_rpc("add", (2,)))
            await asyncio.sleep(0)
            with pytest.raises(TimeoutError, match="waits for earlier calls of all workers"):
                await group.collective_rpc("add", (3,), timeout=0.05)
            second.cancel()
            go.touch()
            assert await first == ["first"] * 2
            assert await third == [2, 3]
            assert await group.collective_rpc("history") == [[(2,)]] * 2
            with pytest.raises(asyncio.CancelledError):
                await second

    async def test_cancelled_call_is_dropped_from_the_queue_or_cancelled_in_the_worker(self) -> None:
        async with group_of() as group:
            seen = group.stream(0, "watch", prefetch=1)
            assert await anext(seen) == []
            under_way = asyncio.create_task(group.call(0, "begin_slowly", "a"))
            while await anext(seen) != ["a"]:
                pass
            behind = asyncio.create_task(group.call(0, "begin", "b"))
            later = asyncio.create_task(group.call(0, "begin", "c"))
            last = asyncio.create_task(group.call(0, targets.cancellations))
            await asyncio.sleep(0)
            for task in (behind, under_way):  # in this order: the next queued call begins when "a" is cancelled
                await cancelled(task)
            assert await later == ["a", "a cancelled", "c"]
            assert await last == 0, "the cancellation of another call"
            await seen.aclose()

    async def test_call_cancelled_at_any_moment_leaves_the_next_one_its_own_answer(self) -> None:
        async def one(group: WorkerGroup, kind: str, number: int) -> Any:
            if kind == "stream":
                return [item async for item in group.stream(number % 2, "count", 3)]
            if kind == "all":
                return await group.broadcast("add", number)
            if kind == "any":
                return await group.call_any("add", number)
            return await group.call(0, "add", number)

        async with group_of() as group:
            for kind in ("all", "call", "any", "stream"):
                for number in range(20):
                    call = asyncio.create_task(one(group, kind, number))
                    await turns(number)
                    call.cancel()
                    assert await group.broadcast("add", 1000 + number, timeout=60) == [1000 + number, 1001 + number]
                    assert await group.call(0, "add", number, timeout=60) == number
                    await asyncio.gather(call, return_exceptions=True)
            seen: set[int] = set()
            while seen != set(group.pids):  # both are idle again
                seen.add(await group.call_any("pid", timeout=60))


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
            with pytest.raises(TimeoutError, match=rf"no idle worker \(Worker_0 \(pid {group.pids[0]}\), Worker_1"):
                await group.call_any("pid", timeout=0.01)
            asking.pop(2).cancel()
            assert not done
            flags[1].touch()
            assert await asyncio.gather(*asking) == [group.pids[1]] * 5
            assert done == [0, 1, 3, 4, 5]
            flags[0].touch()
            await asyncio.gather(*busy)

    async def test_call_of_one_queues_behind_calls_of_any_unless_the_worker_has_a_stream(self, tmp_path: Path) -> None:
        go = tmp_path / "go"
        async with group_of(1) as group:
            busy = asyncio.create_task(group.call(0, "wait_for", str(go), "", 0))
            await until(lambda: calls_of(group, 0))
            waiting = [asyncio.create_task(group.call_any("begin", each)) for each in ("any", "cancelled")]
            last = asyncio.create_task(group.call(0, "begin", "one"))
            await asyncio.sleep(0)
            waiting.pop().cancel()
            go.touch()
            await busy
            assert await last == ["any", "one"]
            stream = group.stream(0, "count")
            assert await anext(stream) == 0
            waiting.append(asyncio.create_task(group.call_any("begin", "idle")))
            await asyncio.sleep(0)
            assert await group.call(0, "begin", "beside") == ["any", "one", "beside"]
            await stream.aclose()
            assert (await asyncio.gather(*waiting))[-1] == ["any", "one", "beside", "idle"]

    async def test_worker_with_an_unanswered_call_of_all_is_not_idle(self, tmp_path: Path) -> None:
        go = tmp_path / "go"
        async with group_of() as group:
            await group.call_any("add")
            step = asyncio.create_task(group.collective_rpc("wait_for", (str(go), "", 1)))
            await asyncio.sleep(0)
            assert await group.call_any("pid") == group.pids[0]  # worker 0 has answered
            assert not step.done()
            step.cancel()
            for _ in range(3):
                assert await group.call_any("pid") == group.pids[0]
            go.touch()
            assert await group.collective_rpc("add", (1,)) == [1, 2]


@pytest.mark.parametrize("beside", [None, np.zeros(100_000)], ids=["small", "with a buffer"])
@pytest.mark.parametrize("number", [1, 300, 1 << 20, 1 << 40])
def test_message_with_an_undecodable_value_names_its_call(number: int, beside: Any) -> None:
    codec = MessageCodec()
    encoded = codec.encode((RESULT, number, 2 * number, [beside, targets.FaultyAt("driver")]))
    if isinstance(encoded, bytes):
        message = codec.loads(encoded)
    else:
        parts, buffers = encoded
        message = codec.decode(b"".join(bytes(part) for part in parts), buffers)
    kind, call, _, value = message
    assert (kind, call) == (RESULT, number)
    assert isinstance(value, Undecodable)
    assert "not in the driver" in str(value.error)


async def test_call_in_a_forked_child_is_refused_and_the_group_serves_on() -> None:
    def is_refused(group: WorkerGroup) -> bool:
        with pytest.raises(RoleError, match="forked"):
            group.call(0, "pid").send(None)  # without the loop, which is the parent's
        return True

    async with group_of() as group:
        child_is_refused = forked(is_refused, group)
        assert await group.call(0, "pid") == group.pids[0]
        assert child_is_refused()
