from __future__ import annotations

import secrets
from pathlib import Path

import pytest

from aioshm.config import Options
from aioshm.lifeline.sockets import new_address


@pytest.fixture(params=["abstract", "directory"])
def any_address(request: pytest.FixtureRequest, base: Path) -> str:
    options = Options(lifeline=request.param, runtime_dir=str(base))
    return new_address(options, secrets.token_bytes(16), "lifeline")


@pytest.fixture
def address() -> str:
    return f"@aioshm-{secrets.token_hex(16)}.lifeline"
