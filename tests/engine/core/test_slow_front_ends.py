"""Front ends that read slowly or not at all, are stopped, or lose power: waiting outputs are bounded, and in order."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import zmq
from peers import BareClient, received
from served_engine import Engine, Serving, ask, collected, here_and_there, served, stop, until
from two_hosts import two_hosts

from aioshm.engine import (
    APIServerProcessManager,
    ClientOptions,
    EngineClient,
    EngineLayout,
    EngineSupervisor,
    EngineZmqAddresses,
    die_with_parent,
    run_engine_core,
)
from aioshm.engine.core.sockets import CoreSockets
from aioshm.engine.protocol.messages import EnvelopeDecoder
from aioshm.errors import EngineDead, OutOfDescriptors

pytestmark = pytest.mark.usefixtures("runtime_dir")

CHUNK = 1 << 16
WITHIN_S = 30.0


class Streaming(Engine):
    """Gives each request an array in each step: always the same one, or its first item if a little is enough."""

    def __init__(self, pause_s: float = 0.0) -> None:
        super().__init__()
        self.pause_s = pause_s
        self.array = np.zeros(CHUNK, np.uint8)
        self.steps = 0

    async def step(self) -> list[dict[str, Any]]:
        await asyncio.sleep(self.pause_s)
        self.steps += 1
        self.array[:] = self.steps % 256
        ended = [each for each, request in self.requests.items() if request["tokens"] == self.steps]
        for each in ended:
            del self.requests[each]
        outputs = [
            {"request_id": each, "step": self.steps, "array": self.array[: 1 if each.startswith("little") else CHUNK]}
            for each in self.requests
        ]
        return outputs + [{"request_id": each, "finish_reason": "length"} for each in ended]


async def outputs(front_end: BareClient) -> list[Any]:
    """Return the outputs of the next message; the text of a message that is no envelope."""
    frames = await received(front_end.pull)
    return [frames[0].decode()] if len(frames[0]) == 16 else EnvelopeDecoder(None).decode(frames).outputs


@asynccontextmanager
async def beside_unread(engine: Engine, **options: Any) -> AsyncIterator[tuple[Serving, BareClient]]:
    """Let an engine serve a client, and a front end whose sockets have hardly any buffers, and that reads nothing."""
    addresses = here_and_there(2)
    with zmq.Context() as context:
        unread = BareClient(context, addresses, 1)
        unread.pull.setsockopt(zmq.RCVHWM, 1)
        unread.pull.setsockopt(zmq.RCVBUF, 1 << 16)
        with unread:
            async with served(engine, addresses=addresses, **options) as serving:
                yield serving, unread


async def test_front_end_that_reads_nothing_is_dropped_by_name_and_can_come_back(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures: list[Exception] = []
    opened = CoreSockets.open

    def open_or_fail(sockets: CoreSockets, kind: int, address: str, **options: Any) -> Any:
        if kind == zmq.PUSH and failures:
            raise failures.pop()
        return opened(sockets, kind, address, **options)

    monkeypatch.setattr(CoreSockets, "open", open_or_fail)
    monkeypatch.setattr("aioshm.engine.core.sockets.RECONNECT_WITHOUT_KEYS_S", 0.05)
    engine = Streaming(0.001)  # without a pause an engine outruns its readers, where processors are scarce
    async with beside_unread(engine, max_pending_bytes=1 << 20) as (serving, unread):
        await unread.hears()
        failures += [OutOfDescriptors(errno.EMFILE, "no descriptor")] * 2
        stream = serving.client.submit(ask("little", None))
        await anext(stream)
        unread.submit(ask("stuck", None))
        with caplog.at_level(logging.WARNING, "aioshm.engine"):
            async with asyncio.timeout(WITHIN_S):
                while not engine.aborted:
                    await anext(stream)
        assert engine.aborted == ["stuck"]
        assert list(engine.requests) == ["little"]
        (text,) = [each for each in caplog.messages if "dropped" in each]
        assert text.startswith(f"engine 0 dropped front end 1 ({serving.client.addresses.outputs[1]}), ")
        waiting = int(text.split(": ")[1].split()[0])
        assert 1 << 20 < waiting < (1 << 20) + 3 * CHUNK
        await unread.hears()
        assert not failures
        assert [("tries later" in each) for each in caplog.messages].count(True) == 2
        unread.submit(ask("little and late", None))
        async with asyncio.timeout(WITHIN_S):
            while not any(each["request_id"] == "little and late" for each in await outputs(unread)):
                pass
        await anext(stream)


async def test_front_end_that_reads_after_the_end_gets_every_output_as_it_was_in_its_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("aioshm.engine.core.sockets.LINGER_MS", 1000 * int(WITHIN_S))  # a slow machine reads slowly
    engine = Streaming()
    async with beside_unread(engine) as (serving, unread):
        await unread.hears()
        unread.submit(ask("late", 200))
        await until(lambda: engine.seen and not engine.requests)
        for task in serving.running:
            task.cancel()
        steps = []
        while "finish_reason" not in (output := (await outputs(unread))[0]):
            assert len(set(output["array"].tobytes())) == 1
            steps.append(int(output["array"][0]))
        assert steps == [number % 256 for number in range(steps[0], 200)]
        while (await outputs(unread)) != ["ENGINE_CORE_DEAD"]:
            pass


async def test_answers_and_large_outputs_beyond_the_bound_arrive() -> None:
    async with served(Engine(), max_pending_bytes=1) as serving:
        arrays = [np.full(1 << 18, number, np.uint8) for number in range(40)]
        answers = await asyncio.gather(*(serving.client.call("give", array, engine=0) for array in arrays))
        for array, answer in zip(arrays, answers, strict=True):
            np.testing.assert_array_equal(answer, array)
        large = "x" * (4 << 20)
        requests = [ask(name, output={"request_id": name, "text": large, "finish_reason": "length"}) for name in "abc"]
        for outputs in await asyncio.gather(*(collected(serving.client.submit(each)) for each in requests)):
            assert [output["text"] for output in outputs] == [large]


@pytest.mark.parametrize(("value", "kind"), [(0, ValueError), (1.5, TypeError)])
async def test_bound_that_makes_no_sense_is_refused_by_name(value: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind, match="max_pending_bytes must be"):
        await run_engine_core(Engine(), "ipc:///nowhere", 0, max_pending_bytes=value)


# Over TCP

PAUSE_S = 0.002
SLACK = 16 << 20  # what an engine's memory varies by
STOPPED_S = 4.0
SILENCE_S = 2.0
BOUND = int(SILENCE_S / PAUSE_S) * CHUNK  # as `run_engine_core` documents


def stream_much(handshake_address: str, dp_rank: int, local_dp_rank: int) -> None:
    """Run an engine; the target of a process."""
    die_with_parent()
    asyncio.run(run_engine_core(Streaming(PAUSE_S), handshake_address, dp_rank))


def ask_for_much(listen_address: str, sock: Any, directory: str, config: dict[str, Any]) -> None:
    """Run a front end: ask again whenever a request ends, and write down how; the target of a process."""
    die_with_parent()
    index = config["client_index"]
    path = Path(directory, str(index))
    name = "little" if index else "much"
    ends: list[str] = []

    def write(request: int, number: int) -> None:
        written = path.with_suffix(".new")
        written.write_text(json.dumps([request, number, ends]))
        written.rename(path)

    async def work() -> None:
        addresses = EngineZmqAddresses([config["input_address"]], [config["output_address"]])
        options = ClientOptions(on_engine_death="continue", membership_address=config["membership_address"])
        async with EngineClient(addresses, 1, options) as client:
            for request in count():
                await client.wait_until_ready(60)
                steps: list[int] = []
                try:
                    async for output in client.submit(ask(f"{name} {request}", None)):
                        steps.append(output["step"])
                        assert steps[-1] == steps[0] + len(steps) - 1
                        write(request, len(steps))
                except EngineDead as error:
                    ends.append(str(error))
                    write(request, len(steps))

    asyncio.run(work())


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


@pytest.mark.slow
@pytest.mark.one_loop
async def test_front_end_that_is_stopped_leaves_memory_bounded_and_the_other_front_end_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIOSHM_REMOTE_TIMEOUT_S", str(SILENCE_S))
    at = [f"tcp://127.0.0.1:{free_port()}" for _ in range(4)]
    layout = EngineLayout(addresses=EngineZmqAddresses(at[:2], at[2:]))

    def said(index: int) -> tuple[int, int, list[str]]:
        """Return the number of a front end's request, the outputs of the request, and the errors of earlier ones."""
        with suppress(FileNotFoundError):
            request, number, ends = json.loads((tmp_path / str(index)).read_text())
            return request, number, ends
        return 0, 0, []

    async with EngineSupervisor(stream_much, 1, num_api_servers=2, layout=layout) as supervisor:
        addresses = supervisor.launch.addresses
        async with APIServerProcessManager(
            ask_for_much, "", None, str(tmp_path), 2, addresses.inputs, addresses.outputs,
            membership_address=supervisor.launch.membership_address,
        ) as fronts:  # fmt: skip
            await until(lambda: said(0)[1] > 100 and said(1)[1] > 100, 60)
            engine = psutil.Process(supervisor.engines[0].pid)
            stopped = fronts.processes[0].pid
            assert stopped is not None
            before = engine.memory_info().rss
            stop(stopped, signal.SIGSTOP)
            progress = said(1)[1]
            growth = 0
            last = time.monotonic()
            until_s = last + STOPPED_S
            longest_pause_s = 0.0
            while (now := time.monotonic()) < until_s:
                if said(1)[1] > progress:
                    longest_pause_s = max(longest_pause_s, now - last)
                    progress = said(1)[1]
                    last = now
                growth = max(growth, engine.memory_info().rss - before)
                await asyncio.sleep(0.02)
            assert max(longest_pause_s, until_s - last) < STOPPED_S / 2
            assert growth < BOUND + SLACK
            stop(stopped, signal.SIGCONT)
            await until(lambda: said(0)[2], 60)
            await until(lambda: said(0)[0] == 1 and said(0)[1] > 10, 60)
            [error] = said(0)[2]
            assert "engine 0 " in error
            assert said(1)[::2] == (0, [])
            lines = supervisor.launch.engine_manager.last_lines("EngineCore_0", 1000)
            assert [line.partition(":")[0] for line in lines] == ["engine 0 lost front end 0 (tcp"]


NETWORK_CHILD = Path(__file__).parent.parent / "network_child.py"


def wait_for_answer(front_end: subprocess.Popen[str]) -> None:
    assert front_end.stdout is not None
    assert any(line == "answered\n" for line in front_end.stdout), "the front end ended"


@pytest.mark.slow
def test_idle_engine_whose_front_ends_host_lost_power_serves_the_next_front_end_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    with two_hosts() as hosts:
        address = hosts.addresses[1]
        with hosts.child(0, "engine", address, script=NETWORK_CHILD) as engine:
            with hosts.child(1, "launch", address, script=NETWORK_CHILD) as front_end:
                wait_for_answer(front_end)
                hosts.plug(False, 1)
            hosts.power_off_and_on(1)
            with hosts.child(1, "return", address, script=NETWORK_CHILD) as front_end:
                wait_for_answer(front_end)
            assert engine.poll() is None
