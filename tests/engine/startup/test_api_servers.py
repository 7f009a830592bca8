"""API servers share a socket, come back when they die, and end with everything else when anything fails."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import textwrap
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from subprocess import PIPE, Popen
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import engine_targets as targets
import pytest
from managed import gone
from served_engine import stop, until
from supervised import MANY
from support import cancelled, eventually

from aioshm.engine import (
    APIServerProcessManager,
    CoreEngineProcManager,
    ProcessManager,
    Restart,
    wait_for_completion_or_failure,
)
from aioshm.errors import EngineDead, ProcessDied, QueueClosed, RoleError

pytestmark = pytest.mark.slow_on_uvloop


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield sock


def servers(codes: list[int | None], **options: Any) -> APIServerProcessManager:
    addresses = [f"ipc:///{index}" for index in range(len(codes))]
    return APIServerProcessManager(
        targets.serve_badly, "http://here", None, codes, len(codes), addresses, addresses, **options
    )


def engines(*codes: int | None) -> CoreEngineProcManager:
    return CoreEngineProcManager(targets.leave, len(codes), codes=list(codes))


class Coordinator:
    """The least that a coordinator has."""

    def __init__(self, code: int | None) -> None:
        self.manager = engines(code)
        self.proc = self.manager.processes[0]

    def close(self) -> None:
        self.manager.shutdown(timeout=0)


def all_ended(*managers: ProcessManager) -> bool:
    return all(process.exitcode is not None for manager in managers for process in manager.processes)


class TestManager:
    def test_each_server_gets_its_configuration_and_the_socket(self, listener: socket.socket) -> None:
        config = {"stats_update_address": "ipc:///stats", "membership_address": "ipc:///members"}
        inputs = ["ipc:///in0", "ipc:///in1"]
        outputs = ["ipc:///out0", "ipc:///out1"]
        with APIServerProcessManager(
            targets.serve, "http://here", listener, {"model": "m"}, 2, inputs, outputs, **config
        ) as manager:
            assert [process.name for process in manager.processes] == ["ApiServer_0", "ApiServer_1"]
            seen = []
            for _ in range(2):  # each answers one connection
                with socket.create_connection(listener.getsockname()[:2], timeout=20) as connection:
                    seen.append(json.loads(connection.makefile().read()))
            eventually(lambda: len(manager.finished_procs()) == 2)
            assert set(manager.finished_procs().values()) == {0}
        expected = []
        for index in range(2):
            own = {"input_address": inputs[index], "output_address": outputs[index], "client_index": index}
            expected.append(["http://here", {"model": "m"}, {**own, "client_count": 2, **config}])
        assert sorted(seen, key=lambda each: each[2]["client_index"]) == expected
        assert listener.fileno() >= 0  # it stays the caller's

    @pytest.mark.parametrize(
        ("options", "error", "text"),
        [
            ({"num_servers": 0}, ValueError, "num_servers"),
            ({"num_servers": "1"}, TypeError, "num_servers"),
            ({"num_servers": 2, "output_addresses": ["a", "b"]}, ValueError, "input_addresses must be 2"),
            ({"output_addresses": []}, ValueError, "output_addresses must be 1"),
            ({"restart": MANY}, RoleError, "create the manager in a coroutine"),
            ({"restart": "always"}, TypeError, "restart must be a Restart, or None, not 'always'"),
            ({"on_change": print}, ValueError, "on_change must go with restart"),
        ],
    )
    def test_bad_arguments_are_named(self, options: dict[str, Any], error: type[Exception], text: str) -> None:
        given = {"num_servers": 1, "input_addresses": ["a"], "output_addresses": ["a"], **options}
        with pytest.raises(error, match=text):
            APIServerProcessManager(targets.serve, "here", None, None, **given)


class TestWaiting:
    async def test_until_all_servers_are_done(self, nothing_kept: None) -> None:
        api = servers([0, 0])
        engine = engines(None, 0)
        coordinator = Coordinator(None)
        await engine.join_first()
        await wait_for_completion_or_failure(api, engine, coordinator)
        assert api.finished_procs() == {"ApiServer_0": 0, "ApiServer_1": 0}
        assert engine.finished_procs() == {"EngineCore_0": -signal.SIGTERM, "EngineCore_1": 0}
        assert all_ended(coordinator.manager)

    @pytest.mark.parametrize(("culprit", "code"), [("server", 3), ("engine", 4), ("coordinator", 5)])
    async def test_until_the_first_fails(self, culprit: str, code: int) -> None:
        api = servers([0, code if culprit == "server" else None])
        engine = engines(None, code if culprit == "engine" else None)
        coordinator = Coordinator(code if culprit == "coordinator" else None)
        dead = {"server": api.processes[1], "engine": engine.processes[1], "coordinator": coordinator.proc}[culprit]
        pid = dead.pid
        with pytest.raises(ProcessDied) as caught:
            await wait_for_completion_or_failure(api, engine, coordinator)
        error = caught.value
        assert str(error) == f"Process {dead.name} (PID: {pid}) died with exit code {code}"
        assert (error.name, error.pid, error.exitcode) == (dead.name, pid, code)
        assert all_ended(api, engine, coordinator.manager)

    async def test_engines_of_other_hosts_are_not_waited_for(self) -> None:
        async with servers([None]) as api:
            waiting = asyncio.create_task(wait_for_completion_or_failure(api, CoreEngineProcManager(targets.stay, 0)))
            await asyncio.wait([waiting], timeout=0.1)
            assert not waiting.done()
            await cancelled(waiting)
            assert all_ended(api)

    @pytest.mark.parametrize(
        ("error", "stop_error"), [(None, None), (EngineDead("an actor died"), None), (None, OSError("no way"))]
    )
    async def test_engines_may_be_no_processes(
        self, error: Exception | None, stop_error: Exception | None, caplog: pytest.LogCaptureFixture
    ) -> None:
        api = servers([0 if error is None else None])
        never = Mock(side_effect=AssertionError("there is an aclose"))
        stopped = AsyncMock(side_effect=stop_error)
        actors: Any = SimpleNamespace(join_first=AsyncMock(side_effect=error), aclose=stopped, close=never)
        raised = error or stop_error
        with nullcontext() if raised is None else pytest.raises(type(raised), match=str(raised)):
            await wait_for_completion_or_failure(api, actors)
        assert ("could not stop everything: no way" in caplog.text) == (stop_error is not None)
        stopped.assert_awaited()
        assert all_ended(api)
        assert api.sentinels() == []


class TestRestarts:
    async def test_connections_wait_at_the_socket(self, listener: socket.socket) -> None:
        address = listener.getsockname()[:2]
        async with APIServerProcessManager(
            targets.tell_pid, "", listener, None, 1, ["ipc:///a"], ["ipc:///b"], restart=MANY
        ) as manager:
            listener.close()  # each server has a copy, and its successor gets one, too
            first, _writer = await asyncio.open_connection(*address)
            pid = int(await first.readline())
            stop(pid)
            assert await first.read() == b""
            late, _late_writer = await asyncio.open_connection(*address)  # nobody accepts now
            assert int(await late.readline()) != pid
            assert f"ApiServer_0 (pid {pid}) was killed by SIGKILL" in manager.servers[0].cause
            _writer.close()
            _late_writer.close()

    async def test_a_crash_loop_ends_everything_with_every_cause(self, nothing_kept: None) -> None:
        api = servers([None, 3], restart=Restart(max_restarts=2, backoff_s=0.001))
        with pytest.raises(ProcessDied, match=r"^Process ApiServer_1 \(PID: \d+\) died with exit code 3; ") as caught:
            await wait_for_completion_or_failure(api)
        error = caught.value
        assert "crash loop: 3 deaths within 60 s" in str(error)
        assert str(error).count("exited with code 3") == 3
        assert (error.name, error.exitcode) == ("ApiServer_1", 3)
        assert api.processes[0].exitcode == -signal.SIGTERM
        assert [(info.state, info.restarts) for info in api.servers] == [("running", 0), ("exited", 2)]

    async def test_code_0_is_no_death(self) -> None:
        api = servers([0, None], restart=MANY)
        waiting = asyncio.create_task(wait_for_completion_or_failure(api))
        await until(lambda: api.servers[0].state == "exited")
        stop(api.servers[1].pid or 0)
        await until(lambda: api.servers[1].restarts == 1 and api.servers[1].state == "running")
        assert not waiting.done()
        assert (api.servers[0].restarts, api.servers[0].cause) == (0, "")
        await cancelled(waiting)
        assert all_ended(api)
        async with servers([0, 0], restart=MANY) as both:
            await both.wait()

    async def test_closing_at_any_moment_of_a_restart_leaves_nothing(self, nothing_kept: None) -> None:
        for turns in (0, 1, 10):
            api = servers([None], restart=MANY)
            waiting = asyncio.create_task(api.wait())
            victim = api.servers[0].pid or 0
            stop(victim)
            await until(lambda api=api: api.servers[0].restarts)
            for _ in range(turns):
                await asyncio.sleep(0.001)
            if turns % 2:
                api.close()
            else:
                await api.aclose()
            with pytest.raises(QueueClosed):
                await waiting
            assert all_ended(api)
            assert gone(victim)

    async def test_without_a_policy_a_death_is_the_end(self) -> None:
        async with servers([None, 5]) as api:
            with pytest.raises(ProcessDied, match=r"ApiServer_1 .* exit code 5$"):
                await api.wait()
            assert [(info.state, info.restarts) for info in api.servers] == [("running", 0), ("exited", 0)]
        with pytest.raises(QueueClosed):
            await api.wait()


FRONT_END = """
import asyncio, sys
import engine_targets as targets
from aioshm.engine import APIServerProcessManager, CoreEngineProcManager, wait_for_completion_or_failure

async def main():
    engines = CoreEngineProcManager(targets.say_and_stay, 1)
    servers = APIServerProcessManager(targets.{target}, "here", None, [None], 1, ["a"], ["b"], shutdown_timeout=60)
    pids = [process.pid for manager in (engines, servers) for process in manager.processes]
    while not servers.last_lines("ApiServer_0"):
        await asyncio.sleep(0.01)
    asyncio.get_running_loop().call_later(0.1, print, "waiting", *pids)
    asyncio.get_running_loop().call_later(0.1, sys.stdout.flush)
    await wait_for_completion_or_failure(servers, engines)

if __name__ == "__main__":
    {run}
"""


@pytest.mark.parametrize(
    ("target", "interrupts", "run"),
    [("say_and_stay", 1, "asyncio.run(main())"), ("refuse_to_end", 2, "import uvloop; uvloop.run(main())")],
)
def test_ctrl_c_stops_everything_and_a_second_ctrl_c_kills(
    target: str, interrupts: int, run: str, tmp_path: Path
) -> None:
    script = tmp_path / "front_end.py"
    script.write_text(textwrap.dedent(FRONT_END.format(target=target, run=run)))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with Popen([sys.executable, script], stdout=PIPE, stderr=PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        word, *pids = process.stdout.readline().split()
        assert word == "waiting"
        process.send_signal(signal.SIGINT)
        if interrupts == 2:
            eventually(lambda: gone(int(pids[0])), "the engine's end: of two signals at once only one would be seen")
            assert process.poll() is None
            process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
    assert errors.splitlines()[-1] == "KeyboardInterrupt"
    assert all(gone(int(pid)) for pid in pids)
