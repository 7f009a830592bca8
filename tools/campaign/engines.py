"""Supervised engines with a worker each, a group of workers with a standby, and a load that counts every request."""

from __future__ import annotations

import asyncio

from aioshm.engine import EngineSupervisor, WorkerGroup
from benchmarks.survival import RESTART, WEIGHTS, Adder, Survival, serve
from tools.campaign.stage import Actor, Part

ENGINES, WORKERS, STANDBYS = 2, 2, 1
ASKING, CALLING = 3, 2
PATIENCE_S, PAUSE_S, TELL_S = 90.0, 0.03, 1.0


def actors() -> list[Actor]:
    """Return who plays here."""
    return [Actor("service", "engines:serve_requests", {}, 0.15)]


async def serve_requests(part: Part) -> None:
    """Serve, and ask, until the end."""
    async with (
        EngineSupervisor(serve, ENGINES, restart=RESTART, resubmit="unstarted") as supervisor,
        WorkerGroup(Adder, WORKERS, args=(WEIGHTS,), restart=RESTART, standbys=STANDBYS) as group,
    ):
        load = Survival(supervisor, group, PATIENCE_S, PAUSE_S)
        work = [asyncio.create_task(load.ask(who)) for who in range(ASKING)]
        work += [asyncio.create_task(load.call(who)) for who in range(CALLING)]
        while not load.stopping:
            await asyncio.sleep(TELL_S)
            load.stopping = part.stopping.is_set()
            if load.stopping:
                await asyncio.gather(*work)
            while load.oddities:
                part.journal.note("odd", load.oddities.pop(0))
            part.journal.note("counts", dict(load.counts))
