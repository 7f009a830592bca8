from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import network_child
import pytest
from network_child import SECONDS, Minute


@pytest.fixture(scope="package", autouse=True)
def minute(request: pytest.FixtureRequest) -> Iterator[Minute]:
    """Start what takes a minute before all other tests of this directory, which it leaves the machine to."""
    wanted = any(item.name.startswith("test_a_minute_of") for item in request.session.items)
    children = [
        subprocess.Popen(
            [sys.executable, "-W", "error", network_child.__file__, loop, "through_proxies", str(SECONDS), str(seed)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for seed, loop in enumerate(["asyncio", "uvloop"] if wanted else [])
    ]
    yield children
    for child in children:
        child.kill()
        child.communicate()


@pytest.fixture
def base() -> Iterator[Path]:
    """Give a directory whose path is short enough for sockets, which pytest's need not be."""
    path = Path(tempfile.mkdtemp(prefix="aioshm-"))
    yield path
    shutil.rmtree(path)
