"""The coordinator: its process with start, traffic, failure and end, and its sockets with READY, counts and garbage."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest
from peers import Peers, counts, frames, pack, places, published, start, starts, until
from support import cancelled

from aioshm.engine import DPCoordinator, EngineKeys, get_engine_client_zmq_addr
from aioshm.engine.dp import Coordination, CoordinatorAddresses
from aioshm.engine.protocol.waves import Waves
from aioshm.errors import EngineStartupError

IDLE = [0, 0, 0.0]

pytestmark = [pytest.mark.usefixtures("nothing_kept"), pytest.mark.slow_on_uvloop]


@pytest.mark.parametrize("local", [True, False])
async def test_coordinator_serves_and_ends(local: bool) -> None:
    keys = EngineKeys.generate()
    async with await DPCoordinator.start(2, local_engines=local, local_front_ends=local, keys=keys) as coordinator:
        assert coordinator.proc.name == "DPCoordinator"
        for place in places(coordinator):
            assert place.startswith("ipc://" if local else "tcp://127.0.0.1:")
            assert not place.endswith(":0")
        with Peers(places(coordinator), None if local else keys) as peers:
            engines = await peers.engines(2)
            front_end = await peers.front_end()
            reporter = peers.reporter(1)
            await reporter.send(counts(1, 3, 4))
            await reporter.send(start(1, 0))
            assert [await starts(each) for each in engines] == [(0, 1), (0, 1)]
            await until(front_end, [[[0, 0, 0.0], [3, 4, 0.0]], 0, True])
    assert coordinator.finished_procs() == {"DPCoordinator": 0}


class TestFailure:
    async def test_an_address_that_cannot_be_bound(self) -> None:
        with pytest.raises(EngineStartupError) as caught:
            await DPCoordinator.start(2, host="192.0.2.7", local_engines=False)  # for documentation (RFC 5737)
        assert caught.value.failed == {"DPCoordinator": 1}
        first, *_, last = str(caught.value).splitlines()
        assert first.startswith("DPCoordinator (pid ")
        assert first.endswith(" exited with code 1 before it was bound")
        assert "cannot bind tcp://192.0.2.7:0" in last

    def test_coordinator_that_is_not_bound_in_time_is_an_error(self) -> None:
        with pytest.raises(EngineStartupError, match=r"^DPCoordinator \(pid [0-9]+\) was not bound after 0.001 s$"):
            DPCoordinator(2, timeout=0.001)

    def test_restart_that_is_not_bound_in_time_leaves_no_process(self) -> None:
        with DPCoordinator(2) as coordinator:
            coordinator.proc.kill()
            coordinator.proc.join()
            assert coordinator.finished_procs() == {"DPCoordinator": -signal.SIGKILL}
            coordinator._timeout = 0.001
            with pytest.raises(EngineStartupError, match="was not bound after"):
                coordinator.run_again()
            assert coordinator.proc.exitcode == -signal.SIGKILL
            coordinator._timeout = 60.0
            coordinator.run_again()

    async def test_start_that_is_cancelled_leaves_nothing(self) -> None:
        children = set(psutil.Process().children())
        starting = asyncio.create_task(DPCoordinator.start(2))
        while not set(psutil.Process().children()) - children:
            await asyncio.sleep(0.001)
        await cancelled(starting)
        assert not set(psutil.Process().children()) - children

    @pytest.mark.parametrize(
        ("arguments", "error", "name"),
        [
            ({"n_engines": 0}, ValueError, "n_engines"),
            ({"n_engines": 65537}, ValueError, "n_engines"),
            ({"n_engines": "2"}, TypeError, "n_engines"),
            ({"n_engines": 2, "host": "", "local_engines": False}, ValueError, "host"),
            ({"n_engines": 2, "timeout": 0}, ValueError, "timeout"),
        ],
    )
    def test_bad_arguments_are_named(self, arguments: dict[str, Any], error: type[Exception], name: str) -> None:
        with pytest.raises(error, match=name):
            DPCoordinator(**arguments)


# The sockets, in this process


def wanted() -> CoordinatorAddresses:
    return CoordinatorAddresses(*(get_engine_client_zmq_addr(True, "") for _ in range(3)))


@contextmanager
def coordination(n_engines: int) -> Iterator[Peers]:
    with Coordination(Waves(n_engines), wanted()) as made, Peers(made.addresses) as peers:
        yield peers
        if made.over.done():
            made.over.result()


class TestSockets:
    async def test_ready_comes_when_all_engines_have_subscribed(self) -> None:
        with coordination(2) as peers:
            first = await peers.subscriber(peers.addresses.engine_input)
            early = first.recv()
            front_end = await peers.front_end()
            await asyncio.sleep(0.05)
            assert not early.done()
            await peers.subscriber(peers.addresses.engine_input)
            assert await early == b"READY"
            assert await published(front_end) == [[IDLE, IDLE], 0, False]

    async def test_reports_before_ready_are_kept(self) -> None:
        with coordination(1) as peers:
            front_end = await peers.front_end()
            await peers.reporter().send(start(0, 0))
            engine = await peers.subscriber(peers.addresses.engine_input)
            assert await frames(engine) == [b"READY"]
            assert await starts(engine) == (0, 0)
            await until(front_end, [[IDLE], 0, True])

    async def test_a_new_number_of_engines(self) -> None:
        with coordination(1) as peers:
            await peers.engines(1)
            front_end = await peers.front_end()
            reporter = peers.reporter()
            await front_end.send(pack(("SCALE_ELASTIC_EP", 2)))
            await until(front_end, [[IDLE, IDLE], 0, False])
            await reporter.send(counts(1, 8, 9))
            await until(front_end, [[IDLE, [8, 9, 0.0]], 0, False])
            (added,) = await peers.engines(1)
            await reporter.send(start(0, 0))
            assert await starts(added) == (0, 0)

    @pytest.mark.parametrize(
        "garbage", [[b"\xc1"], [b"x" * (2 << 20)], [b"frame"] * 1000], ids=lambda each: str(each)[:30]
    )
    async def test_garbage_does_no_harm(self, garbage: list[bytes], caplog: pytest.LogCaptureFixture) -> None:
        with coordination(1) as peers:
            (engine,) = await peers.engines(1)
            front_end = await peers.front_end()
            reporter = peers.reporter()
            for peer in (engine, front_end, reporter):
                for _ in range(3):
                    await peer.send_multipart(garbage)
            await reporter.send(counts(0, 1, 2))
            await until(front_end, [[[1, 2, 0.0]], 0, False])
            await reporter.send(start(0, 0))
            assert await starts(engine) == (0, 0)
        said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        assert len(said) == 1
        assert said[0].startswith("dropped a message: ")

    async def test_internal_error_ends_the_coordination(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: object) -> None:
            raise ZeroDivisionError("a mistake")

        monkeypatch.setattr(Waves, "load", fail)
        with Coordination(Waves(1), wanted()) as made, Peers(made.addresses) as peers:
            await peers.engines(1)
            await peers.reporter().send(counts(0, 1, 1))
            async with asyncio.timeout(30):
                with pytest.raises(ZeroDivisionError, match="a mistake"):
                    await made.over
