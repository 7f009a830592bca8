from __future__ import annotations

import asyncio
import gc
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop
from managed import open_things
from support import eventually

from aioshm.engine import get_engine_client_zmq_addr
from aioshm.process.loop_thread import shared_loop


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


@pytest.fixture
def nothing_kept(runtime_dir: Path) -> Iterator[None]:
    """Fail a test after which there are more descriptors, threads or socket files than before."""
    uvloop.run(asyncio.sleep(0))  # opens descriptors for good
    shared_loop()  # its thread stays until the process ends
    before = open_things()
    yield
    gc.collect()
    eventually(lambda: open_things() <= before, f"the end of {open_things() - before}")
    assert not runtime_dir.exists() or list(runtime_dir.iterdir()) == []
