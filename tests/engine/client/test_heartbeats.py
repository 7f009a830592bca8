"""Engines that are nobody's child processes: those that hang are passed over, and named at both ends."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import hanging
import msgspec
import pytest
import zmq
from hanging import KEYS
from peers import BareClient, BareEngine, BareFrontEnd, received
from served_engine import Engine, ask, clients_of, collected, here_and_there, until
from startups import tasks

from aioshm import progress
from aioshm.config import Options
from aioshm.engine import (
    ClientOptions,
    CoreEngine,
    EngineClient,
    EngineStartupCoordinator,
    EngineZmqAddresses,
    StartupOptions,
    get_engine_client_zmq_addr,
    run_engine_core,
)
from aioshm.engine.protocol.messages import PAUSE
from aioshm.process.progress import BUSY, ENDING, IDLE, STARTING, Progress

pytestmark = pytest.mark.usefixtures("runtime_dir")

LOOPBACK = "tcp://127.0.0.1:0"
WARNING_S = 1.0

encode = msgspec.msgpack.encode

REGISTRATION = encode({"num_gpu_blocks": 5})


# The sender


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Progress:
    """Give this process a progress of its own, and the engines in it quick heartbeats."""
    fresh = Progress()
    monkeypatch.setattr(progress, "_own", fresh)
    monkeypatch.setattr("aioshm.engine.core.process.HEARTBEAT_S", 0.01)
    return fresh


@asynccontextmanager
async def engine_of(context: Any, addresses: EngineZmqAddresses) -> AsyncIterator[None]:
    """Run an engine in this loop; a bare front end shakes hands with it."""
    with closing(BareFrontEnd(context, get_engine_client_zmq_addr(True, ""), b"\0\0")) as shaking:
        async with tasks(run_engine_core(Engine(), shaking.address, 0)):
            await shaking.hears()
            shaking.says(encode({"addresses": addresses, "parallel_config": {}}))
            assert (await shaking.hears())["status"] == "READY"
            yield


async def heard(front_end: BareClient) -> list[Any]:
    """Return the next heartbeat."""
    frame = await front_end.hears()
    assert frame[:18] == b"\x96\xb0aioshm heartbeat"
    heartbeat: list[Any] = msgspec.msgpack.decode(frame)
    return heartbeat[1:]


@pytest.mark.parametrize("first", ["request", "order"])
async def test_front_end_gets_heartbeats_once_it_is_certainly_aioshms(first: str, own: Progress) -> None:
    addresses = here_and_there()
    with zmq.Context() as context, BareClient(context, addresses) as front_end:
        async with engine_of(context, addresses):
            assert await front_end.hears() == REGISTRATION
            front_end.submit(ask("a", 1))
            await received(front_end.pull)
            before = own.read().turned_ns
            await until(lambda: own.read().turned_ns > before)  # dozens of heartbeats later
            assert not front_end.router.poll(0)
            if first == "order":
                order = encode([0, 5, PAUSE, [1, 0, ""]])
                front_end.router.send_multipart([b"\0\0", b"\x03", order])
            else:
                front_end.submit(ask("b", 1), generation=7)
            _phase, steps, _turns, expected_s, requests = await heard(front_end)
            assert (expected_s, requests) == (0.0, 0)
            if first == "order":
                return
            await received(front_end.pull)
            while (await heard(front_end))[1] == steps:
                pass


# The judge


def beat(phase: int = IDLE, steps: int = 0, turns: int = 1) -> bytes:
    return encode(["aioshm heartbeat", phase, steps, turns, 0.0, 0])


@asynccontextmanager
async def bare_engine(
    monkeypatch: pytest.MonkeyPatch, warning_s: float = 0.2
) -> AsyncIterator[tuple[EngineClient, BareEngine, Any]]:
    monkeypatch.setattr("aioshm.engine.client.liveness.GRACE_S", 0.1)
    options = {"options": Options(stall_warning_s=warning_s), "on_engine_death": "continue"}
    async with clients_of(here_and_there(), 1, 1, **options) as serving:
        with zmq.Context() as context, BareEngine(context, serving.client) as engine:
            await serving.client.wait_until_ready(10)
            yield serving.client, engine, context


@pytest.mark.slow_on_uvloop
@pytest.mark.parametrize("phase", [STARTING, BUSY])
async def test_silent_engine_is_stalled_until_it_moves(
    phase: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "aioshm.engine")
    async with bare_engine(monkeypatch) as (client, engine, _):
        engine.dealer.send(beat(phase))
        await until(lambda: client.stats().stalled)
        what = "no progress for" if phase == BUSY else "no sign of life of its event loop for"
        assert f"engine 0 (pid {os.getpid()}) is stalled: {what}" in caplog.text
        assert "its own log has the line" in caplog.text
        await until(lambda: caplog.text.count("is stalled") > 1)
        engine.dealer.send(beat(phase, steps=1, turns=2))
        await until(lambda: not client.stats().stalled)
        assert f"engine 0 (pid {os.getpid()}) makes progress again" in caplog.text


async def test_engines_that_say_nothing_or_nonsense_are_not_judged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with bare_engine(monkeypatch, 0.05) as (client, engine, _):
        invalid = encode(["aioshm heartbeat", -1, 0, 0, 0.0, 0])
        for each in (b"\x96\xb0aioshm heartbeat", invalid, beat(ENDING), beat(99)):
            engine.dealer.send(each)
        await asyncio.sleep(0.4)
        assert not client.stats().stalled
        assert "is stalled" not in caplog.text


@pytest.mark.slow_on_uvloop
async def test_time_counts_only_while_the_clients_loop_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    async with bare_engine(monkeypatch, 0.5) as (client, engine, _):
        engine.dealer.send(beat(turns=1))
        await asyncio.sleep(0.3)  # some looks
        time.sleep(0.8)
        await asyncio.sleep(0.05)
        assert not client.stats().stalled


async def test_limit_of_a_supervisor_holds_for_engines_that_were_there_before(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with bare_engine(monkeypatch, 3600) as (client, engine, _):
        engine.dealer.send(beat(BUSY))
        engine.dealer.send(beat(-1))
        await until(lambda: "a heartbeat of engine 0 is ignored" in caplog.text)  # so the first one has arrived
        reports: list[float] = []
        client.supervise_heartbeats(0.2, lambda _rank, seconds, _where: reports.append(seconds))
        await until(lambda: reports)
        assert 0.2 <= reports[0] < 10


@pytest.mark.slow_on_uvloop
async def test_stalled_engine_is_judged_until_its_end_and_its_successor_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    async with bare_engine(monkeypatch) as (client, engine, context):
        engine.dealer.send(beat(BUSY))
        await until(lambda: client.stats().stalled)
        engine.dealer.close(linger=0)
        await until(lambda: client.deaths)
        assert not client.stats().stalled
        with BareEngine(context, client) as successor:
            await client.wait_until_ready(10)
            await asyncio.sleep(0.4)  # without heartbeats it is not judged
            assert not client.stats().stalled
            successor.dealer.send(beat(BUSY))
            await until(lambda: client.stats().stalled)


# Both


@asynccontextmanager
async def engines_by_hand(tmp_path: Path, loop: str) -> AsyncIterator[EngineClient]:
    """Start two engines in processes that nobody watches, as on another host; their logs are ``0.log``, ``1.log``."""
    addresses = EngineZmqAddresses([LOOPBACK], [LOOPBACK])
    expected = [CoreEngine(rank, local=False) for rank in range(2)]
    options = ClientOptions(keys=KEYS, options=Options(stall_warning_s=WARNING_S), on_engine_death="continue")
    environment = {**os.environ, "AIOSHM_STALL_WARNING_S": str(WARNING_S), "PYTHONPATH": os.pathsep.join(sys.path)}
    processes = []
    async with EngineClient(addresses, expected, options) as client:
        try:
            startup = EngineStartupCoordinator(LOOPBACK, expected, addresses, options=StartupOptions(keys=KEYS))
            async with startup:
                for rank in range(2):
                    with (tmp_path / f"{rank}.log").open("wb") as log:
                        command = [sys.executable, hanging.__file__, startup.handshake_address, str(rank), loop]
                        processes.append(subprocess.Popen(command, stderr=log, env=environment))
                await startup.wait(60)
            await client.wait_until_ready(60)
            yield client
        finally:
            for process in processes:
                process.kill()
                process.wait()


@pytest.mark.one_loop
@pytest.mark.parametrize("hang", ["step", "gil"])
async def test_hung_engine_is_passed_over_and_comes_back(
    hang: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "aioshm.engine")
    path = tmp_path / "hang"
    name = "hang_while_there_is"
    if hang == "gil":
        name = "hang_with_the_gil_until_somebody_opens"
        os.mkfifo(path)
    else:
        path.touch()
    async with engines_by_hand(tmp_path, "asyncio" if hang == "gil" else "uvloop") as client:
        request = ask("hangs", **{"fifo" if hang == "gil" else "while_there_is": str(path)})
        hanging_ = asyncio.ensure_future(collected(client.submit(request, engine=0)))
        await until(lambda: client.stats().stalled)
        assert "engine 0 (127.0.0.1) is stalled: no " in caplog.text
        for number in range(4):
            assert len(await collected(client.submit(ask(str(number))))) == 3
        log = tmp_path / "0.log"
        line = hanging.line_of(name)
        stack = line.replace("py:", 'py", line ')
        await until(lambda: line in log.read_text() or stack in log.read_text())
        assert ("Timeout (" in log.read_text()) == (hang == "gil")
        if hang == "gil":
            path.open("w").close()
        else:
            path.unlink()
        await until(lambda: not client.stats().stalled)
        await hanging_
        assert "engine 0 (127.0.0.1) makes progress again" in caplog.text
        assert len(await collected(client.submit(ask("next"), engine=0))) == 3
        assert "engine 1" not in caplog.text
        if hang != "gil":
            await until(lambda: "makes progress again" in log.read_text())


@pytest.mark.one_loop
async def test_expected_and_steady_steps_are_no_stalls(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with engines_by_hand(tmp_path, "asyncio") as client:
        request = ask("expected", 1, expect=60, takes=3.5)
        expected = asyncio.ensure_future(collected(client.submit(request, engine=0)))
        for number in range(4):
            await collected(client.submit(ask(str(number), 1, takes=0.9), engine=1))
        await expected
        assert client.stats().stalled == 0
    assert "stalled" not in caplog.text
    assert "stalled" not in (tmp_path / "0.log").read_text() + (tmp_path / "1.log").read_text()
