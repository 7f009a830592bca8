"""What the processes of ``starving.py`` do: a function for each kind, which makes ends, uses them and closes them.

It is called once while the process is starving. If that fails, it is called again with enough of everything.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

from members import Member, meet
from scenes import SCENES, all_of, close

from aioshm import MessageQueue
from aioshm.engine import DPCoordinator


async def play(scene: Any, within_s: float) -> None:
    """Make, use and close the ends of a scene."""
    ends: list[Any] = []
    try:
        await scene.make(ends, within_s)
        await scene.use(ends, within_s)
    finally:
        await close(ends)


async def keep_identity(_within_s: float) -> None:
    """Be two writers of one identity, one after the other."""
    where = Path(tempfile.gettempdir(), f"identity-{os.getpid()}")
    try:
        for _ in range(2):
            async with MessageQueue(1, 0, max_chunk_bytes=4096, connect_ip="127.0.0.1", identity=where):
                pass
    finally:
        where.unlink(missing_ok=True)


async def meet_in_group(within_s: float) -> None:
    """Be both ranks of a group with a queue."""

    async def be(member: Member) -> None:
        async with await MessageQueue.create_from_process_group(member, 4096, 4, blocking=False) as queue:
            await queue.wait_until_ready(within_s)

    await all_of(*map(be, meet(2, timeout=within_s)))


async def coordinate(within_s: float) -> None:
    async with await DPCoordinator.start(1, timeout=within_s) as coordinator:
        assert coordinator.get_stats_publish_address()


KINDS: dict[str, Callable[[float], Coroutine[Any, Any, None]]] = {
    **{name: partial(play, scene) for name, scene in SCENES.items()},
    "identity": keep_identity,
    "group": meet_in_group,
    "coordinator": coordinate,
}
