"""A front end in a process of its own: asks its engines without a pause, and says in a file what has become of it."""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

from aioshm.engine import ClientOptions, EngineClient, EngineZmqAddresses
from aioshm.errors import EngineDead

ASKING = 3
TOKENS = 5


async def ask_on(client: EngineClient, index: int, stop: Path, said: Path) -> None:
    """Ask until the file ``stop`` is there."""
    counts: Counter[str] = Counter()
    used: Counter[int] = Counter()
    failed: list[str] = []
    published = client._link.counts

    def counted(payload: bytes) -> None:
        counts["published"] += 1
        published(payload)

    client._link.counts = counted  # type: ignore[method-assign]

    async def ask(who: int) -> None:
        number = 0
        while not stop.exists():
            number += 1
            counts["asked"] += 1
            try:
                stream = client.submit({"request_id": f"{index} {who} {number}", "tokens": TOKENS})
                tokens = [output["token"] async for output in stream]
                assert tokens == list(range(TOKENS)), tokens
                counts["answered"] += 1
                used[stream.engine] += 1
            except EngineDead as error:
                failed.append(str(error))
                await asyncio.sleep(0.01)

    async def say() -> None:
        while True:
            text = json.dumps(
                {
                    **counts,
                    "failed": failed,
                    "used": used,
                    "ranks": client.ranks,
                    "deaths": [str(error) for error in client.deaths.values()],
                }
            )
            said.with_suffix(".new").write_text(text)
            os.replace(said.with_suffix(".new"), said)
            await asyncio.sleep(0.02)

    saying = asyncio.create_task(say())
    await asyncio.gather(*map(ask, range(ASKING)))
    await asyncio.sleep(0.1)
    saying.cancel()


def serve_front_end(listen_address: str, sock: Any, args: str, client_config: dict[str, Any]) -> None:
    """Be an API server; the target of a process. ``args`` is the directory where it says how it fares."""
    index = client_config["client_index"]

    async def work() -> None:
        addresses = EngineZmqAddresses(
            [client_config["input_address"]],
            [client_config["output_address"]],
            frontend_stats_publish_address=client_config["stats_update_address"],
        )
        async with EngineClient(
            addresses,
            2,
            options=ClientOptions(
                on_engine_death="continue", resubmit="unstarted", membership_address=client_config["membership_address"]
            ),
        ) as client:
            await client.wait_until_ready(30)
            await ask_on(client, index, Path(args, "stop"), Path(args, f"{index}.json"))

    asyncio.run(work())
