from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from aioshm.config import Options
from aioshm.lifeline.sockets import new_address


@pytest.fixture
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Give a directory whose path is short enough for sockets, which those named after tests need not be."""
    path = tmp_path_factory.mktemp("s")
    yield path
    shutil.rmtree(path)


@pytest.fixture(params=["abstract", "directory"])
def any_address(request: pytest.FixtureRequest, base: Path) -> str:
    options = Options(lifeline=request.param, runtime_dir=str(base))
    return new_address(options, secrets.token_bytes(16), "lifeline")


@pytest.fixture
def address() -> str:
    return f"@aioshm-{secrets.token_hex(16)}.lifeline"
