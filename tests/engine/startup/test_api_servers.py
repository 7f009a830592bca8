"""API servers share a socket; a front end is over when they are done, or when anything of it fails."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import nullcontext
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import engine_targets as targets
import pytest
from managed import gone, open_things
from support import eventually

from aioshm.engine import (
    APIServerProcessManager,
    CoreEngineProcManager,
    ProcessManager,
    wait_for_completion_or_failure,
)
from aioshm.errors import EngineDead, ProcessDied


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield sock


def servers(codes: list[int | None], **kwargs: Any) -> APIServerProcessManager:
    addresses = [f"ipc:///{index}" for index in range(len(codes))]
    return APIServerProcessManager(
        targets.serve_badly, "http://here", None, codes, len(codes), addresses, addresses, **kwargs
    )


def engines(*codes: int | None) -> CoreEngineProcManager:
    return CoreEngineProcManager(targets.leave, len(codes), codes=list(codes))


class Coordinator:
    """The least that a coordinator has."""

    def __init__(self, code: int | None) -> None:
        kwargs = {"dp_rank": 0, "local_dp_rank": 0, "codes": [code]}
        self.proc = SpawnProcess(target=targets.leave, name="DPCoordinator", kwargs=kwargs)
        self.proc.start()
        self.closed = False

    def close(self) -> None:
        self.closed = True
        self.proc.kill()
        self.proc.join()


class Actors:
    """Engines that are no processes of this machine."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.closed = False

    async def join_first(self) -> None:
        await asyncio.sleep(0.05)
        if self.error is not None:
            raise self.error

    async def aclose(self) -> None:
        self.closed = True

    def close(self) -> None:
        raise AssertionError("there is an aclose")


def all_ended(*managers: ProcessManager) -> bool:
    return all(process.exitcode is not None for manager in managers for process in manager.processes)


class TestManager:
    @pytest.mark.parametrize("stats", [{"stats_update_address": "ipc:///stats"}, {}])
    def test_each_server_gets_its_configuration_and_the_socket(
        self, listener: socket.socket, stats: dict[str, str]
    ) -> None:
        inputs = ["ipc:///in0", "ipc:///in1"]
        outputs = ["ipc:///out0", "ipc:///out1"]
        with APIServerProcessManager(
            target_server_fn=targets.serve,
            listen_address="http://here",
            sock=listener,
            args={"model": "m"},
            num_servers=2,
            input_addresses=inputs,
            output_addresses=outputs,
            **stats,
        ) as manager:
            assert [process.name for process in manager.processes] == ["ApiServer_0", "ApiServer_1"]
            seen = []
            for _ in range(2):  # each answers one connection
                with socket.create_connection(listener.getsockname()[:2], timeout=20) as connection:
                    seen.append(json.loads(connection.makefile().read()))
            eventually(lambda: len(manager.finished_procs()) == 2)
            assert set(manager.finished_procs().values()) == {0}
        seen.sort(key=lambda each: each[2]["client_index"])
        assert seen == [
            [
                "http://here",
                {"model": "m"},
                {
                    "input_address": inputs[index],
                    "output_address": outputs[index],
                    "client_count": 2,
                    "client_index": index,
                    **stats,
                },
            ]
            for index in range(2)
        ]
        assert listener.fileno() >= 0  # it stays the caller's

    @pytest.mark.parametrize(
        ("count", "inputs", "outputs", "error", "name"),
        [
            (0, [], [], ValueError, "num_servers"),
            ("1", ["a"], ["a"], TypeError, "num_servers"),
            (2, ["a"], ["a", "b"], ValueError, "input_addresses must be 2"),
            (1, ["a"], [], ValueError, "output_addresses must be 1"),
        ],
    )
    def test_bad_arguments_are_named(self, count: Any, inputs: Any, outputs: Any, error: Any, name: str) -> None:
        with pytest.raises(error, match=name):
            APIServerProcessManager(targets.serve, "here", None, None, count, inputs, outputs)


class TestWaiting:
    async def test_until_all_servers_are_done(self) -> None:
        before = open_things()
        api = servers([0, 0])
        engine = engines(None, 0)
        coordinator = Coordinator(None)
        await engine.join_first()
        await wait_for_completion_or_failure(api, engine, coordinator)
        assert api.finished_procs() == {"ApiServer_0": 0, "ApiServer_1": 0}
        assert engine.finished_procs() == {"EngineCore_0": -signal.SIGTERM, "EngineCore_1": 0}
        assert coordinator.closed
        coordinator.proc.close()
        eventually(lambda: open_things() <= before)

    async def test_no_engines_here(self) -> None:
        """Those of other hosts are waited for there."""
        api = servers([None, None])
        none = CoreEngineProcManager(targets.stay, 0)
        waiting = asyncio.create_task(wait_for_completion_or_failure(api, none))
        done, _ = await asyncio.wait([waiting], timeout=0.1)
        assert not done, "no engine is none that has failed"
        process = api.processes[0]
        pid = process.pid
        process.kill()
        with pytest.raises(ProcessDied, match=rf"^Process ApiServer_0 \(PID: {pid}\) died with exit code -9$"):
            await waiting

    @pytest.mark.slow_on_uvloop
    @pytest.mark.parametrize("culprit", ["server", "engine", "coordinator"])
    async def test_until_the_first_fails(self, culprit: str) -> None:
        api = servers([0, 3 if culprit == "server" else None])
        engine = engines(None, 4 if culprit == "engine" else None)
        coordinator = Coordinator(5 if culprit == "coordinator" else None)
        dead, code = {
            "server": (api.processes[1], 3),
            "engine": (engine.processes[1], 4),
            "coordinator": (coordinator.proc, 5),
        }[culprit]
        pid = dead.pid
        with pytest.raises(ProcessDied) as caught:
            await wait_for_completion_or_failure(api, engine, coordinator)
        error = caught.value
        assert str(error) == f"Process {dead.name} (PID: {pid}) died with exit code {code}"
        assert (error.name, error.pid, error.exitcode) == (dead.name, pid, code)
        assert isinstance(error, RuntimeError)
        assert all_ended(api, engine)
        assert coordinator.closed
        coordinator.proc.close()

    async def test_being_cancelled_stops_everything(self) -> None:
        before = open_things()
        api = servers([None])
        engine = engines(None)
        task = asyncio.create_task(wait_for_completion_or_failure(api, engine))
        await asyncio.sleep(0.05)
        assert not task.done()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert all_ended(api, engine)
        eventually(lambda: open_things() <= before)

    async def test_being_cancelled_twice_kills(self) -> None:
        addresses = ["ipc:///0"]
        api = APIServerProcessManager(
            targets.refuse_to_serve_and_to_end, "here", None, None, 1, addresses, addresses, shutdown_timeout=60
        )
        eventually(lambda: api.last_lines("ApiServer_0"))
        task = asyncio.create_task(wait_for_completion_or_failure(api))
        for _ in range(2):
            await asyncio.sleep(0.05)
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert api.finished_procs() == {"ApiServer_0": -signal.SIGKILL}

    @pytest.mark.parametrize("error", [None, EngineDead("an actor died")])
    async def test_engines_may_be_no_processes(self, error: Exception | None) -> None:
        api = servers([0 if error is None else None])
        actors = Actors(error)
        with nullcontext() if error is None else pytest.raises(EngineDead, match="an actor died"):
            await wait_for_completion_or_failure(api, actors)
        assert actors.closed
        assert all_ended(api)
        assert api.sentinels() == []

    async def test_manager_that_cannot_be_stopped_does_not_keep_other_managers_running(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        api = servers([0])
        actors = Actors()

        async def fail() -> None:
            raise OSError("no way")

        actors.aclose = fail  # type: ignore[method-assign]
        with pytest.raises(OSError, match="no way"):
            await wait_for_completion_or_failure(api, actors)
        assert "could not stop everything: no way" in caplog.text
        assert all_ended(api)


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


@pytest.mark.slow_on_uvloop
@pytest.mark.parametrize("run", ["asyncio.run(main())", "import uvloop; uvloop.run(main())"])
@pytest.mark.parametrize(("target", "interrupts"), [("say_and_stay", 1), ("refuse_to_serve_and_to_end", 2)])
def test_ctrl_c_stops_everything_and_a_second_ctrl_c_kills(
    target: str, interrupts: int, run: str, tmp_path: Path
) -> None:
    script = tmp_path / "front_end.py"
    script.write_text(textwrap.dedent(FRONT_END.format(target=target, run=run)))
    with subprocess.Popen(
        [sys.executable, script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as front_end:
        assert front_end.stdout is not None
        word, *pids = front_end.stdout.readline().split()
        assert word == "waiting"
        front_end.send_signal(signal.SIGINT)
        if interrupts == 2:
            eventually(lambda: gone(int(pids[0])), "the engine's end: of two signals at once only one would be seen")
            assert front_end.poll() is None
            front_end.send_signal(signal.SIGINT)
        _, errors = front_end.communicate(timeout=20)
    assert errors.splitlines()[-1] == "KeyboardInterrupt"
    assert all(gone(int(pid)) for pid in pids)
