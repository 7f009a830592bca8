"""What the engines of launches run."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

from served_engine import Engine

from aioshm.engine import HandshakeOptions, run_engine_core


def serve(handshake_address: str, dp_rank: int, local_dp_rank: int, **options: Any) -> None:
    """Serve; ``options`` are of the handshake."""
    handshake = HandshakeOptions(**options)
    asyncio.run(run_engine_core(Engine(), handshake_address, dp_rank, handshake=handshake))


def serve_over_there(handshake_address: str, dp_rank: int, local_dp_rank: int) -> None:
    """Serve, as if this were another host, without a front end of its own."""
    serve(handshake_address, dp_rank, local_dp_rank, local=False, headless=True)


def fail(dp_rank: int, how: dict[int, str], **others: Any) -> None:
    """Serve, except for ranks that are to fail in some way."""
    kind = how.get(dp_rank)
    if kind == "at once":
        sys.exit(f"rank {dp_rank} has no device")
    if kind == "hangs":
        time.sleep(100)
    asyncio.run(run_engine_core(Engine(), others["handshake_address"], dp_rank))
