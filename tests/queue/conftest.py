from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def long_respite(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a name keep a leased message until the next lease ends, however slow the machine is just now."""
    monkeypatch.setattr("aioshm.queue.local.leases.RESPITE_S", 60.0)


@pytest.fixture
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Give a directory whose path is short enough for sockets, which those named after tests need not be."""
    path = tmp_path_factory.mktemp("s")
    yield path
    shutil.rmtree(path)
