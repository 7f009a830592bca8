from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from aioshm.engine import get_engine_client_zmq_addr


@pytest.fixture
def runtime_dir(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Give sockets a directory whose path is short enough for them."""
    base = Path(tempfile.mkdtemp(prefix="aioshm-"))
    monkeypatch.setenv("AIOSHM_RUNTIME_DIR", str(base / "run"))
    yield base / "run"
    shutil.rmtree(base)


@pytest.fixture
def path(runtime_dir: Path) -> str:
    return get_engine_client_zmq_addr(True, "")
