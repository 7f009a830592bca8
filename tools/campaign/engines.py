"""Supervised engines with a worker each, a group of workers with a standby, and a load that counts every request."""

from __future__ import annotations

import asyncio
from collections import Counter

from aioshm.engine import EngineSupervisor, WorkerGroup
from aioshm.errors import EngineDead, WorkerDied
from benchmarks.survival import RESTART, TOKENS, WEIGHTS, Adder, abort_one, serve
from tools.campaign.stage import Actor, Part

ENGINES, WORKERS, STANDBYS = 2, 2, 1
ASKING, CALLING = 3, 2
PATIENCE_S, PAUSE_S, TELL_S = 90.0, 0.03, 1.0
ABORTED_BEFORE = 0.25
"""How many requests have the id of one that was aborted just before."""


def actors() -> list[Actor]:
    """Return who plays here."""
    return [Actor("service", "engines:serve_requests", {}, 0.15)]


class Load:
    """Requests and calls one after the other, and what became of them."""

    def __init__(self, part: Part, supervisor: EngineSupervisor, group: WorkerGroup) -> None:
        self.counts: Counter[str] = Counter()
        self._part, self._supervisor, self._group = part, supervisor, group

    async def ask(self, who: int) -> None:
        """Send requests to the engines."""
        while not self._part.stopping.is_set():
            self.counts["requests"] += 1
            name = f"{who} {self.counts['requests']}"
            try:
                async with asyncio.timeout(PATIENCE_S):
                    if self._part.chance.random() < ABORTED_BEFORE:
                        await abort_one(self._supervisor.client, name, self._part.chance.uniform(0.0, 0.02))
                    stream = self._supervisor.client.submit({"request_id": name})
                    tokens = [output["token"] async for output in stream]
            except Exception as error:
                self._failed(name, error)
            else:
                self._done(tokens == list(range(TOKENS)), f"request {name} has brought {tokens}")
            await asyncio.sleep(PAUSE_S)

    async def call(self, who: int) -> None:
        """Call the workers: all of them, one, or one that is idle."""
        while not self._part.stopping.is_set():
            self.counts["requests"] += 1
            number = self.counts["requests"]
            way = self._part.chance.choice(("all", "one", "any"))
            try:
                if way == "all":
                    found = await self._group.collective_rpc("add", ([number],), timeout=PATIENCE_S)
                    right = found == [[number + rank] for rank in range(WORKERS)]
                elif way == "one":
                    found = await self._group.call(who % WORKERS, "add", [number], timeout=PATIENCE_S)
                    right = found == [number + who % WORKERS]
                else:
                    found = await self._group.call_any("add", [number], timeout=PATIENCE_S)
                    right = found in [[number + rank] for rank in range(WORKERS)]
            except Exception as error:
                self._failed(f"call {number} of {way}", error)
            else:
                self._done(right, f"call {number} of {way} has brought {found}")
            await asyncio.sleep(PAUSE_S)

    def _done(self, right: bool, what: str) -> None:
        self.counts["answered" if right else "wrong"] += 1
        if not right:
            self._part.journal.note("wrong", what)

    def _failed(self, what: str, error: Exception) -> None:
        if isinstance(error, EngineDead | WorkerDied):
            self.counts["failed by name"] += 1
            if error.pid is None and "no engine is left" not in str(error):
                self._part.journal.note("nameless", f"{what}: {error!r}")
        elif isinstance(error, TimeoutError):
            self._part.journal.note("hung", f"{what}: {error!r}")
        else:
            self._part.journal.note("odd", f"{what}: {error!r}")


async def serve_requests(part: Part) -> None:
    """Serve, and ask, until the end."""
    async with (
        EngineSupervisor(serve, ENGINES, restart=RESTART, resubmit="unstarted") as supervisor,
        WorkerGroup(Adder, WORKERS, args=(WEIGHTS,), restart=RESTART, standbys=STANDBYS) as group,
    ):
        load = Load(part, supervisor, group)
        work = [asyncio.create_task(load.ask(who)) for who in range(ASKING)]
        work += [asyncio.create_task(load.call(who)) for who in range(CALLING)]
        while not part.stopping.is_set():
            part.journal.note("counts", dict(load.counts))
            await asyncio.sleep(TELL_S)
        await asyncio.gather(*work)
        part.journal.note("counts", dict(load.counts))
