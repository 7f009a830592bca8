"""Print the test files that ``make check`` runs: some quick ones, and those of what differs from the last commit.

A test file belongs to a module whose name its own begins with: ``ring/test_segment_orphans.py`` to ``ring/segment.py``.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

TESTS = Path(__file__).parent

CORE = (
    "test_*.py",
    "codec/test_[!i]*.py",  # test_imports.py starts an interpreter for each import
    "ring/test_[bw]*.py",
    "ring/test_core_[gms]*.py",
    "wait/test_[pt]*.py",
    "lifeline/test_lifeline.py",
    "queue/**/test_overflow.py",
    "queue/**/test_arguments.py",
    "queue/**/test_basics.py",
    "queue/**/test_blocking_ends.py",
    "queue/**/test_leases.py",
    "queue/**/test_merge.py",
    "queue/**/test_remote.py",
    "queue/**/test_wire.py",
    "engine/protocol/test_*.py",
    "engine/client/test_client.py",
    "engine/core/test_core.py",
    "events/protocol/test_[!en]*.py",
    "events/publish/test_publisher.py",
)
"""Of every trade what takes milliseconds: half of the tests, in a twentieth of the time of all."""


def changed() -> list[str]:
    """Return the files that differ from the last commit, or those of the last commit where none does."""
    now = [*_git("diff", "--name-only", "HEAD"), *_git("ls-files", "--others", "--exclude-standard")]
    return now or _git("diff", "--name-only", "HEAD~1")


def _git(*arguments: str) -> list[str]:
    try:
        done = subprocess.run(["git", *arguments], cwd=TESTS.parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):  # a tree without a history
        return []
    return done.stdout.splitlines()


def tests_of(files: list[str]) -> Iterator[Path]:
    """Yield the tests that belong to these files, and those among them."""
    for file in map(PurePosixPath, files):
        if file.parts[0] == "aioshm":
            room = TESTS.joinpath(*file.parts[1:-1])
            stem = file.stem.lstrip("_")
            yield from (path for path in room.glob("test_*.py") if f"{path.stem}_".startswith(f"test_{stem}_"))
        elif file.parts[0] == "tests" and file.match("test_*.py"):
            yield TESTS.parent / file


def main() -> None:
    core = [path for pattern in CORE for path in TESTS.glob(pattern)]
    for path in sorted({*core, *filter(Path.exists, tests_of(changed()))}):
        print(path.relative_to(TESTS.parent))


if __name__ == "__main__":
    main()
