"""An engine that shakes hands by itself, for processes of the library's own manager."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import Any

from aioshm.engine import shake_hands


def run(address: str, fault: str, dp_rank: int, local_dp_rank: int) -> None:
    asyncio.run(_run(address, fault, dp_rank))


async def _run(address: str, fault: str, rank: int) -> None:
    def initialize(_metadata: object) -> dict[str, Any]:
        if rank == 1 and fault == "raise":
            raise RuntimeError("out of memory")
        if rank == 1 and fault == "SIGSTOP":
            print("stopping", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGSTOP)
        return {"num_gpu_blocks": 10}

    await shake_hands(address, rank, initialize=initialize)
    await asyncio.sleep(100)
