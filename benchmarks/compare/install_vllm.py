"""Gets vLLM's message queue, and nothing else of vLLM, into the environment of the Python that runs this.

The wheel is downloaded whole by pip, without its dependencies; a few files are taken out of it, and then it is
deleted.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

CONSTRAINTS = Path(__file__).with_name("constraints-rivals.txt")
DEVICES = "vllm/distributed/device_communicators"
WANTED = [f"{DEVICES}/shm_broadcast.py", f"{DEVICES}/shm_tensor_arena.py"]
METADATA = [".dist-info/METADATA", ".dist-info/licenses/LICENSE"]
"""Endings of the files that say which version this is, and on which terms."""


def main() -> int:
    """Install it, unless that version is there already."""
    requirement = pinned()
    target = Path(sysconfig.get_path("purelib"))
    if (target / _metadata_folder(requirement)).exists() and all((target / name).exists() for name in WANTED):
        print(f"{requirement}: its message queue is installed already")
        return 0
    with tempfile.TemporaryDirectory(prefix="vllm-wheel-") as folder:
        print(f"{requirement}: downloading the wheel, of which a few files are kept", flush=True)
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--dest", folder, requirement],
            check=True,
        )
        [wheel] = Path(folder).glob("*.whl")
        for name in extract(wheel, target):
            print(f"  {name}")
    return 0


def pinned() -> str:
    """Return the requirement with its pinned version."""
    return next(line for line in CONSTRAINTS.read_text().splitlines() if line.startswith("vllm=="))


def extract(wheel: Path, target: Path) -> list[str]:
    """Unpack what is wanted, and return it.

    Raises:
        KeyError: The wheel has not got it.
    """
    with zipfile.ZipFile(wheel) as archive:
        names = [*WANTED, *(name for name in archive.namelist() if name.endswith(tuple(METADATA)))]
        for name in names:
            archive.extract(name, target)
    return names


def _metadata_folder(requirement: str) -> str:
    return requirement.replace("==", "-") + ".dist-info"


if __name__ == "__main__":
    sys.exit(main())
