"""Groups of workers: start, deaths and closing."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop
import worker_targets as targets
from managed import gone
from support import cancelled, cancelled_after, until
from test_calls import fill

from aioshm import CodecError, Options, QueueClosed, RoleError, WorkerDied, WorkerError
from aioshm.engine import WorkerGroup
from aioshm.observe import find_queues

pytestmark = pytest.mark.slow_on_uvloop


def group_of(n_workers: int = 2, worker: Any = targets.Worker, **options: Any) -> WorkerGroup:
    return WorkerGroup(worker, n_workers, **options)


class TestStarting:
    async def test_workers_are_made_with_their_arguments_and_rank(self) -> None:
        async with group_of(3, args=(1, "x"), kwargs={"more": [2]}, name="TP") as group:
            made = await group.collective_rpc("tell_made")
            assert made == [(rank, (1, "x"), {"more": [2]}) for rank in range(3)]
            assert await group.collective_rpc("pid") == group.pids
            assert psutil.Process(group.pids[0]).ppid() == os.getpid()
            labels = {queue.label for queue in find_queues() if os.getpid() in (end.pid for end in queue.ends)}
            assert labels >= {"TP.calls", *[f"TP_{rank}.{way}" for rank in range(3) for way in ("calls", "answers")]}
            assert "uvloop" not in (await group.collective_rpc(targets.loop_of))[0]

    async def test_worker_may_be_made_without_a_rank_by_a_coroutine_on_another_kind_of_loop(self) -> None:
        async with group_of(2, targets.Rankless, kwargs={"factor": 3}) as group:
            assert await group.broadcast("multiply", 5) == [15, 15]
        async with group_of(1, targets.made_slowly, loop_factory=uvloop.new_event_loop) as group:
            assert await group.collective_rpc("add", (1,)) == [1]
            assert await group.collective_rpc(targets.loop_of) == ["uvloop"]

    @pytest.mark.parametrize(
        ("arguments", "error"),
        [
            ({"worker": 3}, TypeError),
            ({"n_workers": 0}, ValueError),
            ({"args": 3}, TypeError),
            ({"kwargs": 3}, TypeError),
            ({"kwargs": {"rank": 1}}, ValueError),
            ({"name": ""}, ValueError),
            ({"ready_timeout": 0}, ValueError),
            ({"shutdown_timeout": "soon"}, TypeError),
            ({"loop_factory": "uvloop"}, TypeError),
        ],
    )
    def test_bad_arguments_are_named(self, arguments: dict[str, Any], error: type[Exception]) -> None:
        ((name, _),) = arguments.items()
        with pytest.raises(error, match=name):
            group_of(**arguments)

    async def test_constructor_that_raises_dies_or_cannot_be_pickled_is_an_error(self) -> None:
        with pytest.raises(WorkerError, match=r"fails_to_start failed: rank 1: ValueError") as caught:
            await group_of(worker=targets.fails_to_start, kwargs={"failing": 1}).__aenter__()
        assert "in fails_to_start" in caught.value.errors[1].traceback
        with pytest.raises(WorkerDied, match=r"Worker_1 .* killed by SIGKILL"):
            await group_of(worker=targets.fails_to_start, kwargs={"failing": 1, "how": "SIGKILL"}).__aenter__()
        with pytest.raises(CodecError, match="pickle"):
            await group_of(worker=lambda rank: None).__aenter__()
        with pytest.raises(WorkerError, match="not in the worker"):
            await group_of(args=(targets.FaultyAt("worker"),)).__aenter__()

    async def test_worker_killed_before_it_runs_is_named(self) -> None:
        group = group_of()
        entering = asyncio.create_task(group.__aenter__())
        while len(group.pids) < 2:
            await asyncio.sleep(0)
        os.kill(group.pids[1], signal.SIGKILL)
        with pytest.raises(WorkerDied, match=r"Worker_1 .* killed by SIGKILL"):
            await entering

    async def test_constructor_that_takes_too_long_is_named_and_no_missing_reader_is_reported(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        hang = {"failing": 1, "how": "hang"}
        options = Options(stall_warning_s=0.2)
        group = group_of(worker=targets.fails_to_start, kwargs=hang, options=options, ready_timeout=1)
        with pytest.raises(TimeoutError, match=r"no answer from .*Worker_1 .* within 1\.0 s"):
            await group.__aenter__()
        assert "for readers to attach" not in caplog.text
        assert all(gone(pid) for pid in group.pids)

    async def test_cancelled_at_any_moment_nothing_is_left(self, nothing_kept: None) -> None:
        for delay in (0, 0.05):
            group = group_of(worker=targets.fails_to_start, kwargs={"failing": 1, "how": "hang"})
            entering = asyncio.create_task(group.__aenter__())
            await asyncio.sleep(delay)
            await cancelled(entering)
            assert all(gone(pid) for pid in group.pids)

    @pytest.mark.parametrize("stage", ["started", "made", "ready"])
    async def test_group_closed_at_its_start_ends_the_start(
        self, stage: str, tmp_path: Path, nothing_kept: None
    ) -> None:
        worker = targets.Worker if stage == "ready" else targets.OneHangs
        group = group_of(worker=worker, kwargs={"log": str(tmp_path)})
        entering = asyncio.create_task(group.__aenter__())
        reached: dict[str, Any] = {
            "started": lambda: group.pids,
            "made": (tmp_path / "made").exists,
            "ready": lambda: all(rank.present for rank in group._session.ranks.values()),
        }
        while not reached[stage]():
            await asyncio.sleep(0)
        await group.aclose()
        async with asyncio.timeout(20):
            with pytest.raises(QueueClosed, match="the group of workers was closed"):
                await entering
        assert all(gone(pid) for pid in group.pids)

    async def test_cancelled_start_closes_the_worker_that_was_created(self, tmp_path: Path) -> None:
        group = group_of(worker=targets.OneHangs, kwargs={"log": str(tmp_path)})
        entering = asyncio.create_task(group.__aenter__())
        await until((tmp_path / "made").exists)
        began = time.monotonic()
        await cancelled(entering)
        assert time.monotonic() - began < 4, "a worker that is being made exits promptly"
        assert (tmp_path / "0").read_text() == "closed"


class TestDeath:
    @pytest.mark.parametrize(
        ("how", "code", "manner"),
        [("SIGKILL", -9, "was killed by SIGKILL"), ("_exit", 3, "exited with code 3: rank 1 goes")],
    )
    async def test_death_fails_every_call_and_names_the_worker(self, how: str, code: int, manner: str) -> None:
        async with group_of() as group:
            pid = group.pids[1]
            ended = asyncio.create_task(group.join_first())
            first = asyncio.create_task(group.collective_rpc("end_or_wait", (1, how)))
            others = [asyncio.create_task(group.collective_rpc("add", timeout=50)) for _ in range(3)]
            others.append(asyncio.create_task(group.call(0, "slowly", targets.LONG_S)))
            others.append(asyncio.create_task(group.call_any("add")))
            async with asyncio.timeout(20):
                results = await asyncio.gather(first, *others, return_exceptions=True)
            later = group.collective_rpc("add"), group.call(0, "add"), anext(group.stream(None, "count"))
            results += await asyncio.gather(*later, return_exceptions=True)
            results.append(await ended)
            for error in results:
                assert isinstance(error, WorkerDied)
                assert (error.rank, error.name, error.pid, error.exitcode) == (1, "Worker_1", pid, code)
                assert str(error).startswith(f"Worker_1 (pid {pid}) {manner}")
                assert "rank 1 goes" in error.last_lines
                assert "rank 1 goes" in str(error)
            copy = pickle.loads(pickle.dumps(results[0]))
            assert (str(copy), vars(copy)) == (str(results[0]), vars(results[0]))
            async with asyncio.timeout(3):  # closing does not wait for worker 0
                await group.aclose()

    async def test_death_fails_calls_that_wait_for_room_in_the_queue_of_a_stopped_worker(self) -> None:
        async with group_of(max_chunk_bytes=1 << 10, max_chunks=2, shutdown_timeout=0.2) as group:
            calls = await fill(group)
            calls += [asyncio.create_task(group.broadcast("double", "x" * 2000)) for _ in range(3)]
            os.kill(group.pids[0], signal.SIGKILL)
            async with asyncio.timeout(20):
                outcomes = await asyncio.gather(*calls, return_exceptions=True)
            for outcome in outcomes:
                assert isinstance(outcome, WorkerDied)
                assert outcome.rank == 0


def own_loop_factory() -> Any:
    """Return the factory of loops of the test's kind."""
    if type(asyncio.get_running_loop()).__module__.startswith("uvloop"):
        return uvloop.new_event_loop
    return None


class TestSigterm:
    @pytest.mark.parametrize(
        "method",
        [None, "say_and_wait", "say_and_block", "say_and_block_once"],
        ids=["idle", "awaits", "blocks", "yields"],
    )
    async def test_worker_that_gets_sigterm_is_closed(self, method: str | None, tmp_path: Path) -> None:
        options = {"worker": targets.Streaming, "kwargs": {"log": str(tmp_path)}, "loop_factory": own_loop_factory()}
        begun = tmp_path / "begun"
        async with group_of(1, **options) as group:
            await group.call(0, "add", 1)
            call: Any = None
            if method == "say_and_block_once":
                call = anext(group.stream(0, method, str(begun)))
            elif method is not None:
                call = group.collective_rpc(method, (str(begun),))
            calling = asyncio.ensure_future(call or group.join_first())
            await until(lambda: call is None or begun.exists())
            os.kill(group.pids[0], signal.SIGTERM)
            await group.join_first()
            with pytest.raises(WorkerDied, match="killed by SIGTERM"):
                await (calling if call else group.call(0, "add", 1))
            await asyncio.wait([calling])
        assert (tmp_path / "0").read_text() == "closed"

    async def test_sigterm_fails_streams_with_the_death_of_the_worker(self) -> None:
        async with group_of(1, worker=targets.Streaming, loop_factory=own_loop_factory()) as group:
            streams = [group.stream(0, "count_slowly", None, targets.LONG_S) for _ in range(20)]
            waiting = [asyncio.ensure_future(anext(stream)) for stream in streams]
            await until(lambda: len(group._session.ranks[0].sent) == len(streams))
            await group.call(0, "add")  # the generators have begun
            os.kill(group.pids[0], signal.SIGTERM)
            outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} == {WorkerDied}

    @pytest.mark.parametrize("way", ["caught", "destructor"])
    async def test_worker_that_loses_the_exception_of_sigterm_is_closed(self, way: str, tmp_path: Path) -> None:
        async with group_of(1, kwargs={"log": str(tmp_path)}, loop_factory=own_loop_factory()) as group:
            with pytest.raises(WorkerDied, match="killed by SIGTERM"):
                async with asyncio.timeout(10):
                    await group.call(0, "lose_sigterm", way)
        assert (tmp_path / "0").read_text() == "closed"

    @pytest.mark.one_loop
    async def test_worker_that_gets_sigterm_while_asyncio_schedules_a_task_is_closed(self, tmp_path: Path) -> None:
        sent = tmp_path / "sent"
        async with group_of(1, kwargs={"log": str(tmp_path)}) as group, asyncio.timeout(10):
            with suppress(WorkerDied):  # the worker answers before, or dies
                await group.call(0, targets.sigterm_while_scheduling, str(sent))
                while not sent.exists():
                    await group.call(0, "add", 1)
            await group.join_first()
            with pytest.raises(WorkerDied, match="killed by SIGTERM"):
                await group.call(0, "add", 1)
        assert (tmp_path / "0").read_text() == "closed"

    async def test_sigterm_does_not_interrupt_close(self, tmp_path: Path) -> None:
        async with group_of(1, worker=targets.ClosesSlowly, kwargs={"log": str(tmp_path)}) as group:
            closing = asyncio.create_task(group.aclose())
            await until((tmp_path / "closing").exists)
            os.kill(group.pids[0], signal.SIGTERM)
            await closing
        assert (tmp_path / "0").read_text() == "closed"


class TestClosing:
    async def test_workers_are_closed_and_calls_and_streams_fail_and_nothing_is_left(
        self, tmp_path: Path, nothing_kept: None
    ) -> None:
        async with group_of(worker=targets.Streaming, kwargs={"log": str(tmp_path)}) as group:
            pids = group.pids
            first = asyncio.create_task(group.join_first())
            calls: list[Any] = [asyncio.create_task(group.call(rank, "begin_slowly", "a")) for rank in (0, 1, 1)]
            calls.append(asyncio.create_task(group.call_any("add")))
            calls.append(asyncio.create_task(group.collective_rpc("add")))
            stream = group.stream(0, "count_slowly")
            calls.append(asyncio.create_task(anext(group.stream(1, "count"))))  # behind the call
            await asyncio.sleep(0.05)
        assert await first is None
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(outcome, QueueClosed)
        with pytest.raises(QueueClosed):
            await anext(stream)
        assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"0": "closed", "1": "closed"}
        assert all(gone(pid) for pid in pids)
        await group.aclose()
        with pytest.raises(RoleError, match="once"):
            await group.__aenter__()

    async def test_group_before_entering_and_after_closing_refuses_calls_and_streams(self) -> None:
        group = group_of(worker=targets.Streaming)
        calls = (
            lambda: group.collective_rpc("add"),
            lambda: group.call_any("add"),
            lambda: anext(group.stream(None, "count")),
        )
        for call in calls:
            with pytest.raises(RoleError, match="async with"):
                await call()
        await group.aclose()
        for call in calls:
            with pytest.raises(QueueClosed):
                await call()

    async def test_closing_kills_busy_workers_after_the_timeout(self) -> None:
        group = await group_of(shutdown_timeout=0.2).__aenter__()
        calls = [asyncio.create_task(group.collective_rpc("wait_for", ("/nowhere", 1, 1))) for _ in range(3)]
        await asyncio.sleep(0)
        await group.aclose()
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(outcome, QueueClosed)
        assert all(gone(pid) for pid in group.pids)

    async def test_closing_sends_sigterm_and_waits_before_a_kill(self, tmp_path: Path) -> None:
        options: dict[str, Any] = {"worker": targets.ClosesSlowly, "kwargs": {"log": str(tmp_path)}}
        async with group_of(1, **options, shutdown_timeout=2, loop_factory=own_loop_factory()) as group:
            call = asyncio.create_task(group.call(0, "say_and_block", str(tmp_path / "begun")))
            await until((tmp_path / "begun").exists)
        assert (tmp_path / "0").read_text() == "closed"
        with pytest.raises(QueueClosed):
            await call

    @pytest.mark.parametrize("turns", [1, 5, None])
    async def test_cancelled_close_kills_workers(self, turns: int | None, tmp_path: Path, nothing_kept: None) -> None:
        options: dict[str, Any] = {"worker": targets.NeverCloses, "kwargs": {"log": str(tmp_path)}}
        group = await group_of(**options, shutdown_timeout=targets.LONG_S).__aenter__()
        call = asyncio.create_task(group.collective_rpc("slowly", (targets.LONG_S,)))
        async with asyncio.timeout(20):
            if turns is not None:
                await cancelled_after(group.aclose(), turns)
            else:
                closing = asyncio.create_task(group.aclose())
                await until((tmp_path / "closing").exists)
                await cancelled(closing)
        assert all(gone(pid) for pid in group.pids)
        with pytest.raises(QueueClosed):
            await call

    def test_forgotten_group_warns_and_leaves_nothing(self) -> None:
        async def forget() -> list[int]:
            return (await group_of().__aenter__()).pids

        with pytest.warns(ResourceWarning, match="was not closed"):
            pids = asyncio.run(forget())
            gc.collect()
        assert all(gone(pid) for pid in pids)
