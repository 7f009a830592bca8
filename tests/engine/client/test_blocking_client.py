"""The client and the launch for plain threads: outputs, calls, timeouts, interrupts, forks, endings."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from typing import Any

import psutil
import pytest
from managed import gone
from served_engine import Engine, ask, here_and_there, stop
from startups import starting, tasks
from supervised import serve
from support import eventually, forked

from aioshm.engine import ClientOptions, get_engine_client_zmq_addr, run_engine_core
from aioshm.engine.blocking import CoreEngineLaunch, EngineClient, OutputStream, launch_core_engines
from aioshm.errors import CallFailed, EngineDead, QueueClosed, RequestAborted, RequestFailed, RoleError

pytestmark = pytest.mark.usefixtures("nothing_kept")


class Slow(Engine):
    """An engine that does not spin while a request is open."""

    async def _step_later(self) -> list[Any]:
        await asyncio.sleep(0.001)
        return self._step()


@contextmanager
def served(*engines: Any, **options: Any) -> Iterator[EngineClient]:
    """Let engines in a loop in another thread serve a client."""
    engines = engines or (Slow(is_async=True),)
    handshake = get_engine_client_zmq_addr(True, "")
    ending = threading.Event()
    with EngineClient(here_and_there(), len(engines), options=ClientOptions(**options)) as client:

        async def serve() -> None:
            async with tasks(*(run_engine_core(each, handshake, rank) for rank, each in enumerate(engines))):
                async with starting(handshake, len(engines), where=client.addresses) as startup:
                    await startup.wait(30)
                await asyncio.to_thread(ending.wait)

        thread = threading.Thread(target=lambda: asyncio.run(serve()))
        thread.start()
        try:
            client.wait_until_ready(30)
            yield client
        finally:
            client.close()
            ending.set()
            thread.join()


def tokens(stream: OutputStream[Any]) -> list[int]:
    return [output["token"] for output in stream]


def interrupt_when(condition: Callable[[], object], number: int = signal.SIGINT) -> None:
    """Press Ctrl-C, or send another signal, when something holds."""

    def wait() -> None:
        eventually(condition)
        os.kill(os.getpid(), number)

    threading.Thread(target=wait).start()


class TestStreams:
    def test_outputs_come_in_order_and_end(self) -> None:
        with served() as client:
            stream = client.submit(ask("a", 4))
            assert (stream.request_id, stream.engine) == ("a", 0)
            assert "request 'a' at engine 0" in repr(stream)
            assert "blocking EngineClient" in repr(client)
            assert tokens(stream) == [0, 1, 2, 3]
            with pytest.raises(StopIteration):
                next(stream)
            assert client.in_flight == 0
            assert client.ready == {0: {"num_gpu_blocks": 5}}
            assert client.ranks == [0]

    def test_next_with_a_limit_times_out_by_name_and_loses_nothing(self) -> None:
        with served() as client:
            stream = client.submit(ask("a", 2))
            assert stream.next(timeout=30)["token"] == 0
            assert stream.next()["token"] == 1
            stream = client.submit(ask("b", None), timeout=30)
            next(stream)
            for _ in range(2):
                with pytest.raises(TimeoutError, match=r"^request 'b': no output within 0\.05 s from engine 0$"):
                    stream.next(timeout=0.05)
            assert client.call("report", engine=0)["open"] == ["b"]
            client._client._link.pending.inboxes["b"].put("late")
            assert stream.next(timeout=0.05) == "late"
            with pytest.raises(ValueError, match="timeout must be"):
                stream.next(0)
            assert client.call("report", engine=0)["aborted"] == []

    def test_leaving_a_stream_aborts_the_request(self) -> None:
        with served() as client:
            for way in ("break", "with", "close", "forget", "abort"):
                stream = client.submit(ask(way, None))
                for _ in stream:
                    break
                if way == "with":
                    with stream:
                        pass
                elif way == "close":
                    stream.close()
                elif way == "abort":
                    client.abort([way, "unknown"])
                else:
                    del stream
                eventually(lambda: client.call("report", engine=0)["open"] == [], "the abortion")
                assert client.in_flight == 0

    @pytest.mark.parametrize("way", ["outputs", "error"])
    def test_stream_read_to_its_end_runs_no_code_when_dropped(self, way: str) -> None:
        """An exception of a signal handler would be lost in a destructor of the caller's thread."""
        called: list[str] = []

        def record(frame: Any, event: str, _arg: object) -> None:
            if event == "call":
                called.append(frame.f_code.co_qualname)

        with served() as client:
            stream = client.submit(ask("a", 3, refuse="" if way == "outputs" else "too long"))
            with suppress(RequestFailed):
                assert tokens(stream) == [0, 1, 2]
            sys.setprofile(record)
            del stream
            sys.setprofile(None)
        assert called == []

    def test_second_thread_that_waits_for_a_stream_is_refused(self) -> None:
        with served() as client, ThreadPoolExecutor(2) as pool:
            stream = client.submit(ask("a", None))
            next(stream)
            waits = [pool.submit(next, stream) for _ in range(2)]
            refused = next(as_completed(waits))
            with pytest.raises(RoleError, match="another task or thread waits for outputs of request 'a'"):
                refused.result()
            stream.close()
            waits.remove(refused)
            with pytest.raises(RequestAborted):
                waits[0].result(20)


class TestCalls:
    def test_results_are_returned_and_errors_raised_in_the_calling_thread(self) -> None:
        with served(Engine(is_async=True), Engine(is_async=True), request_type=dict) as client:
            assert client.call("add", 1, 2, engine=1) == 3
            assert client.call("add", 1) == [2, 2]
            with pytest.raises(CallFailed, match=r"^Call to fail method failed: 'why'$"):
                client.call("fail", "why", engine=1)
            with pytest.raises(TimeoutError, match=r"no answer to a call of never within 0.05 s"):
                client.call("never", engine=0, timeout=0.05)
            with pytest.raises(TypeError, match="request must be a dict"):
                client.submit(5)
            with pytest.raises(ValueError, match="timeout must be a finite number"):
                client.submit(ask("a"), timeout=0)
            with pytest.raises(RequestFailed, match=r"^ValueError: too long$"):
                next(client.submit(ask("b", refuse="too long")))
            assert client._host is not None
            with pytest.raises(RoleError, match="would wait for itself"):
                client._host.do(lambda: client.call("add", 1))

    def test_engines_pause_and_resume(self) -> None:
        with served() as client:
            stream = client.submit(ask("a", None))
            next(stream)
            with pytest.raises(TimeoutError, match="engines 0 have not paused"):
                client.pause(timeout=0.01)
            client.pause("abort")
            assert client.paused == client.stats().paused == "abort"
            with pytest.raises(RequestAborted, match="paused"):
                next(stream)
            waiting = client.submit(ask("b"), timeout=0.05)
            with pytest.raises(TimeoutError, match=r"no output within 0\.05 s because the engines are paused"):
                next(waiting)
            client.resume()
            waiting.timeout = None
            assert tokens(waiting) == [0, 1, 2]


class TestInterrupts:
    def test_interrupt_aborts_the_waiting_request_only(self) -> None:
        def handle(*_: object) -> None:
            raise LookupError("now")

        before = signal.signal(signal.SIGALRM, handle)
        try:
            with served() as client:
                others: list[list[int]] = []
                thread = threading.Thread(target=lambda: others.append(tokens(client.submit(ask("other", 100)))))
                thread.start()
                for number, error in ((signal.SIGINT, KeyboardInterrupt), (signal.SIGALRM, LookupError)):
                    stream = client.submit(ask(error.__name__, None))
                    assert next(stream)["token"] == 0
                    interrupt_when(lambda stream=stream: stream._inbox.waiter, number)
                    with pytest.raises(error):
                        stream.next(30)
                    with pytest.raises(RequestAborted):
                        next(stream)
                interrupt_when(lambda: client._client._link.pending.calls)
                with pytest.raises(KeyboardInterrupt):
                    client.call("never", engine=0)
                interrupt_when(lambda: client.paused)
                with pytest.raises(KeyboardInterrupt):
                    while True:
                        client.pause()
                assert client.paused == "finish", "the engines stay paused"
                client.resume()
                assert client.call("report", engine=0)["aborted"] == ["KeyboardInterrupt", "LookupError"]
                thread.join()
                assert others == [[*range(100)]]
        finally:
            signal.signal(signal.SIGALRM, before)

    @pytest.mark.slow
    def test_interrupts_at_any_moment_leave_no_request_open(self) -> None:
        chance = random.Random(3)
        armed: list[bool] = []

        def handle(*_: object) -> None:
            if armed:
                armed.clear()
                raise KeyboardInterrupt

        interrupts = 0
        before = signal.signal(signal.SIGALRM, handle)
        with served() as client, ThreadPoolExecutor(1) as pool:
            others = pool.submit(lambda: [tokens(client.submit(ask(f"other {n}", 20))) for n in range(40)])
            for number in range(80):
                try:
                    armed.append(True)
                    signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-5, 0.02))
                    assert tokens(client.submit(ask(f"mine {number}", 8))) == [*range(8)]
                    client.call("add", 1, engine=0)
                    armed.clear()
                except KeyboardInterrupt:
                    interrupts += 1
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            assert interrupts > 20
            assert others.result(30) == [[*range(20)]] * 40
            eventually(lambda: client.call("report", engine=0)["open"] == [], "the end of every request")
            assert client.in_flight == 0


class TestEnding:
    def test_closing_ends_all_waits(self) -> None:
        with served() as client, ThreadPoolExecutor(6) as pool:
            streams = [client.submit(ask(name, None)) for name in "ab"]
            for stream in streams:
                next(stream)
            waits = [pool.submit(next, stream) for stream in streams] + [pool.submit(client.call, "never")]
            eventually(lambda: all(each.running() for each in waits), "their waiting")
            closers = [pool.submit(client.close) for _ in range(3)]
            for each in waits:
                with pytest.raises(QueueClosed):
                    each.result(20)
            for closer in closers:
                closer.result(20)
            client.close()
            for attempt in (lambda: client.submit(ask("c")), lambda: client.call("add", 1), client.wait_until_ready):
                with pytest.raises(QueueClosed, match="closed"):
                    attempt()
            with pytest.raises(RoleError, match="once"):
                client.open()

    def test_calls_before_open_and_ready_are_refused(self) -> None:
        client = EngineClient(here_and_there(), 1)
        with pytest.raises(RoleError, match="inside `with`"):
            client.submit(ask("a"))
        client.close()
        with client:
            with pytest.raises(RoleError, match="not ready"):
                client.submit(ask("a"))
            with pytest.raises(TimeoutError, match=r"engines 0 have not registered after 0\.01 s"):
                client.wait_until_ready(0.01)
        addresses = here_and_there()
        addresses.inputs[0] = "tcp://256.0.0.1:1"
        with pytest.raises(OSError, match="cannot bind tcp://256"):
            EngineClient(addresses, 1).open()

    def test_forgetting_to_close_is_reported(self) -> None:
        client = EngineClient(here_and_there(), 1)
        client.open()
        with pytest.warns(ResourceWarning, match="was not closed: use `with`"):
            del client
            gc.collect()

    def test_a_forked_child(self) -> None:
        with served() as client:
            stream = client.submit(ask("a", None))
            next(stream)
            uses = (lambda: next(stream), lambda: client.call("add", 1), lambda: client.submit(ask("b")))

            def is_refused_and_closes(_: object) -> bool:
                for use in uses:
                    with pytest.raises(RoleError, match="not to its child"):
                        use()
                client.close()
                stream.close()
                return True

            assert forked(is_refused_and_closes, None)()
            assert client.call("report", engine=0)["open"] == ["a"]

    @pytest.mark.parametrize("ending", ["os.kill(os.getpid(), 2)", "pid = os.fork()"])
    def test_a_program_that_ends_without_closing(self, ending: str) -> None:
        program = f"""
            import os, sys
            from aioshm.engine import EngineZmqAddresses
            from aioshm.engine.blocking import EngineClient
            client = EngineClient(EngineZmqAddresses(["tcp://127.0.0.1:0"], ["tcp://127.0.0.1:0"]), 1)
            client.open()
            {ending}
        """
        program = textwrap.dedent(program)
        done = subprocess.run([sys.executable, "-c", program], timeout=30, capture_output=True, text=True)
        assert done.returncode == (-signal.SIGINT if "kill" in ending else 0), done.stderr


class TestLaunch:
    def test_launch_serves_names_a_death_and_ends(self) -> None:
        with launch_core_engines(serve, 2) as launch:
            assert sorted(launch.report.engines if launch.report else []) == [0, 1]
            assert launch.coordinator is not None
            with ThreadPoolExecutor(8) as pool:
                found = pool.map(lambda n: tokens(launch.client.submit(ask(str(n), n % 7 + 1))), range(60))
                assert list(found) == [[*range(n % 7 + 1)] for n in range(60)]
                assert sum(report["seen"] for report in launch.client.call("report")) == 60
            pids = [process.pid or 0 for process in [*launch.processes, launch.coordinator.proc]]
            assert launch.addresses.inputs == launch.client.addresses.inputs
            assert launch.wait_until_ready() is launch.report
            waiting = launch.client.submit(ask("a", None), engine=0)
            next(waiting)
            stop(launch.processes[0].pid or 0)
            with pytest.raises(EngineDead, match=r"engine 0 \(pid \d+\) was killed by SIGKILL"):
                list(waiting)
        assert len(pids) == 3
        assert all(map(gone, pids))
        with pytest.raises(QueueClosed):
            launch.client.call("add", 1)

    def test_an_interrupt_while_they_start(self) -> None:
        started: list[CoreEngineLaunch] = []
        before = set(psutil.Process().children())
        interrupt_when(lambda: set(psutil.Process().children()) - before)
        with pytest.raises(KeyboardInterrupt):
            with launch_core_engines(serve, kwargs={"stuck": __file__}) as launch:
                started.append(launch)
        assert not started

    def test_clients_elsewhere(self) -> None:
        with launch_core_engines(serve, num_api_servers=1, wait=False) as launch:
            with pytest.raises(RoleError, match="there is no client here"):
                _ = launch.client
            with EngineClient(launch.addresses, 1) as client:
                launch.wait_until_ready(60)
                client.wait_until_ready(30)
                assert tokens(client.submit(ask("a"))) == [0, 1, 2]
