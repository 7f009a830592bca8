"""Links that are slow, stall, and are cut: from remote readers to their writer, from subscribers to a publisher."""

from __future__ import annotations

import asyncio
import importlib
import random
import sys
from pathlib import Path
from typing import Any

from aioshm import Handle
from tools.campaign.events import HOST, LINKED, PORTS
from tools.campaign.stage import Actor, Part

EVERY_S, DELAY_S = 1.5, 0.005
_PROXIES = Path(__file__).parents[2] / "tests" / "helpers"


def actors() -> list[Actor]:
    """Return who plays here; a dead one would take all its links with it for good, so it is not struck."""
    return [Actor("links", "links:cut", {}, 0.0)]


async def cut(part: Part) -> None:
    """Stand between them until the end."""
    sys.path.insert(0, str(_PROXIES))
    proxy: Any = importlib.import_module("proxy")
    path = part.work / "handles" / "far"
    while not path.exists():  # noqa: ASYNC110 -- another process makes it
        await asyncio.sleep(0.05)
    handle = Handle.from_json(path.read_text())
    chance = random.Random(part.chance.random())
    async with proxy.proxied(handle, chance) as (linked, data, control):
        found = [data, control]
        for (live, replay), ports in ((LINKED[name], PORTS[name]) for name in LINKED):
            for own, target in ((live, ports[0]), (replay, ports[1])):
                found.append(await proxy.Proxy(f"{HOST}:{target}", chance, own).__aenter__())
        path.with_suffix(".linked").write_text(linked.to_json())
        for each in found:
            each.misbehave(EVERY_S, DELAY_S)
        while not part.calm and not part.stopping.is_set():  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        for each in found:
            await each.behave()
        await part.stopping.wait()
        part.journal.note("links", sum(each.connections for each in found))
        for each in found[2:]:
            await each.__aexit__()
