"""Coordinator, engines, handshake and client in one call: started together, named when they fail, stopped together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from inspect import signature
from multiprocessing import resource_tracker
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import launch_targets as targets
import pytest
import uvloop
import zmq
from managed import gone, open_things
from served_engine import Engine, ask, collected, stop, until
from support import eventually

from aioshm.engine import (
    APIServerProcessManager,
    ClientOptions,
    CoreEngineLaunch,
    CoreEngineProcManager,
    DPCoordinator,
    EngineClient,
    EngineKeys,
    EngineLayout,
    EngineZmqAddresses,
    StartupOptions,
    StartupProgress,
    launch_core_engines,
    run_engine_core,
)
from aioshm.engine.startup import launch as launching
from aioshm.errors import EngineDead, EngineStartupError, QueueClosed, RoleError
from aioshm.zeromq.hosts import own_address

pytestmark = pytest.mark.slow_on_uvloop

ANY = "tcp://127.0.0.1:0"


@pytest.fixture(autouse=True)
def nothing_kept(runtime_dir: Path) -> Iterator[None]:
    """Fail if a descriptor, a thread or a socket file is left."""
    resource_tracker.ensure_running()  # what multiprocessing opens for good, and uvloop
    uvloop.run(asyncio.sleep(0))
    before = open_things()
    yield
    eventually(lambda: open_things() <= before, f"the end of {open_things() - before}")
    assert not runtime_dir.exists() or list(runtime_dir.iterdir()) == []


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
            targets.serve,
            2,
            startup=StartupOptions(on_progress=progress.append, cache_config=cache, progress_timeout=60),
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
            waiting = launch.client.submit(ask("endless", None))
            await anext(waiting)
        assert len(pids) == 3
        assert all(map(gone, pids))
        assert progress[-1].ready == 2
        with pytest.raises(QueueClosed):
            await anext(waiting)

    async def test_one_engine_needs_no_coordinator(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.WARNING):
            async with launch_core_engines(targets.serve) as launch:
                assert launch.coordinator is None
                assert launch.addresses.coordinator_input is None
                assert len(await collected(launch.client.submit(ask("a")))) == 3
        assert not caplog.records

    async def test_given_addresses_are_used(self) -> None:
        addresses = EngineZmqAddresses([ANY], [ANY])
        async with launch_core_engines(
            targets.serve, 2, layout=EngineLayout(addresses=addresses, handshake_address=ANY, coordinator=False)
        ) as launch:
            assert launch.addresses is addresses
            for address in (*addresses.inputs, *addresses.outputs, launch.handshake_address):
                assert address.startswith("tcp://127.0.0.1:")
                assert not address.endswith(":0")
            assert len(await collected(launch.client.submit(ask("a")))) == 3

    async def test_wildcard_is_sent_as_an_address_of_the_host(self) -> None:
        """What is bound with a wildcard is told with an address that others can connect to."""
        addresses = EngineZmqAddresses(["tcp://*:0"], ["tcp://0.0.0.0:0"])
        async with launch_core_engines(
            targets.serve,
            2,
            1,
            wait=False,
            layout=EngineLayout(host="*", addresses=addresses, handshake_address="tcp://*:0"),
        ) as launch:
            told = [launch.handshake_address, *addresses.inputs, *addresses.outputs]
            told += [addresses.coordinator_input or "", addresses.coordinator_output or ""]
            for address in told:
                assert address.startswith(f"tcp://{own_address()}:")
                assert int(address.rpartition(":")[2]) > 0
            there = CoreEngineProcManager(targets.serve_over_there, 1, 1, handshake_address=launch.handshake_address)
            async with there:
                await launch.wait_until_ready(60)
                assert len(await collected(launch.client.submit(ask("a"), engine=1))) == 3

    @pytest.mark.parametrize("secure", [True, False])
    async def test_strangers_stay_outside(self, secure: bool) -> None:
        """Over TCP everything is encrypted unless that is switched off; here somebody says that an engine has died."""
        addresses = EngineZmqAddresses([ANY], [ANY])
        async with launch_core_engines(
            targets.serve,
            kwargs={"secure": secure},
            layout=EngineLayout(addresses=addresses, handshake_address=ANY),
            client=ClientOptions(secure=secure),
        ) as launch:
            stream = launch.client.submit(ask("a", None))
            await anext(stream)
            with zmq.Context() as context:
                stranger = context.socket(zmq.PUSH)
                stranger.connect(addresses.outputs[0])
                stranger.send(b"ENGINE_CORE_DEAD")
                if secure:
                    for number in range(20):
                        assert len(await collected(launch.client.submit(ask(str(number))))) == 3
                else:
                    with pytest.raises(EngineDead, match="has said that it ends"):
                        await anext(stream)
                stranger.close(linger=0)

    async def test_engines_on_another_host(self) -> None:
        """They are started there, told the handshake address, and meet everybody over TCP."""
        async with launch_core_engines(
            targets.serve, 2, 1, wait=False, layout=EngineLayout(host="127.0.0.1")
        ) as launch:
            assert launch.report is None
            there = CoreEngineProcManager(targets.serve_over_there, 1, 1, handshake_address=launch.handshake_address)
            async with there:
                report = await launch.wait_until_ready(60)
                assert [report.engines[rank].local for rank in range(2)] == [True, False]
                addresses = launch.addresses
                for address in (addresses.inputs[0], addresses.coordinator_input, launch.handshake_address):
                    assert address is not None
                    assert address.startswith("tcp://127.0.0.1:")
                for rank in range(2):
                    assert len(await collected(launch.client.submit(ask(str(rank)), engine=rank))) == 3

    @pytest.mark.slow
    async def test_no_engine_on_this_host(self) -> None:
        async with launch_core_engines(
            targets.serve, 1, 0, wait=False, layout=EngineLayout(host="127.0.0.1")
        ) as launch:
            assert launch.engine_manager.finished_procs() == {}
            async with CoreEngineProcManager(targets.serve_over_there, 1, handshake_address=launch.handshake_address):
                await launch.wait_until_ready(60)
                assert len(await collected(launch.client.submit(ask("a")))) == 3

    async def test_a_host_with_a_front_end_of_its_own(self) -> None:
        """Hybrid load balancing: the head node, and a launch of the second host's engine and client."""
        lb = {"data_parallel_hybrid_lb": True}
        async with (
            launch_core_engines(
                targets.serve,
                2,
                1,
                wait=False,
                layout=EngineLayout(host="127.0.0.1"),
                startup=StartupOptions(parallel_config=lb),
            ) as head,
            launch_core_engines(
                targets.serve,
                2,
                1,
                wait=False,
                layout=EngineLayout(start_index=1, handshake_address=head.handshake_address),
            ) as second,
        ):
            await asyncio.gather(head.wait_until_ready(60), second.wait_until_ready(60))
            assert (head.client.ranks, second.client.ranks) == ([0], [1])
            assert second.coordinator is None
            stats_address = head.coordinator.get_stats_publish_address()  # type: ignore[union-attr]
            assert second.client.addresses.frontend_stats_publish_address == stats_address
            for launch, rank in ((head, 0), (second, 1)):
                stream = launch.client.submit(ask("a"))
                assert stream.engine == rank
                assert len(await collected(stream)) == 3

    @pytest.mark.slow
    async def test_clients_in_api_servers(self) -> None:
        async with launch_core_engines(targets.serve, 2, num_api_servers=2, wait=False) as launch:
            with pytest.raises(RoleError, match="there is no client here"):
                _ = launch.client
            servers = APIServerProcessManager(
                targets.serve_api, "", None, None, 2, launch.addresses.inputs, launch.addresses.outputs
            )
            async with servers:
                launch.watched_processes = servers.processes
                await launch.wait_until_ready(60)
                await until(lambda: len(servers.finished_procs()) == 2, 60)
                assert set(servers.finished_procs().values()) == {0}, servers.last_lines("ApiServer_0")

    async def test_a_client_made_from_it(self) -> None:
        async with launch_core_engines(targets.serve, 1, num_api_servers=1) as launch:
            async with EngineClient(launch.addresses, 1) as client:
                await client.wait_until_ready(30)
                assert len(await collected(client.submit(ask("a")))) == 3


class TestFailures:
    @pytest.mark.parametrize(
        ("how", "texts"),
        [
            ("at once", [r"EngineCore_1 \(pid \d+, before HELLO\) exited with code 1", "rank 1 has no device"]),
            pytest.param(
                "in initialize",
                [r"EngineCore_1 \(pid \d+, connected\) exited with code 1", "RuntimeError: no weights"],
                marks=pytest.mark.slow,
            ),
            pytest.param(
                "killed", [r"EngineCore_1 \(pid \d+, connected\) was killed by SIGKILL"], marks=pytest.mark.slow
            ),
        ],
    )
    async def test_an_engine_that_fails(self, how: str, texts: list[str]) -> None:
        with pytest.raises(EngineStartupError) as caught:
            async with launch_core_engines(targets.fail, 2, kwargs={"how": {1: how}}):
                raise AssertionError("not reached")
        for text in texts:
            caught.match(text)
        assert "EngineCore_1" in caught.value.failed

    async def test_engine_that_hangs(self) -> None:
        with pytest.raises(
            EngineStartupError, match=r"no progress for .* waiting for engines 0 \(pid \d+, before HELLO"
        ):
            async with launch_core_engines(
                targets.fail, 1, kwargs={"how": {0: "hangs"}}, startup=StartupOptions(progress_timeout=0.5)
            ):
                raise AssertionError("not reached")

    async def test_target_that_cannot_be_pickled(self) -> None:
        with pytest.raises(Exception, match="pickle"):
            async with launch_core_engines(lambda: None, 2):
                raise AssertionError("not reached")

    async def test_an_address_that_cannot_be_bound(self) -> None:
        addresses = EngineZmqAddresses(["tcp://256.0.0.1:1"], [ANY])
        with pytest.raises(OSError, match=r"cannot bind tcp://256\.0\.0\.1:1"):
            async with launch_core_engines(targets.serve, 2, layout=EngineLayout(addresses=addresses)):
                raise AssertionError("not reached")

    @pytest.mark.slow
    @pytest.mark.parametrize("victim", ["engine", "coordinator"])
    async def test_a_death_while_they_serve(self, victim: str) -> None:
        async with launch_core_engines(targets.serve, 2) as launch:
            stream = launch.client.submit(ask("a", None), engine=0)
            await anext(stream)
            stop(pids_of(launch)[1 if victim == "engine" else 2])
            name = "engine 1" if victim == "engine" else "DPCoordinator"
            with pytest.raises(EngineDead, match=rf"{name} \(pid \d+\) was killed by SIGKILL"):
                async for _ in stream:
                    pass

    @pytest.mark.slow
    async def test_an_error_in_the_block_stops_everything(self) -> None:
        with pytest.raises(ZeroDivisionError):
            async with launch_core_engines(targets.serve, 2) as launch:
                pids = pids_of(launch)
                raise ZeroDivisionError
        assert all(map(gone, pids))

    @pytest.mark.slow
    @pytest.mark.parametrize("after_s", [0.0, 0.05, 0.2, 0.5, 1.0])
    async def test_cancelled_at_any_moment(self, after_s: float) -> None:
        async def launch() -> None:
            async with launch_core_engines(targets.fail, 2, kwargs={"how": {0: "hangs"}}):
                raise AssertionError("not reached")

        task = asyncio.create_task(launch())
        await asyncio.sleep(after_s)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


class TestArguments:
    @pytest.mark.parametrize(
        ("arguments", "error", "text"),
        [
            ({"engine_count": 0}, ValueError, "engine_count must be at least 1, not 0"),
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
        ],
    )
    async def test_bad_ones_are_named(self, arguments: dict[str, Any], error: type[Exception], text: str) -> None:
        own = {name: arguments[name] for name in signature(launch_core_engines).parameters if name in arguments}
        layout = {name: value for name, value in arguments.items() if name not in own}
        with pytest.raises(error, match=text):
            options = {"engine_count": 2, **own, "layout": EngineLayout(**layout)}
            async with launch_core_engines(targets.serve, **options):
                raise AssertionError("not reached")

    @pytest.mark.parametrize("security", [{"secure": False}, {"keys": EngineKeys.generate()}])
    async def test_keys_of_the_handshake_alone_are_refused(self, security: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=r"set in client=ClientOptions\(\.\.\.\), not in startup"):
            async with launch_core_engines(targets.serve, startup=StartupOptions(**security)):
                raise AssertionError("not reached")

    def test_progress_timeout_that_makes_no_sense_is_named(self) -> None:
        with pytest.raises(ValueError, match="progress_timeout"):
            StartupOptions(progress_timeout=0)

    async def test_ray(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """What the manager of actors is told; tests/engine/ray_actors/test_actors.py has real ones."""
        told: dict[str, Any] = {}
        running: list[asyncio.Task[None]] = []

        class Manager(CoreEngineProcManager):
            @classmethod
            async def start(cls, target: Any, count: int, local: int, **options: Any) -> Manager:
                told.update(options, counts=(count, local))
                for rank in range(count):
                    served = run_engine_core(Engine(), options["handshake_address"], rank)
                    running.append(asyncio.create_task(served))
                return cls(target, 0)

        monkeypatch.setattr(launching, "CoreEngineActorManager", Manager)
        async with launch_core_engines(
            targets.serve,
            2,
            args=(1,),
            kwargs={"model": "m"},
            layout=EngineLayout(backend="ray", manager_options={"timeout": 5}),
        ) as launch:
            assert len(await collected(launch.client.submit(ask("a")))) == 3
            for task in running:
                task.cancel()
            await asyncio.wait(running)
        assert told == {
            "args": (1,),
            "counts": (2, 2),
            "timeout": 5,
            "keys": None,
            "model": "m",
            "handshake_address": launch.handshake_address,
        }
