from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def base() -> Iterator[Path]:
    """Give a directory whose path is short enough for sockets, which pytest's need not be."""
    path = Path(tempfile.mkdtemp(prefix="aioshm-"))
    yield path
    shutil.rmtree(path)
