"""One of two engines hangs in a step: the log names the line, the other engine serves, and the hung one is replaced.

python hung_engine.py 2> stacks
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from typing import Any

from aioshm import Options, progress
from aioshm.engine import ClientOptions, EngineSupervisor, RankInfo, Restart, run_engine_core
from aioshm.errors import EngineDead

OPTIONS = Options(stall_warning_s=1)  # a minute, if you leave it out
RESTART = Restart(hang_s=3)
LONG_STEP_S = 2.0


class Echo:
    """Answers each request in one step."""

    def __init__(self) -> None:
        self.open: dict[str, str] = {}

    async def initialize(self, metadata: Any) -> None: ...

    def add_request(self, request: dict[str, str]) -> None:
        self.open[request["request_id"]] = request["text"]

    def abort_requests(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self.open.pop(request_id, None)

    def step(self) -> list[dict[str, Any]]:
        for text in self.open.values():
            if text == "a request that hangs":
                wait_for_ever()
            elif text == "a request that takes long":
                with progress.expect(60):  # so that nobody takes the step for a hang
                    time.sleep(LONG_STEP_S)
        outputs = [{"request_id": name, "text": text, "finish_reason": "stop"} for name, text in self.open.items()]
        self.open.clear()
        return outputs


def wait_for_ever() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()  # the bug


def serve(handshake_address: str, dp_rank: int, local_dp_rank: int) -> None:
    asyncio.run(run_engine_core(Echo(), handshake_address, dp_rank))


async def main() -> None:
    logging.basicConfig(format="log: %(message)s", stream=sys.stdout)
    stalled = asyncio.Event()
    again = asyncio.Event()

    def note(info: RankInfo) -> None:
        if info.state == "stalled":
            stalled.set()
        elif info.state == "running" and info.restarts:
            again.set()

    client = ClientOptions(options=OPTIONS)
    async with EngineSupervisor(serve, 2, restart=RESTART, on_change=note, client=client) as supervisor:
        hanging = asyncio.create_task(ask(supervisor, "a request that hangs", engine=1))
        await stalled.wait()
        answers = [await ask(supervisor, f"request {number}") for number in range(4)]
        answers.append(await ask(supervisor, "a request that takes long"))
        print("meanwhile:", *answers, sep="\n  ")
        try:
            await hanging
        except EngineDead as error:
            print("failed:", error)
        await again.wait()
        print(await ask(supervisor, "the next request", engine=1))


async def ask(supervisor: EngineSupervisor, text: str, engine: int | None = None) -> str:
    stream = supervisor.client.submit({"request_id": text, "text": text}, engine=engine)
    async for output in stream:
        return f"engine {stream.engine}: {output['text']}"
    raise AssertionError("no output")


if __name__ == "__main__":
    asyncio.run(main())
