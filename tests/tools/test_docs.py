"""What the pages for developers name is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ("docs/architecture.md", "CONTRIBUTING.md", "SECURITY.md", "README.md")
FOLDERS = (ROOT, ROOT / "aioshm", ROOT / "aioshm/engine", ROOT / "tests", ROOT / "tests/events")


@pytest.mark.parametrize("page", PAGES)
def test_paths(page: str) -> None:
    text = (ROOT / page).read_text()
    named = {
        path for path in re.findall(r"`([\w./]+/|[\w./]+/[\w.]+\.(?:py|md|c|toml|yml))`", text) if "NAME" not in path
    }
    missing = sorted(path for path in named if not any((folder / path).exists() for folder in FOLDERS))
    assert not missing
    linked = re.findall(r"\]\(([\w./]+)\)", text)
    assert [path for path in linked if not ((ROOT / page).parent / path).exists()] == []


def test_targets_of_the_makefile() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        named = re.findall(r"`make ([a-z-]+)", (ROOT / page).read_text())
        assert set(named) <= targets, page
