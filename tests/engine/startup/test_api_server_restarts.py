"""API servers that are started again while the others serve."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import engine_targets as targets
import pytest
from managed import gone, open_things
from served_engine import Engine, stop, until
from supervised import MANY
from support import eventually

from aioshm.engine import (
    APIServerProcessManager,
    ClientOptions,
    EngineClient,
    EngineLayout,
    EngineSupervisor,
    EngineZmqAddresses,
    RankInfo,
    Restart,
    die_with_parent,
    run_engine_core,
    wait_for_completion_or_failure,
)
from aioshm.errors import EngineDead, ProcessDied, QueueClosed, RoleError

pytestmark = [pytest.mark.usefixtures("runtime_dir"), pytest.mark.slow_on_uvloop]


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield sock


class Patient(Engine):
    """Answers a call when a file is there."""

    async def when(self, path: str) -> str:
        while not os.path.exists(path):
            await asyncio.sleep(0.01)
        return path


def serve(handshake_address: str, dp_rank: int, local_dp_rank: int) -> None:
    """Run an engine."""
    die_with_parent()
    asyncio.run(run_engine_core(Patient(), handshake_address, dp_rank))


def front_end(listen_address: str, sock: socket.socket, n_engines: int, config: dict[str, Any]) -> None:
    """Say who this is to each connection, and do as it says, line by line."""

    async def talk(client: EngineClient, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"%d\n" % os.getpid())
        while line := (await reader.readline()).decode().split():
            match line:
                case ["ask", tokens]:
                    request = {"request_id": uuid.uuid4().hex, "tokens": int(tokens) or None}
                    async for output in client.submit(request):
                        writer.write(b"%d " % output["token"])
                case ["when", path]:
                    writer.write((await client.call("when", path, engine=0)).encode())
                case ["open"]:
                    reports = await client.call("report")
                    writer.write(b"%d" % sum(len(report["open"]) for report in reports))
                case ["engines"]:
                    writer.write(b"%d" % len(client.ranks))
                case ["late"]:
                    writer.write(b"%d" % client.late_outputs)
                case ["exit", code]:
                    os._exit(int(code))
            writer.write(b"\n")

    async def work() -> None:
        addresses = EngineZmqAddresses([config["input_address"]], [config["output_address"]])
        membership = config["membership_address"]
        async with EngineClient(
            addresses, n_engines, options=ClientOptions(on_engine_death="continue", membership_address=membership)
        ) as client:
            await client.wait_until_ready(30)
            server = await asyncio.start_server(lambda *streams: talk(client, *streams), sock=sock)
            await server.serve_forever()

    asyncio.run(work())


class Connection:
    """A connection to one of the front ends."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pid: int) -> None:
        self.reader = reader
        self.writer = writer
        self.pid = pid

    @classmethod
    async def open(cls, listener: socket.socket) -> Connection:
        reader, writer = await asyncio.open_connection(*listener.getsockname()[:2])
        return cls(reader, writer, int(await reader.readline()))

    def send(self, line: str) -> None:
        self.writer.write(f"{line}\n".encode())

    async def ask(self, line: str) -> str:
        self.send(line)
        return (await self.reader.readline()).decode().strip()

    def close(self) -> None:
        self.writer.close()


async def connected_to(listener: socket.socket, servers: APIServerProcessManager, rank: int) -> Connection:
    """Return a connection to one of the front ends: the others sleep meanwhile."""
    others = [info.pid or 0 for info in servers.servers if info.rank != rank]
    for pid in others:
        stop(pid, signal.SIGSTOP)
    try:
        connection = await Connection.open(listener)
    finally:
        for pid in others:
            stop(pid, signal.SIGCONT)
    assert connection.pid == servers.servers[rank].pid
    return connection


@asynccontextmanager
async def serving(
    listener: socket.socket, n_engines: int, n_servers: int, **options: Any
) -> AsyncIterator[tuple[EngineSupervisor, APIServerProcessManager]]:
    async with EngineSupervisor(
        serve, n_engines, num_api_servers=n_servers, layout=EngineLayout(coordinator=False)
    ) as supervisor:
        addresses = supervisor.launch.addresses
        async with APIServerProcessManager(
            front_end,
            "",
            listener,
            n_engines,
            n_servers,
            addresses.inputs,
            addresses.outputs,
            membership_address=supervisor.launch.membership_address,
            restart=MANY,
            **options,
        ) as servers:
            yield supervisor, servers


def simple(codes: list[int | None], **options: Any) -> APIServerProcessManager:
    addresses = [f"ipc:///{index}" for index in range(len(codes))]
    return APIServerProcessManager(
        targets.serve_badly, "here", None, codes, len(codes), addresses, addresses, **{"restart": MANY, **options}
    )


@pytest.mark.slow
async def test_server_killed_under_load_is_restarted_while_the_other_serves(listener: socket.socket) -> None:
    seen: list[RankInfo] = []
    async with serving(listener, 1, 2, on_change=seen.append) as (supervisor, servers):
        other = await connected_to(listener, servers, 1)
        answered = 0
        stopping = asyncio.Event()

        async def load() -> None:
            nonlocal answered
            while not stopping.is_set():
                assert await other.ask("ask 3") == "0 1 2"
                answered += 1

        loading = asyncio.create_task(load())
        victim = servers.servers[0].pid or 0
        await supervisor.scale(2)  # a successor has to be told
        lost = await connected_to(listener, servers, 0)
        lost.send("ask 0")  # never done
        await lost.reader.read(1)
        seen.clear()
        stop(victim)
        assert await lost.reader.read() == b" "
        lost.close()
        await until(lambda: [info.state for info in seen] == ["waiting", "starting", "running"])
        assert {info.rank for info in seen} == {0}
        assert f"ApiServer_0 (pid {victim}) was killed by SIGKILL" in seen[-1].cause
        before = answered
        back = await connected_to(listener, servers, 0)
        assert await back.ask("ask 4") == "0 1 2 3"
        assert await back.ask("engines") == "2"
        await until(lambda: answered > before + 10)
        back.close()
        stopping.set()
        await loading
        await until(lambda: _is(other, "open", "0"))  # what the dead ones had asked for is aborted
        other.close()
        assert [(info.state, info.restarts) for info in servers.servers] == [("running", 1), ("running", 0)]
        pids = [info.pid or 0 for info in servers.servers]
    assert all(map(gone, pids))
    assert {info.state for info in servers.servers} == {"running"}, "being stopped is no death"


async def _is(connection: Connection, line: str, answer: str) -> bool:
    return await connection.ask(line) == answer


async def test_connections_made_meanwhile_wait_at_the_socket(listener: socket.socket, tmp_path: Path) -> None:
    """And the answer to a call of the dead one is dropped, and counted."""
    there = tmp_path / "there"
    async with serving(listener, 1, 1) as _:
        address = listener.getsockname()[:2]
        listener.close()  # each server has a copy, and its successor gets one, too
        reader, writer = await asyncio.open_connection(*address)
        first = Connection(reader, writer, int(await reader.readline()))
        first.send(f"when {there}")
        asking = await asyncio.open_connection(*address)  # on this one the call is known to be under way
        second = Connection(*asking, int(await asking[0].readline()))
        assert await second.ask("open") == "0"
        stop(first.pid)
        assert await first.reader.read() == b""
        reader, writer = await asyncio.open_connection(*address)  # nobody accepts now
        late = Connection(reader, writer, int(await reader.readline()))
        assert late.pid != first.pid
        assert await late.ask("late") == "0"
        there.touch()
        await until(lambda: _is(late, "late", "1"))
        assert await late.ask("ask 2") == "0 1"
        for connection in (first, second, late):
            connection.close()


async def test_a_crash_loop_ends_everything_with_every_cause() -> None:
    before = open_things()
    servers = simple([None, 3], restart=Restart(max_restarts=2, backoff_s=0.001))
    other = servers.processes[0]
    with pytest.raises(ProcessDied, match=r"^Process ApiServer_1 \(PID: \d+\) died with exit code 3; ") as caught:
        await wait_for_completion_or_failure(servers)
    error = caught.value
    assert "crash loop: 3 deaths within 60 s" in str(error)
    assert str(error).count("exited with code 3") == 3
    assert (error.name, error.exitcode) == ("ApiServer_1", 3)
    assert other.exitcode == -signal.SIGTERM
    assert [(info.state, info.restarts) for info in servers.servers] == [("running", 0), ("exited", 2)]
    with pytest.raises(ProcessDied, match="crash loop"):
        await servers.wait()
    eventually(lambda: open_things() <= before)


async def test_code_0_is_no_death() -> None:
    async with simple([0, 0]) as servers:
        await servers.wait()
        assert [(info.state, info.restarts, info.cause) for info in servers.servers] == [("exited", 0, "")] * 2
    servers = simple([0, None])
    waiting = asyncio.create_task(wait_for_completion_or_failure(servers))
    await until(lambda: servers.servers[0].state == "exited")
    victim = servers.servers[1].pid or 0
    stop(victim)
    await until(lambda: servers.servers[1].restarts == 1 and servers.servers[1].state == "running")
    assert not waiting.done()
    assert [info.restarts for info in servers.servers] == [0, 1]
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert all(process.exitcode is not None for process in servers.processes)


async def test_with_a_supervisor_of_engines(listener: socket.socket) -> None:
    """A crash loop of engines ends the front ends, too."""
    supervisor = EngineSupervisor(
        serve, 1, num_api_servers=1, restart=Restart(max_restarts=0), layout=EngineLayout(coordinator=False)
    )
    await supervisor.open()
    servers = simple([None])
    waiting = asyncio.create_task(wait_for_completion_or_failure(servers, supervisor))
    stop(supervisor.engines[0].pid or 0)
    with pytest.raises(EngineDead, match="engine 0 is in a crash loop"):
        await waiting
    assert servers.processes[0].exitcode == -signal.SIGTERM


async def test_closing_at_any_moment_of_a_restart_leaves_nothing() -> None:
    before = open_things()
    for turns in (0, 1, 3, 10):
        servers = simple([None])
        waiting = asyncio.create_task(servers.wait())
        victim = servers.servers[0].pid or 0
        stop(victim)
        await until(lambda servers=servers: servers.servers[0].restarts)
        for _ in range(turns):
            await asyncio.sleep(0.001)
        if turns % 2:
            servers.close()
        else:
            await servers.aclose()
        with pytest.raises(QueueClosed):
            await waiting
        assert all(process.exitcode is not None for process in servers.processes)
        assert gone(victim)
    eventually(lambda: open_things() <= before)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({}, RoleError, "create the manager in a coroutine"),
        ({"restart": "always"}, TypeError, "restart must be a Restart, or None, not 'always'"),
        ({"restart": None, "on_change": print}, ValueError, "on_change must go with restart"),
    ],
)
def test_arguments(options: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        simple([None], **options)


async def test_without_a_policy_a_death_is_the_end() -> None:
    async with simple([None, 5], restart=None) as servers:
        with pytest.raises(ProcessDied, match=r"ApiServer_1 .* exit code 5$"):
            await servers.wait()
        assert [(info.state, info.restarts) for info in servers.servers] == [("running", 0), ("exited", 0)]
    with pytest.raises(QueueClosed):
        await servers.wait()


FRONT_END = """
import asyncio
import engine_targets as targets
from aioshm.engine import APIServerProcessManager, Restart

async def main():
    many = Restart(max_restarts=10**6, backoff_s=0.001, backoff_max_s=0.001)
    async with APIServerProcessManager(
        targets.serve_badly, "here", None, [None, 1, None], 3, ["a"] * 3, ["b"] * 3, restart=many, capture_stderr=False
    ) as servers:
        print("up", flush=True)
        await servers.wait()

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.slow
def test_the_parent_is_killed_at_any_moment_of_a_restart(tmp_path: Path) -> None:
    import psutil

    script = tmp_path / "front_end.py"
    script.write_text(textwrap.dedent(FRONT_END))
    path = os.pathsep.join([str(Path(targets.__file__).parent), os.environ.get("PYTHONPATH", "")])
    for moment in range(6):
        parent = subprocess.Popen(
            [sys.executable, str(script)], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}
        )
        assert parent.stdout is not None
        with parent.stdout:
            assert parent.stdout.readline() == b"up\n"
            time.sleep(0.037 * moment)
            tree = [child.pid for child in psutil.Process(parent.pid).children(recursive=True)]
            assert len(tree) >= 2
            parent.kill()
            parent.wait()
        killed = time.monotonic()
        eventually(lambda tree=tree: all(map(gone, tree)))
        assert time.monotonic() - killed < 2.0
