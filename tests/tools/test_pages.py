"""Every code block of the README and of docs/ runs as it stands, or says why it cannot."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from page_blocks import blocks_of, check

ROOT = Path(__file__).parents[2]
PAGES = sorted(path.relative_to(ROOT) for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")))
SLOW = {
    "docs/howto/containers.md",
    "docs/howto/engine-requests.md",
    "docs/howto/engines.md",
    "docs/howto/from-multiprocessing.md",
    "docs/howto/hung-engine.md",
    "docs/howto/inspection.md",
    "docs/howto/many-producers.md",
    "docs/howto/names.md",
    "docs/howto/publish-subscribe.md",
    "docs/howto/pytest.md",
    "docs/howto/request-reply.md",
    "docs/howto/starlette.md",
    "docs/howto/threads.md",
    "docs/howto/tuning.md",
    "docs/howto/uvicorn-workers.md",
    "docs/howto/worker-pool.md",
    "docs/howto/workers.md",
    "docs/howto/zero-copy.md",
    "docs/tutorial.md",
}
"""Pages that take more than some seconds."""


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=str(page), marks=[pytest.mark.slow] * (str(page) in SLOW))
        for page in PAGES
        if any(block.is_run and block.language in ("python", "console") for block in blocks_of(ROOT / page))
    ],
)
def test_blocks_run(page: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    runtime = tmp_path_factory.mktemp("r")  # short, as paths of sockets have to be
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # those that a new user has are enough, and start sooner
    env["PYTEST_PLUGINS"] = "anyio.pytest_plugin,aioshm.testing.plugin"
    env["XDG_RUNTIME_DIR"] = str(runtime)
    with socket.create_server(("127.0.0.1", 0)) as free, socket.create_server(("127.0.0.1", 0)) as second:
        env["PORT"] = str(free.getsockname()[1])
        env["PORT2"] = str(second.getsockname()[1])
    runner = [sys.executable, ROOT / "tests/tools/page_blocks.py", ROOT / page]
    done = subprocess.run(runner, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    left = [path for path in runtime.rglob("*") if not path.is_dir()]
    # What a page leaves running is ended by SIGTERM; the next writer with a name removes what that leaves.
    assert [path for path in left if path.suffix != ".queue"] == []


def test_every_block_is_run_or_says_why_not() -> None:
    for page in PAGES:
        for block in blocks_of(ROOT / page):
            check(block)


def test_code_is_in_fences() -> None:
    """A block that is only indented would be seen by readers, and by none of these tests."""
    for page in PAGES:
        text = re.sub(r"^( *)(```|~~~).*?^\1\2$", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
        found = re.findall(r"\n\n(    .+)", text)
        assert [line for line in found if not line.lstrip().startswith(("-", "*", "!", "<"))] == [], page
