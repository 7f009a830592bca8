from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from planting import Planted

from aioshm import Options


@pytest.fixture
def planted() -> Iterator[Planted]:
    planted = Planted()
    yield planted
    for process in planted.processes:
        process.kill()
    for process in planted.processes:
        process.communicate()
    Path(Options.from_env().runtime_dir, f"{planted.name}.queue").unlink(
        missing_ok=True
    )  # of the writer that was killed
