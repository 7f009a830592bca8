"""Engines started, asked and stopped, again and again: nothing fails, nothing is left.

``ENGINE_CYCLES=100`` takes some minutes.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from managed import open_things
from served_engine import ask, collected, served_by_processes
from support import until

CYCLES = int(os.environ.get("ENGINE_CYCLES", "3"))
ENGINES = 8


@pytest.mark.slow
@pytest.mark.one_loop
@pytest.mark.timeout(60 + 20 * CYCLES)
async def test_eight_engines_again_and_again(runtime_dir: Path) -> None:
    before = 0
    for cycle in range(1 + CYCLES):
        async with served_by_processes(ENGINES) as serving:
            streams = [serving.client.submit(ask(str(rank), 3), engine=rank) for rank in range(ENGINES)]
            for outputs in await asyncio.gather(*map(collected, streams)):
                assert [output["token"] for output in outputs] == [0, 1, 2]
            assert serving.manager is not None
            assert serving.manager.finished_procs() == {}
        assert set(serving.manager.finished_procs().values()) == {0}
        assert [path for path in runtime_dir.rglob("*") if not path.is_dir()] == []
        if not cycle:
            before = len(open_things())  # what Python keeps: a resource tracker
        await until(lambda before=before: len(open_things()) <= before, f"the end of what was opened in cycle {cycle}")
