"""Coordinator, engines, handshake and client in one call: started together, named when they fail, stopped together."""

from __future__ import annotations

import asyncio
from inspect import signature
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from managed import gone
from served_engine import ask, begun, collected, stop
from supervised import serve
from support import cancelled

from aioshm.engine import (
    ClientOptions,
    CoreEngineLaunch,
    CoreEngineProcManager,
    DPCoordinator,
    EngineKeys,
    EngineLayout,
    EngineZmqAddresses,
    StartupOptions,
    StartupProgress,
    launch_core_engines,
)
from aioshm.errors import EngineDead, QueueClosed
from aioshm.zeromq.hosts import own_address

pytestmark = [pytest.mark.usefixtures("nothing_kept"), pytest.mark.slow_on_uvloop]

ANY = "tcp://127.0.0.1:0"


def pids_of(launch: CoreEngineLaunch) -> list[int]:
    processes = [*launch.processes]
    if launch.coordinator is not None:
        processes.append(launch.coordinator.proc)
    return [process.pid or 0 for process in processes]


class TestServing:
    async def test_everything_is_there_and_ends(self) -> None:
        progress: list[StartupProgress] = []
        cache = SimpleNamespace(num_gpu_blocks=1)
        async with launch_core_engines(
            serve, 2, startup=StartupOptions(on_progress=progress.append, cache_config=cache, progress_timeout=60)
        ) as launch:
            assert launch.report is not None
            assert sorted(launch.report.engines) == [0, 1]
            assert cache.num_gpu_blocks == 11
            assert isinstance(launch.coordinator, DPCoordinator)
            assert launch.coordinator.get_stats_publish_address() == launch.addresses.frontend_stats_publish_address
            assert [process.name for process in launch.processes] == ["EngineCore_0", "EngineCore_1"]
            outputs = await asyncio.gather(*(collected(launch.client.submit(ask(str(n)))) for n in range(10)))
            assert [len(each) for each in outputs] == [3] * 10
            assert [report["seen"] for report in await launch.client.call("report")] == [5, 5]
            pids = pids_of(launch)
            assert await launch.wait_until_ready() is launch.report
            waiting = await begun(launch.client, "endless")
        assert len(pids) == 3
        assert all(map(gone, pids))
        assert progress[-1].ready == 2
        with pytest.raises(QueueClosed):
            await anext(waiting)

    async def test_wildcard_is_sent_as_an_address_of_the_host(self, monkeypatch: pytest.MonkeyPatch) -> None:
        given = EngineZmqAddresses(["tcp://*:0"], ["tcp://0.0.0.0:0"])
        layout = EngineLayout(host="*", addresses=given, handshake_address="tcp://*:0")
        async with launch_core_engines(serve, 2, 1, wait=False, layout=layout) as launch:
            assert given == EngineZmqAddresses(["tcp://*:0"], ["tcp://0.0.0.0:0"])  # for the next launch
            addresses = launch.addresses
            told = [launch.handshake_address, *addresses.inputs, *addresses.outputs]
            told += [addresses.coordinator_input or "", addresses.coordinator_output or ""]
            for address in told:
                assert address.startswith(f"tcp://{own_address()}:")
                assert int(address.rpartition(":")[2]) > 0
            there = CoreEngineProcManager(
                serve, 1, 1, local=False, headless=True, handshake_address=launch.handshake_address
            )
            async with there:
                limits: list[float] = []
                wait = launch.client.wait_until_ready
                monkeypatch.setattr(
                    launch.client, "wait_until_ready", lambda limit: limits.append(limit) or wait(limit)
                )
                report = await launch.wait_until_ready(60)
                assert limits[0] < 60
                assert [report.engines[rank].local for rank in range(2)] == [True, False]
                for rank in range(2):
                    assert len(await collected(launch.client.submit(ask(str(rank)), engine=rank))) == 3

    async def test_without_encryption_anybody_can_say_that_an_engine_has_died(self) -> None:
        """Over TCP everything is encrypted unless that is switched off."""
        addresses = EngineZmqAddresses([ANY], [ANY])
        async with launch_core_engines(
            serve,
            kwargs={"secure": False},
            layout=EngineLayout(addresses=addresses, handshake_address=ANY),
            client=ClientOptions(secure=False),
        ) as launch:
            stream = await begun(launch.client, "a")
            with zmq.Context() as context, context.socket(zmq.PUSH) as stranger:
                stranger.connect(launch.addresses.outputs[0])
                stranger.send(b"ENGINE_CORE_DEAD")
                with pytest.raises(EngineDead, match="has said that it ends"):
                    await anext(stream)


async def enter(*arguments: Any, **options: Any) -> None:
    async with launch_core_engines(*arguments, **options):
        raise AssertionError("not reached")


class TestFailures:
    async def test_an_address_that_cannot_be_bound(self) -> None:
        addresses = EngineZmqAddresses(["tcp://256.0.0.1:1"], [ANY])
        with pytest.raises(OSError, match=r"cannot bind tcp://256\.0\.0\.1:1"):
            await enter(serve, 2, layout=EngineLayout(addresses=addresses))

    async def test_death_of_the_coordinator_is_named(self) -> None:
        async with launch_core_engines(serve, 2) as launch:
            stream = await begun(launch.client, "a", engine=0)
            stop(pids_of(launch)[2])
            with pytest.raises(EngineDead, match=r"DPCoordinator \(pid \d+\) was killed by SIGKILL"):
                await anext(stream)

    @pytest.mark.slow
    @pytest.mark.parametrize("after_s", [0.05, 0.5])
    async def test_cancelled_at_any_moment(self, after_s: float) -> None:
        task = asyncio.create_task(enter(serve, 2, kwargs={"stuck": __file__}))
        await asyncio.sleep(after_s)
        await cancelled(task)


class TestArguments:
    @pytest.mark.parametrize(
        ("arguments", "error", "text"),
        [
            ({"engine_count": 0}, ValueError, "engine_count must be at least 1, not 0"),
            ({"client": {}}, TypeError, "client must be a ClientOptions, or None, not {}"),
            ({"engine_count": "2"}, TypeError, "engine_count must be an int, not '2'"),
            ({"engine_count": 70_000}, ValueError, "index must be 0 to 65535"),
            ({"local_engine_count": 3}, ValueError, "local_engine_count must fit engine_count, 2, not 3"),
            ({"backend": "fork"}, ValueError, "backend must be 'mp' or 'ray', not 'fork'"),
            ({"num_api_servers": -1}, ValueError, "num_api_servers must be at least 0"),
            ({"num_api_servers": 1, "local_engine_count": 1}, ValueError, "addresses must be given, with ports"),
            (
                {"num_api_servers": 3, "addresses": EngineZmqAddresses([ANY], [ANY])},
                ValueError,
                "addresses must be one for each of 3 API servers",
            ),
            ({"handshake_address": "inproc://x"}, ValueError, "handshake_address must be ipc://PATH or tcp://"),
            ({"start_index": 1, "local_engine_count": 1}, ValueError, "handshake_address must be the head node's"),
            (
                {"start_index": 1, "local_engine_count": 1, "handshake_address": ANY, "coordinator": True},
                ValueError,
                "coordinator must be the head node's",
            ),
            ({"start_index": 1, "handshake_address": ANY}, ValueError, "2 from rank 1 on, not 2"),
            ({"startup": {"secure": False}}, ValueError, r"set in client=ClientOptions\(\.\.\.\), not in startup"),
            ({"startup": {"keys": EngineKeys.generate()}}, ValueError, "not in startup"),
        ],
    )
    async def test_bad_ones_are_named(self, arguments: dict[str, Any], error: type[Exception], text: str) -> None:
        own = {name: arguments[name] for name in signature(launch_core_engines).parameters if name in arguments}
        layout = {name: value for name, value in arguments.items() if name not in own}
        startup = StartupOptions(**own.pop("startup", {}))
        with pytest.raises(error, match=text):
            await enter(serve, **{"engine_count": 2, **own}, layout=EngineLayout(**layout), startup=startup)
