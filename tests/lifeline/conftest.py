from __future__ import annotations

import gc
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from loops import open_fds

from aioshm.config import Options
from aioshm.lifeline.sockets import new_address


@pytest.fixture(autouse=True)
def no_descriptor_left_behind(nothing_left_behind: None) -> Iterator[None]:
    before = descriptors()
    yield
    assert descriptors() == before


def descriptors() -> dict[str, str]:
    """Return what is open but for pipes: one is that of the resource tracker of multiprocessing."""
    gc.collect()
    return {fd: what for fd, what in open_fds().items() if not what.startswith("pipe:")}


@pytest.fixture(params=["abstract", "directory"])
def any_address(request: pytest.FixtureRequest, base: Path) -> str:
    options = Options(lifeline=request.param, runtime_dir=str(base))
    return new_address(options, secrets.token_bytes(16), "lifeline")


@pytest.fixture
def address() -> str:
    return f"@aioshm-{secrets.token_hex(16)}.lifeline"
