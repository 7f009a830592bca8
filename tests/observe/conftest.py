from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from planting import Planted

from aioshm import Options


@pytest.fixture
def planted() -> Iterator[Planted]:
    directory = Path(Options.from_env().runtime_dir)
    before = set(directory.glob("*"))
    planted = Planted()
    yield planted
    for process in planted.processes:
        process.kill()
    for process in planted.processes:
        process.communicate()
    for path in set(directory.glob("*")) - before:
        path.unlink()  # of killed processes: only this test uses the directory
