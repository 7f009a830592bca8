"""Every code block of the README and of docs/ runs as it stands, or says why it cannot."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import closing, suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

import pytest
from page_blocks import BlockError, blocks_of, check, matches
from support import eventually

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


def _blocks(page: Path) -> list[object]:
    return [block for block in blocks_of(ROOT / page) if block.is_run and block.language in ("python", "console")]


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=str(page), marks=[pytest.mark.slow] * (str(page) in SLOW))
        for page in PAGES
        if _blocks(page)
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


@pytest.mark.slow
def test_uvicorn_workers_hear_each_other_after_one_was_killed_and_replaced(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    (app,) = (block for block in blocks_of(ROOT / "docs/howto/uvicorn-workers.md") if block.title == "everyone.py")
    (tmp_path / app.title).write_text(app.text)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def request(method: str, path: str, body: str | None = None) -> dict[str, Any]:
        with closing(HTTPConnection("127.0.0.1", port, timeout=20)) as connection:
            connection.request(method, path, body)
            return json.loads(connection.getresponse().read())  # type: ignore[no-any-return]

    numbers = itertools.count(1)

    def hear_each_other(dead: int = 0) -> set[int]:
        """Let workers say numbers until two that live have heard each other; return their pids."""
        heard: set[tuple[int, int]] = set()

        def mutually() -> bool:
            number = next(numbers)
            with suppress(OSError, HTTPException):  # a worker is being replaced
                speaker = request("POST", "/say", json.dumps({"number": number}))["pid"]
                for _ in range(10):  # which worker answers is up to the kernel
                    answer = request("GET", "/")
                    if answer["known"].get("number") == number:
                        heard.add((speaker, answer["pid"]))
            return any(a != b and dead not in (a, b) and (b, a) in heard for a, b in heard)

        eventually(mutually, "messages both ways", within_s=60)
        return next({a, b} for a, b in heard if a != b and dead not in (a, b) and (b, a) in heard)

    command = [sys.executable, "-m", "uvicorn", "everyone:app", "--workers", "2", "--port", str(port)]
    env = os.environ | {"XDG_RUNTIME_DIR": str(tmp_path_factory.mktemp("r")), "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as server:
        try:
            killed, left = hear_each_other()
            os.kill(killed, signal.SIGKILL)
            now = hear_each_other(killed)
        finally:
            server.terminate()
            assert server.stdout is not None
            log = server.stdout.read().decode()
    assert left in now, log
    assert "Traceback" not in log, log


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


@pytest.mark.parametrize(
    "text",
    ["```\nx\n```", "```rust\nx\n```", "```console\nx\n```", "```json\n{\n```", "```python\nif\n```", "```python\nx"],
)
def test_what_is_not_run_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(text)
    with pytest.raises((BlockError, ValueError, SyntaxError)):
        for block in blocks_of(tmp_path / "page.md"):
            check(block)


def test_a_block_that_fails_is_told_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("text\n\n```python\nx = 1\n\nx / 0\n```\n")
    runner = [sys.executable, ROOT / "tests/tools/page_blocks.py", tmp_path / "page.md"]
    done = subprocess.run(runner, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode
    assert 'page.md:4", line 6' in done.stderr
    assert "ZeroDivisionError" in done.stderr


def test_what_is_printed_is_compared() -> None:
    assert matches("a\nb 17\nc\n", ["b ..."])
    assert not matches("a\nb\n", ["a b"])
