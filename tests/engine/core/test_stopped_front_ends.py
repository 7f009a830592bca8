"""One of two front ends over TCP is stopped: the engine's memory is bounded, the other is served."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import time
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from served_engine import Engine, ask, stop, until

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
from aioshm.errors import EngineDead

pytestmark = [pytest.mark.usefixtures("runtime_dir"), pytest.mark.slow, pytest.mark.one_loop]

CHUNK = 1 << 16
PAUSE_S = 0.002
SLACK = 16 << 20  # what an engine's memory varies by
STOPPED_S = 4.0
SILENCE_S = 2.0
BOUND = int(SILENCE_S / PAUSE_S) * CHUNK  # as `run_engine_core` documents


class Streaming(Engine):
    """Gives each request a large array in each step, or a small one if it is named little."""

    async def step(self) -> list[dict[str, Any]]:
        await asyncio.sleep(PAUSE_S)
        outputs = []
        for name in self.requests:
            number = self.given[name]
            self.given[name] += 1
            size = 1 if name.startswith("little") else CHUNK
            outputs.append({"request_id": name, "number": number, "array": np.zeros(size, np.uint8)})
        return outputs


def stream_much(handshake_address: str, dp_rank: int, local_dp_rank: int) -> None:
    """Run an engine; the target of a process."""
    die_with_parent()
    asyncio.run(run_engine_core(Streaming(), handshake_address, dp_rank))


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
                try:
                    number = 0
                    async for output in client.submit(ask(f"{name} {request}", None)):
                        assert output["number"] == number
                        number += 1
                        write(request, number)
                except EngineDead as error:
                    ends.append(str(error))
                    write(request, number)

    asyncio.run(work())


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


async def test_other_front_end_is_served_and_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
