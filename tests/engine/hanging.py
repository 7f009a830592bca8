"""Engines and API servers that hang, in every way, where their tests want it.

``python hanging.py HANDSHAKE_ADDRESS RANK LOOP`` runs an engine that nobody watches, as if on another host.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import uvloop
from served_engine import Engine

from aioshm import progress
from aioshm.engine import (
    ClientOptions,
    EngineClient,
    EngineKeys,
    EngineZmqAddresses,
    HandshakeOptions,
    die_with_parent,
    run_engine_core,
)

KEYS = EngineKeys(bytes(32))


def hang_in_a_lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()  # HERE: hang_in_a_lock


def hang_with_the_gil_held() -> None:
    ctypes.PyDLL(None).sleep(60)  # HERE: hang_with_the_gil_held


def hang_with_the_gil_until_somebody_opens(fifo: str) -> None:
    os.close(ctypes.PyDLL(None).open(fifo.encode(), os.O_RDONLY))  # HERE: hang_with_the_gil_until_somebody_opens


def hang_while_there_is(path: str) -> None:
    while os.path.exists(path):
        time.sleep(0.01)  # HERE: hang_while_there_is


HANGS = {each.__name__: each for each in (hang_in_a_lock, hang_with_the_gil_held)}


class Hanging(Engine):
    """Hangs in the step of a request that has ``hang``, and while there is the file ``while_there_is``."""

    def _step(self) -> list[Any]:
        for request in self.requests.values():
            if "hang" in request:
                HANGS[request["hang"]]()
            if "while_there_is" in request:
                hang_while_there_is(request["while_there_is"])
            if "fifo" in request:
                hang_with_the_gil_until_somebody_opens(request.pop("fifo"))
            if "expect" in request:
                with progress.expect(request["expect"]):
                    time.sleep(request["takes"])
            elif "takes" in request:
                time.sleep(request["takes"])
        return super()._step()

    def shutdown(self) -> None:
        if any("hang_at_the_end" in request for request in self.requests.values()):
            hang_in_a_lock()
        super().shutdown()

    def hang_now(self, path: str) -> None:
        hang_while_there_is(path)

    async def block_the_loop(self, path: str) -> None:
        await asyncio.sleep(0)
        hang_while_there_is(path)


class HangingInStep(Hanging):
    """Waits for the others in lockstep, by files in a directory."""

    def __init__(self, rank: int, directory: str) -> None:
        super().__init__()
        self.rank = rank
        self.directory = Path(directory)
        self.round = 0

    def execute_dummy_batch(self) -> None:
        pass

    def has_unfinished_dp(self, unfinished: bool) -> bool:
        self.round += 1
        (self.directory / f"{self.rank}-{self.round}").write_text(str(int(unfinished)))
        other = self.directory / f"{1 - self.rank}-{self.round}"
        while not other.exists() or not other.read_text():
            time.sleep(0.001)
        return unfinished or other.read_text() == "1"


def line_of(name: str) -> str:
    """Return the line where a function of this module hangs, as reports name it."""
    lines = Path(__file__).read_text().splitlines()
    number = next(number for number, line in enumerate(lines, 1) if line.endswith(f"# HERE: {name}"))
    return f"hanging.py:{number} in {name}"


def serve(handshake_address: str, dp_rank: int, local_dp_rank: int, slow_start_s: float = 0.0) -> None:
    """Run an engine that hangs when a request says so."""
    die_with_parent()
    engine = Hanging()
    if slow_start_s:
        engine.initialize = lambda _metadata: time.sleep(slow_start_s)  # type: ignore[assignment,method-assign]
    asyncio.run(run_engine_core(engine, handshake_address, dp_rank))


def serve_in_step(handshake_address: str, dp_rank: int, local_dp_rank: int, directory: str) -> None:
    """Run an engine in lockstep with one other."""
    die_with_parent()
    own = Path(directory) / str(os.getppid()) / "rounds"
    own.mkdir(parents=True, exist_ok=True)
    asyncio.run(run_engine_core(HangingInStep(dp_rank, str(own)), handshake_address, dp_rank))


def serve_front_end(listen_address: str, sock: Any, directory: str, config: dict[str, Any]) -> None:
    """Write the rank of the engine of each request into a file; hang while the file ``hang-{index}`` is there."""

    async def work() -> None:
        addresses = EngineZmqAddresses([config["input_address"]], [config["output_address"]])
        options = ClientOptions(on_engine_death="continue", membership_address=config["membership_address"])
        async with EngineClient(addresses, 2, options) as client:
            await client.wait_until_ready(30)
            number = 0
            streams: deque[Any] = deque(maxlen=100)  # a dropped stream aborts its request
            while True:
                number += 1
                stream = client.submit({"request_id": f"front {os.getpid()} {number}", "tokens": 1})
                streams.append(stream)
                index = config["client_index"]
                done = Path(directory, f"{index}.new")
                done.write_text(f"{number} {stream.engine} {client.stats().stalled}")
                done.replace(done.with_suffix(".said"))
                hang_while_there_is(f"{directory}/hang-{index}")
                await asyncio.sleep(0.01)

    asyncio.run(work())


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    _, address, rank, loop = sys.argv
    with asyncio.Runner(loop_factory=uvloop.new_event_loop if loop == "uvloop" else None) as runner:
        options = HandshakeOptions(local=False, headless=True, keys=KEYS)
        runner.run(run_engine_core(Hanging(), address, int(rank), handshake=options))
