"""Groups of workers: broadcasts, errors, deaths, timeouts, start and closing."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop
import worker_targets as targets
from managed import gone, open_things
from support import cancelled_after, eventually, until

from aioshm import CodecError, Options, QueueClosed, RoleError, WorkerDied, WorkerError
from aioshm.engine import WorkerGroup
from aioshm.engine.workers.processes import WorkerProcess
from aioshm.engine.workers.session import Session
from aioshm.process.watch import process_state

pytestmark = pytest.mark.slow_on_uvloop


def group_of(n_workers: int = 2, worker: Any = targets.Worker, **options: Any) -> WorkerGroup:
    return WorkerGroup(worker, n_workers, **options)


class TestCalls:
    async def test_every_worker_is_made_and_called_and_results_come_by_rank(self) -> None:
        async with group_of(3, args=(1, "x"), kwargs={"more": [2]}, name="TP") as group:
            made = await group.collective_rpc("tell_made")
            assert made == [(rank, (1, "x"), {"more": [2]}) for rank in range(3)]
            assert await group.collective_rpc("pid") == group.pids
            assert await group.collective_rpc("add", (1, 2), {"times": 10}) == [30, 31, 32]
            assert await group.collective_rpc("slowly", (0, "awaited")) == ["awaited"] * 3
            assert await group.collective_rpc("add", [5], unique_reply_rank=2) == 7
            assert await group.collective_rpc(targets.rank_of, (10,)) == [10, 11, 12]
            assert psutil.Process(group.pids[0]).ppid() == os.getpid()

    async def test_broadcast_calls_every_worker_with_its_arguments_and_returns_results_by_rank(self) -> None:
        async with group_of(2) as group:
            assert await group.broadcast("add", 1, 2, times=10) == [30, 31]
            assert await group.broadcast(targets.rank_of, 10) == [10, 11]
            with pytest.raises(TimeoutError, match="slowly: no answer from Worker_0"):
                await group.broadcast("slowly", targets.LONG_S, timeout=0.01)

    async def test_constructor_without_rank_is_called_without_rank(self) -> None:
        async with group_of(2, targets.Rankless, kwargs={"factor": 3}) as group:
            assert await group.broadcast("multiply", 5) == [15, 15]

    async def test_a_worker_may_be_made_by_a_coroutine(self) -> None:
        async with group_of(1, targets.made_slowly) as group:
            assert await group.collective_rpc("add", (1,)) == [1]

    async def test_workers_run_the_event_loop_that_the_factory_makes(self) -> None:
        async with group_of(1, loop_factory=uvloop.new_event_loop) as group:
            assert await group.collective_rpc(targets.loop_of) == ["uvloop"]
        async with group_of(1) as group:
            assert "uvloop" not in (await group.collective_rpc(targets.loop_of))[0]

    def test_a_loop_factory_that_makes_nothing_is_refused(self) -> None:
        with pytest.raises(TypeError, match="loop_factory must be callable, or None, not 'uvloop'"):
            group_of(loop_factory="uvloop")

    async def test_concurrent_calls_are_served_in_their_order(self) -> None:
        async with group_of() as group:
            calls = [group.collective_rpc("add", (number,)) for number in range(50)]
            assert await asyncio.gather(*calls) == [[number, number + 1] for number in range(50)]
            assert await group.collective_rpc("history") == [[(number,) for number in range(50)]] * 2


class TestErrors:
    async def test_an_exception_names_every_rank_and_brings_the_traceback(self) -> None:
        async with group_of() as group:
            with pytest.raises(
                WorkerError, match="fail failed: rank 0: ValueError: rank 0 does not like it; rank 1: Va"
            ) as caught:
                await group.collective_rpc("fail")
            assert caught.value.method == "fail"
            assert [(rank, error.kind) for rank, error in caught.value.errors.items()] == [
                (0, "ValueError"),
                (1, "ValueError"),
            ]
            assert "in fail\n" in caught.value.errors[1].traceback
            assert "worker_process" not in caught.value.errors[1].traceback
            copy = pickle.loads(pickle.dumps(caught.value))
            assert (str(copy), copy.errors) == (str(caught.value), caught.value.errors)

            for wanted in (None, 0):  # also where that worker's result is not wanted
                with pytest.raises(WorkerError) as caught:
                    await group.collective_rpc("fail", (1,), unique_reply_rank=wanted)
                assert list(caught.value.errors) == [1]
            with pytest.raises(WorkerError, match=r"AttributeError.*nothing_of_the_kind"):
                await group.collective_rpc("nothing_of_the_kind")
            with pytest.raises(WorkerError, match="TypeError"):
                await group.collective_rpc(targets.rank_of)
            assert await group.collective_rpc("add", (1,)) == [1, 2]

    @pytest.mark.parametrize(
        ("method", "arguments", "options", "error", "name"),
        [
            ("collective_rpc", ("",), {}, TypeError, "method"),
            ("collective_rpc", (3,), {}, TypeError, "method"),
            ("collective_rpc", ("add", "ab"), {}, TypeError, "args"),
            ("collective_rpc", ("add", (), [1]), {}, TypeError, "kwargs"),
            ("collective_rpc", ("add",), {"timeout": -1}, ValueError, "timeout"),
            ("collective_rpc", ("add",), {"timeout": "1"}, TypeError, "timeout"),
            ("collective_rpc", ("add",), {"unique_reply_rank": 2}, ValueError, "unique_reply_rank"),
            ("collective_rpc", ("add",), {"unique_reply_rank": True}, TypeError, "unique_reply_rank"),
            ("call", (2, "add"), {}, ValueError, "rank"),
            ("call", (-1, "add"), {}, ValueError, "rank"),
            ("call", ("0", "add"), {}, TypeError, "rank"),
            ("call", (0, ""), {}, TypeError, "method"),
            ("call", (0, 3), {}, TypeError, "method"),
            ("call", (0, "add"), {"timeout": -1}, ValueError, "timeout"),
            ("call", (0, "add"), {"timeout": "1"}, TypeError, "timeout"),
        ],
    )
    async def test_bad_arguments_of_a_call_are_named(
        self, method: str, arguments: Any, options: Any, error: type[Exception], name: str
    ) -> None:
        with pytest.raises(error, match=f"{name} must be"):
            await getattr(group_of(), method)(*arguments, **options)

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
        ],
    )
    def test_bad_arguments_are_named(self, arguments: dict[str, Any], error: type[Exception]) -> None:
        ((name, _),) = arguments.items()
        with pytest.raises(error, match=name):
            group_of(**arguments)


class TestDeath:
    @pytest.mark.parametrize(
        ("how", "code", "manner"),
        [("SIGKILL", -9, "killed by SIGKILL"), ("exit", 0, "exited with code 0"), ("_exit", 3, "exited with code 3")],
    )
    async def test_death_fails_every_call_and_names_the_worker(self, how: str, code: int, manner: str) -> None:
        async with group_of() as group:
            pid = group.pids[1]
            first = asyncio.create_task(group.collective_rpc("end_or_wait", (1, how)))
            others = [asyncio.create_task(group.collective_rpc("add", timeout=50)) for _ in range(3)]
            async with asyncio.timeout(5):
                results = await asyncio.gather(first, *others, return_exceptions=True)
            results += await asyncio.gather(group.collective_rpc("add"), return_exceptions=True)
            for error in results:
                assert isinstance(error, WorkerDied)
                assert (error.rank, error.name, error.pid, error.exitcode) == (1, "Worker_1", pid, code)
                assert f"Worker_1 (pid {pid}) was {manner}" in str(error) or f"Worker_1 (pid {pid}) {manner}" in str(
                    error
                )
                assert "rank 1 goes" in error.last_lines
                assert "rank 1 goes" in str(error)
            copy = pickle.loads(pickle.dumps(results[0]))
            assert (str(copy), vars(copy)) == (str(results[0]), vars(results[0]))
            async with asyncio.timeout(3):  # closing does not wait for worker 0
                await group.aclose()

    async def test_names_the_last_line_of_its_stderr(self) -> None:
        async with group_of() as group:
            pid = group.pids[1]
            with pytest.raises(WorkerDied) as caught:
                await group.collective_rpc("end_or_wait", (1, "_exit"))
        first = str(caught.value).splitlines()[0]
        assert first == f"Worker_1 (pid {pid}) exited with code 3: rank 1 goes"

    async def test_of_an_idle_worker(self) -> None:
        async with group_of() as group:
            first = asyncio.create_task(group.join_first())
            os.kill(group.pids[0], signal.SIGTERM)
            async with asyncio.timeout(5):
                error = await first
            assert isinstance(error, WorkerDied)
            assert f"Worker_0 (pid {group.pids[0]}) was killed by SIGTERM" in str(error)
            with pytest.raises(WorkerDied, match=r"^Worker_0 [^,]* killed by SIGTERM"):
                await group.collective_rpc("add")
        with pytest.raises(WorkerDied, match=r"^Worker_0 [^,]* killed by SIGTERM"):
            await group.collective_rpc("add")

    def test_of_the_driver(self) -> None:
        script = (
            "import asyncio, os, sys; from aioshm.engine import WorkerGroup; from worker_targets import Worker\n"
            "async def main():\n"
            "    async with WorkerGroup(Worker, 2) as group:\n"
            "        print(*group.pids, flush=True)\n"
            "        await group.collective_rpc(*eval(sys.argv[1]))\n"
            "        await asyncio.sleep(100)\n"
            "asyncio.run(main())"
        )
        for call in ("('add',)", "('wait_for', ('/nowhere', 1, 0))"):
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
            with subprocess.Popen(
                [sys.executable, "-c", script, call], stdout=subprocess.PIPE, text=True, env=environment
            ) as driver:
                assert driver.stdout is not None
                pids = [int(pid) for pid in driver.stdout.readline().split()]
                driver.kill()
            for pid in pids:
                eventually(lambda pid=pid: gone(pid), within_s=2)


class TestTime:
    async def test_timeout_names_workers_without_an_answer_and_late_answers_are_dropped(self, tmp_path: Path) -> None:
        go = tmp_path / "go"
        async with group_of() as group:
            for number in range(6):
                timeout = 0.05 if number else 1.0  # worker 0 answers within 1 s
                with pytest.raises(TimeoutError, match=rf"Worker_1 \(pid {group.pids[1]}\)|no answer|waits") as caught:
                    await group.collective_rpc("wait_for", (str(go), number, 1), timeout=timeout)
                if number == 0:
                    assert "Worker_0" not in str(caught.value)
            go.touch()
            assert await group.collective_rpc("slowly", (0, "on time")) == ["on time"] * 2

    @pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
    async def test_timeout_reports_a_stopped_worker_as_stopped(self, rank: int) -> None:
        async with group_of(shutdown_timeout=0.2) as group:
            pid = group.pids[rank]
            os.kill(pid, signal.SIGSTOP)
            await until(lambda: process_state(pid) == "stopped")
            with pytest.raises(TimeoutError, match=rf"from Worker_{rank} \(pid {pid}, stopped\) within 1\.0 s"):
                await group.collective_rpc("add", timeout=1.0)  # worker 0 answers within 1 s
            with pytest.raises(TimeoutError, match=f"Worker_{rank}"):
                await group.collective_rpc("add", timeout=0)
            os.kill(pid, signal.SIGCONT)
            assert await group.collective_rpc("add", (5,)) == [5, 6]
            os.kill(pid, signal.SIGSTOP)

    async def test_queued_call_may_time_out_or_be_cancelled(self, tmp_path: Path) -> None:
        go = tmp_path / "go"
        async with group_of() as group:
            first = asyncio.create_task(group.collective_rpc("wait_for", (str(go), "first", 0)))
            second = asyncio.create_task(group.collective_rpc("add", (1,)))
            third = asyncio.create_task(group.collective_rpc("add", (2,)))
            await asyncio.sleep(0)
            with pytest.raises(TimeoutError, match="waits for the calls before it"):
                await group.collective_rpc("add", (3,), timeout=0.05)
            second.cancel()
            go.touch()
            assert await first == ["first"] * 2
            assert await third == [2, 3]
            assert await group.collective_rpc("history") == [[(2,)]] * 2
            with pytest.raises(asyncio.CancelledError):
                await second


class TestStarting:
    @pytest.mark.parametrize("rank", [0, 1])
    async def test_a_worker_that_cannot_be_made(self, rank: int) -> None:
        with pytest.raises(WorkerError, match=rf"fails_to_start failed: rank {rank}: ValueError") as caught:
            async with group_of(worker=targets.fails_to_start, kwargs={"failing": rank}):
                pass
        assert "in fails_to_start" in caught.value.errors[rank].traceback

    async def test_a_worker_that_dies(self) -> None:
        with pytest.raises(WorkerDied, match=r"Worker_1 .* killed by SIGKILL"):
            async with group_of(worker=targets.fails_to_start, args=(), kwargs={"failing": 1, "how": "SIGKILL"}):
                pass

    async def test_worker_killed_before_it_runs_is_named(self) -> None:
        group = group_of()
        entering = asyncio.create_task(group.__aenter__())
        while len(group.pids) < 2:
            await asyncio.sleep(0)
        os.kill(group.pids[1], signal.SIGKILL)
        with pytest.raises(WorkerDied, match=r"Worker_1 .* killed by SIGKILL"):
            await entering

    async def test_constructor_that_cannot_be_pickled_or_unpickled_is_an_error(self) -> None:
        with pytest.raises(CodecError, match="pickle"):
            async with group_of(worker=lambda rank: None):
                pass
        with pytest.raises(WorkerError, match="not in the worker"):
            async with group_of(args=(targets.FaultyAt("worker"),)):
                pass

    async def test_too_slow(self) -> None:
        group = group_of(worker=targets.fails_to_start, kwargs={"failing": 1, "how": "hang"}, ready_timeout=1)
        with pytest.raises(TimeoutError, match=r"no answer from .*Worker_1 .* within 1\.0 s"):
            await group.__aenter__()
        assert all(gone(pid) for pid in group.pids)

    async def test_queue_of_the_group_does_not_report_missing_readers_while_constructors_run(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        hang = {"failing": 1, "how": "hang"}
        options = Options(stall_warning_s=0.2)
        group = group_of(worker=targets.fails_to_start, kwargs=hang, options=options, ready_timeout=1)
        with pytest.raises(TimeoutError, match="no answer from"):
            await group.__aenter__()
        assert "for readers to attach" not in caplog.text

    async def test_constructed_workers_that_have_not_attached_in_time_are_named(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        connect = Session.connect

        async def only_first_connects(session: Session, worker: WorkerProcess) -> None:
            if worker.rank == 1:
                await asyncio.Event().wait()
            await connect(session, worker)

        monkeypatch.setattr(Session, "connect", only_first_connects)
        group = group_of(ready_timeout=5)
        # A worker is attached when all are: the first one waits for the second one.
        late = r"Worker_0 \(pid \d+\), Worker_1 \(pid \d+\)"
        with pytest.raises(TimeoutError, match=rf"no answer from {late} within 5\.0 s"):
            await group.__aenter__()

    async def test_cancelled_at_any_moment_nothing_is_left(self) -> None:
        async with group_of():  # what multiprocessing opens for good
            pass
        before = open_things()
        for delay in (0, 0.05, 0.3):
            group = group_of(worker=targets.fails_to_start, kwargs={"failing": 1, "how": "hang"})
            entering = asyncio.create_task(group.__aenter__())
            await asyncio.sleep(delay)
            entering.cancel()
            with pytest.raises(asyncio.CancelledError):
                await entering
            assert all(gone(pid) for pid in group.pids)
        eventually(lambda: open_things() <= before, f"the end of {open_things() - before}")


def own_loop_factory() -> Any:
    """Return the factory of loops of the test's kind."""
    if type(asyncio.get_running_loop()).__module__.startswith("uvloop"):
        return uvloop.new_event_loop
    return None


async def closed_by_sigterm_at_line(log: Path, number: int, *, scheduling: bool = False) -> None:
    """Assert that a SIGTERM at a line after a call closes the worker."""
    factory = own_loop_factory()
    sent = log / "sent"
    async with group_of(1, kwargs={"log": str(log)}, loop_factory=factory) as group:
        await group.call(0, "add", 1)
        with suppress(WorkerDied):  # the worker answers before the line, or dies
            await group.call(0, targets.sigterm_at_line, number, str(sent), scheduling=scheduling)
            async with asyncio.timeout(10):
                while not sent.exists():
                    await group.call(0, "add", 1)
        async with asyncio.timeout(10):
            await group.join_first()
        with pytest.raises(WorkerDied, match="killed by SIGTERM"):
            await group.call(0, "add", 1)
    assert (log / "0").read_text() == "closed", sent.read_text()


class TestClosing:
    async def test_workers_are_closed(self, tmp_path: Path) -> None:
        async with group_of(kwargs={"log": str(tmp_path)}) as group:
            pids = group.pids
            first = asyncio.create_task(group.join_first())
        assert await first is None
        assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"0": "closed", "1": "closed"}
        assert all(gone(pid) for pid in pids)
        await group.aclose()
        with pytest.raises(QueueClosed):
            await group.collective_rpc("add")
        with pytest.raises(RoleError, match="once"):
            await group.__aenter__()

    @pytest.mark.parametrize("method", [None, "say_and_wait", "say_and_block"], ids=["idle", "awaiting", "blocking"])
    @pytest.mark.parametrize("alone", [False, True], ids=["of all", "of one"])
    async def test_worker_that_gets_sigterm_is_closed(self, method: str | None, alone: bool, tmp_path: Path) -> None:
        factory = own_loop_factory()
        begun = tmp_path / "begun"
        async with group_of(1, kwargs={"log": str(tmp_path)}, loop_factory=factory) as group:

            def call(name: str, *args: Any) -> Any:
                if alone:
                    return group.call(0, name, *args)
                return group.collective_rpc(name, args)

            await call("add", 1)
            calls = [asyncio.ensure_future(call(method, str(begun)))] if method else []
            await until(lambda: not method or begun.exists())
            os.kill(group.pids[0], signal.SIGTERM)
            await group.join_first()
            with pytest.raises(WorkerDied, match="killed by SIGTERM"):
                await (calls[0] if calls else call("add", 1))
            assert (tmp_path / "0").read_text() == "closed"

    @pytest.mark.parametrize("way", ["caught", "destructor"])
    async def test_worker_that_loses_the_exception_of_sigterm_is_closed(self, way: str, tmp_path: Path) -> None:
        async with group_of(1, kwargs={"log": str(tmp_path)}, loop_factory=own_loop_factory()) as group:
            with pytest.raises(WorkerDied, match="killed by SIGTERM"):
                async with asyncio.timeout(10):
                    await group.call(0, "lose_sigterm", way)
        assert (tmp_path / "0").read_text() == "closed"

    async def test_worker_whose_generator_blocks_is_closed_by_sigterm(self, tmp_path: Path) -> None:
        options = {"worker": targets.Streaming, "kwargs": {"log": str(tmp_path)}}
        async with group_of(1, loop_factory=own_loop_factory(), **options) as group:
            begun = tmp_path / "begun"
            item = asyncio.ensure_future(anext(group.stream(0, "say_and_block_once", str(begun))))
            await until(begun.exists)
            os.kill(group.pids[0], signal.SIGTERM)
            with pytest.raises(WorkerDied, match="killed by SIGTERM"):
                async with asyncio.timeout(10):
                    await item
        assert (tmp_path / "0").read_text() == "closed"

    @pytest.mark.one_loop
    async def test_worker_that_gets_sigterm_while_asyncio_schedules_a_task_is_closed(self, tmp_path: Path) -> None:
        await closed_by_sigterm_at_line(tmp_path, 1, scheduling=True)

    @pytest.mark.slow
    async def test_worker_that_gets_sigterm_at_any_line_is_closed(self, tmp_path: Path) -> None:
        for number in range(1, 500, 23):
            directory = tmp_path / f"{number}"
            directory.mkdir()
            await closed_by_sigterm_at_line(directory, number)

    async def test_cancelled_start_closes_the_worker_that_was_created(self, tmp_path: Path) -> None:
        group = group_of(worker=targets.OneHangs, kwargs={"log": str(tmp_path)})
        entering = asyncio.create_task(group.__aenter__())
        await until((tmp_path / "made").exists)
        began = time.monotonic()
        entering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await entering
        assert time.monotonic() - began < 4, "a worker that is being made exits promptly"
        assert (tmp_path / "0").read_text() == "closed"

    async def test_sigterm_does_not_interrupt_close(self, tmp_path: Path) -> None:
        async with group_of(1, worker=targets.ClosesSlowly, kwargs={"log": str(tmp_path)}) as group:
            pid = group.pids[0]
            closing = asyncio.create_task(group.aclose())
            await until((tmp_path / "closing").exists)
            os.kill(pid, signal.SIGTERM)
            await closing
        assert (tmp_path / "0").read_text() == "closed"

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

    async def test_closing_fails_waiting_calls_and_kills_busy_workers(self) -> None:
        group = await group_of(shutdown_timeout=0.2).__aenter__()
        calls = [asyncio.create_task(group.collective_rpc("wait_for", ("/nowhere", 1, 1))) for _ in range(3)]
        await asyncio.sleep(0)
        await group.aclose()
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(outcome, QueueClosed)
        assert all(gone(pid) for pid in group.pids)

    async def test_close_cancelled_while_workers_close_kills_them(self, tmp_path: Path) -> None:
        group = await group_of(worker=targets.NeverCloses, kwargs={"log": str(tmp_path)}).__aenter__()
        call = asyncio.create_task(group.collective_rpc("slowly", (targets.LONG_S,)))
        closing = asyncio.create_task(group.aclose())
        await until((tmp_path / "closing").exists)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert all(gone(pid) for pid in group.pids)
        with pytest.raises(QueueClosed):
            await call

    @pytest.mark.parametrize("turns", [1, 2, 5])
    async def test_close_cancelled_while_queues_close_kills_workers(self, turns: int, tmp_path: Path) -> None:
        before = open_things()
        group = await group_of(shutdown_timeout=targets.LONG_S).__aenter__()
        call = asyncio.create_task(group.collective_rpc("say_and_block", (str(tmp_path / "begun"),)))
        await until((tmp_path / "begun").exists)
        async with asyncio.timeout(20):
            await cancelled_after(group.aclose(), turns)
        assert all(gone(pid) for pid in group.pids)
        with pytest.raises(QueueClosed):
            await call
        await until(lambda: open_things() <= before)

    def test_forgotten_group_warns_and_leaves_nothing(self) -> None:
        async def forget() -> list[int]:
            return (await group_of().__aenter__()).pids

        with pytest.warns(ResourceWarning, match="was not closed"):
            pids = asyncio.run(forget())
            gc.collect()
        assert all(gone(pid) for pid in pids)
