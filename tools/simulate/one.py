"""Runs one seed."""

from __future__ import annotations

import asyncio
import logging

from tools.simulate import engine, events, remote
from tools.simulate.world import Violation, World

PARTS = {"remote": remote.run, "events": events.run, "engine": engine.run}


def prepare() -> None:
    """Have this process simulate from now on."""
    logging.disable(logging.CRITICAL)
    remote.stand_in()
    engine.stand_in()


def run_seed(
    seed: int, *, traced: bool = False, only: str | None = None
) -> tuple[World, dict[str, int], Violation | None]:
    """Run a seed, or only one part of it; return its world, what there was in it, and what does not hold."""
    world = World(seed, traced=traced)
    figures: dict[str, int] = {}
    violation: Violation | None = None

    async def main() -> None:
        parts = PARTS if only is None else {only: PARTS[only]}
        for found in await asyncio.gather(*(run(world.part(name)) for name, run in parts.items())):
            figures.update(found)

    try:
        world.loop.run_until_complete(main())
    except Violation as error:
        violation = error
    except asyncio.CancelledError:
        assert world.violation is not None
    except Exception as error:
        violation = Violation(f"{type(error).__name__}: {error}")
        violation.__cause__ = error
    finally:
        for task in asyncio.all_tasks(world.loop):
            task.cancel()
        world.loop.close()
    return world, figures, world.violation or violation
