"""An engine that somebody starts by hand: ``python hanging_engine.py HANDSHAKE_ADDRESS RANK LOOP FIFO``.

A request says in which way the engine is to hang: until somebody opens the FIFO for writing.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import sys
import threading
import time
from typing import Any

import uvloop
from served_engine import Engine

from aioshm import progress
from aioshm.engine import EngineKeys, HandshakeOptions, run_engine_core

KEYS = EngineKeys(bytes(32))


class Hanging(Engine):
    def __init__(self, fifo: str) -> None:
        super().__init__()
        self.fifo = fifo

    def step(self) -> Any:
        for request in self.requests.values():
            if (how := request.pop("hang", None)) is not None:
                getattr(self, how)()
        return super().step()

    def in_a_lock(self) -> None:
        lock = threading.Lock()
        lock.acquire()

        def release() -> None:
            with open(self.fifo):
                lock.release()

        threading.Thread(target=release).start()
        lock.acquire()  # HERE in_a_lock

    def with_the_gil(self) -> None:
        os.close(ctypes.PyDLL(None).open(self.fifo.encode(), os.O_RDONLY))  # HERE with_the_gil

    async def blocked_loop(self) -> None:
        with open(self.fifo):  # HERE blocked_loop
            pass

    def expected(self) -> None:
        with progress.expect(60):
            time.sleep(5)

    def long(self) -> None:
        time.sleep(0.9)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    _, address, rank, loop, fifo = sys.argv
    with asyncio.Runner(loop_factory=uvloop.new_event_loop if loop == "uvloop" else None) as runner:
        options = HandshakeOptions(local=False, headless=True, keys=KEYS)
        runner.run(run_engine_core(Hanging(fifo), address, int(rank), handshake=options))
