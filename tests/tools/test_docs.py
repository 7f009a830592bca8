"""What the pages for developers name is there, and every code block of the pages runs or says why it cannot."""

from __future__ import annotations

import inspect
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from page_blocks import blocks_of, check

import aioshm
import aioshm.blocking
import aioshm.engine
import aioshm.engine.blocking
import aioshm.events
import aioshm.testing
from aioshm import config, errors

ROOT = Path(__file__).parents[2]
PAGES = (
    "CONTRIBUTING.md",
    "SECURITY.md",
    "README.md",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")),
)
MADE = {line.lstrip("/") for line in (ROOT / ".gitignore").read_text().splitlines()}  # by targets of the Makefile
ERRORS = {
    name
    for name, value in vars(errors).items()
    if inspect.isclass(value) and issubclass(value, errors.AioshmError) and not name.startswith("_")
}
FOLDERS = (ROOT, ROOT / "aioshm", ROOT / "aioshm/engine", ROOT / "tests", ROOT / "tests/events")


@pytest.mark.parametrize("page", PAGES)
def test_paths(page: str) -> None:
    text = (ROOT / page).read_text()
    named = {
        path for path in re.findall(r"`([\w./]+/|[\w./]+/[\w.]+\.(?:py|md|c|toml|yml))`", text) if "NAME" not in path
    }
    missing = sorted(path for path in named - MADE if not any((folder / path).exists() for folder in FOLDERS))
    assert not missing
    linked = re.findall(r"\]\(([\w./-]+)(?:#[\w.-]+)?\)", text)
    assert [path for path in linked if not ((ROOT / page).parent / path).exists()] == []


def test_targets_of_the_makefile() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        named = re.findall(r"`make ([a-z-]+)", (ROOT / page).read_text())
        assert set(named) <= targets, page


def test_every_error_has_a_cure() -> None:
    text = (ROOT / "docs/reference/errors.md").read_text()
    cured = set(re.findall(r"^## (\w+)\n\n(?:(?!^## ).*\n)*?\*\*Cure:\*\* \S", text, re.MULTILINE))
    assert cured == ERRORS


def test_page_of_errors_names_the_bases_that_each_error_has() -> None:
    text = (ROOT / "docs/reference/errors.md").read_text()
    told = dict(re.findall(r"^## (\w+)\n\n(?:(?!^## ).*\n)*?\*Is a\* (.*?)\.(?: |$)", text, re.MULTILINE))
    public_names = {"asyncio.queues": "asyncio.", "_queue": "queue.", "queue": "queue.", "builtins": ""}  # of modules

    def link(base: type) -> str:
        if base.__module__ == errors.__name__:
            return f"[`{base.__name__}`](#{base.__name__.lower()})"
        return f"`{public_names[base.__module__]}{base.__name__}`"

    for name, base_list in told.items():
        own, *bases = [base for base in getattr(errors, name).__mro__ if not base.__name__.startswith("_")]
        direct = [base for base in bases if base in own.__bases__] or bases[:1]
        assert base_list == ", ".join(map(link, direct)), name
    assert told.keys() == ERRORS - {"AioshmError"}


def test_everything_public_is_in_the_reference() -> None:
    pages_text = "\n".join(path.read_text() for path in (ROOT / "docs/reference").glob("*.md"))
    shown = {name.rpartition(".")[2] for name in re.findall(r"^::: ([\w.]+)$", pages_text, re.MULTILINE)}
    shown |= {name for name, value in vars(errors).items() if getattr(value, "__module__", "") == errors.__name__}
    for module in (aioshm, aioshm.blocking, aioshm.engine, aioshm.engine.blocking, aioshm.events, aioshm.testing):
        missing = set(module.__all__) - shown - {"native_core"}
        assert not missing, f"{module.__name__}: no page of docs/reference/ has {sorted(missing)}"


def test_every_variable_is_listed() -> None:
    rows = re.findall(
        r"^\| `(AIOSHM_\w+)` \| (?:`(\w+)` )?\|", (ROOT / "docs/reference/environment.md").read_text(), re.MULTILINE
    )
    assert {name for name, _ in rows} == set(re.findall(r"\bAIOSHM_[A-Z_]+\b", inspect.getsource(config))) - {"AIOSHM_"}
    options = {name: option for name, option in rows if option}
    assert options == {name: option for name, (option, _) in config._VARIABLES.items()}


@pytest.mark.slow
def test_the_site(tmp_path: Path) -> None:
    """Every link, anchor and reference leads somewhere, or ``make docs`` fails."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site"]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    site = tmp_path / "site"
    for page in ("tutorial/", "howto/starlette/", "reference/errors/"):
        assert (site / page / "index.html").exists()
    shown = (site / "reference/queue/index.html").read_text()
    assert "Send an object to every reader" in shown  # from a docstring
    assert not re.findall(r"&lt;!-- (?:include|docstring|command line)", shown)


EVERY_PAGE = sorted(path.relative_to(ROOT) for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")))
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
        for page in EVERY_PAGE
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
    for page in EVERY_PAGE:
        for block in blocks_of(ROOT / page):
            check(block)


def test_code_is_in_fences() -> None:
    """A block that is only indented would be seen by readers, and by none of these tests."""
    for page in EVERY_PAGE:
        text = re.sub(r"^( *)(```|~~~).*?^\1\2$", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
        found = re.findall(r"\n\n(    .+)", text)
        assert [line for line in found if not line.lstrip().startswith(("-", "*", "!", "<"))] == [], page
