from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from aioshm.engine import get_engine_client_zmq_addr


@pytest.fixture
def runtime_dir(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Give sockets a directory whose path is short enough for them."""
    base = tmp_path_factory.mktemp("s")
    monkeypatch.setenv("AIOSHM_RUNTIME_DIR", str(base / "run"))
    yield base / "run"
    shutil.rmtree(base)


@pytest.fixture
def path(runtime_dir: Path) -> str:
    return get_engine_client_zmq_addr(True, "")
