"""The cluster of these tests, and what its actors run."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from typing import Any

from aioshm.engine import HandshakeOptions, shake_hands

LONG_S = 100

NODE = {"num_cpus": 8, "object_store_memory": 80_000_000}
GPUS = {"head": 2, "other": 4}
HEAD_CHIPS = 2
"""The other node has none of these; nodes that tests add may have some."""


def shake_and_stay(address: str, faults: dict[int, str], dp_rank: int, local_dp_rank: int, local_client: bool) -> None:
    """Be an engine; one with a fault has it before it is ready."""

    def initialize(_metadata: object) -> dict[str, Any]:
        fault = faults.get(dp_rank)
        if fault == "raise":
            raise ArithmeticError("the model is too large")
        if fault == "die":
            os._exit(1)
        devices = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        return {"num_gpu_blocks": 10, "pid": os.getpid(), "local_rank": local_dp_rank, "devices": len(devices)}

    async def run() -> None:
        await shake_hands(
            address,
            dp_rank,
            initialize=initialize,
            handshake=HandshakeOptions(local=local_client, headless=not local_client),
        )
        await asyncio.sleep(LONG_S)

    asyncio.run(run())


def serve(address: str, dp_rank: int, local_dp_rank: int, local_client: bool, kind: Any = None) -> None:
    """Be an engine that serves requests."""
    from served_engine import Engine

    from aioshm.engine import run_engine_core

    asyncio.run(
        run_engine_core(
            (kind or Engine)(),
            address,
            dp_rank,
            handshake=HandshakeOptions(local=local_client, headless=not local_client),
        )
    )


def serve_launched(handshake_address: str, dp_rank: int, local_dp_rank: int, local_client: bool) -> None:
    """Be an engine of `launch_core_engines`."""
    serve(handshake_address, dp_rank, local_dp_rank, local_client)


def serve_hanging(handshake_address: str, dp_rank: int, local_dp_rank: int, local_client: bool) -> None:
    """Be such an engine, which hangs in the step of a request that says so."""
    from served_engine import Engine

    class Hanging(Engine):
        def step(self) -> Any:
            if any(request.get("hang") for request in self.requests.values()):
                time.sleep(LONG_S)
            return super().step()

    serve(handshake_address, dp_rank, local_dp_rank, local_client, Hanging)


def leave(codes: list[int | str | None], dp_rank: int, **_: Any) -> None:
    """Exit with the code of this rank; "return" returns, and None stays."""
    code = codes[dp_rank]
    if code is None:
        time.sleep(LONG_S)
    if code != "return":
        sys.exit(code)
