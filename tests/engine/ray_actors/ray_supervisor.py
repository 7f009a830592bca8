"""A supervisor to be killed while its actor comes back: ``python ray_supervisor.py CLUSTER MOMENT``; says when."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import ray_targets as targets

from aioshm.engine import EngineLayout, EngineNeeds, EngineSupervisor


async def run(cluster: str, moment: str) -> None:
    """Bring that moment about: ``starting``, as soon as the new process runs, or so many ms after the death."""
    mark = "AIOSHM_TEST_MARK"
    options = {
        "needs": EngineNeeds(world_size=0),
        "runtime_env": {"env_vars": {mark: os.environ[mark]}},
        "ray_options": {"address": cluster, "log_to_driver": False},
    }
    async with EngineSupervisor(
        targets.serve_launched,
        1,
        layout=EngineLayout(backend="ray", coordinator=True, host="127.0.0.1", manager_options=options),
    ) as supervisor:
        os.kill(supervisor.engines[0].pid or 0, signal.SIGKILL)
        if moment == "starting":
            while supervisor.engines[0].state != moment:
                await asyncio.sleep(0)
        else:
            await asyncio.sleep(float(moment) / 1000)
        os.write(1, b"now\n")
        await asyncio.sleep(targets.LONG_S)


if __name__ == "__main__":
    asyncio.run(run(*sys.argv[1:]))
