"""Gets vLLM's message queue and its events, and nothing else of vLLM, into the environment of the Python running this.

The wheel is downloaded whole by pip, without its dependencies; a few files are taken out of it, and then it is
deleted. With ``--executor`` all of its Python files are, which is enough for what vLLM runs on a CPU around a model; it
then has the version that it would have if it was built for CPUs, or it would look for a GPU.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

CONSTRAINTS = Path(__file__).with_name("constraints-rivals.txt")
DEVICES = "vllm/distributed/device_communicators"
WANTED = [f"{DEVICES}/shm_broadcast.py", f"{DEVICES}/shm_tensor_arena.py", "vllm/distributed/kv_events.py"]
METADATA = [".dist-info/METADATA", ".dist-info/licenses/LICENSE"]
"""Endings of the files that say which version this is, and on which terms."""


EXECUTOR = "vllm/v1/executor/multiproc_executor.py"
CPU = "+cpu"


def main() -> int:
    """Install it, unless that version is there already."""
    executor = "--executor" in sys.argv[1:]
    requirement = pinned() + (CPU if executor else "")
    target = Path(sysconfig.get_path("purelib"))
    wanted = [*WANTED, EXECUTOR] if executor else WANTED
    if (target / _metadata_folder(requirement)).exists() and all((target / name).exists() for name in wanted):
        print(f"{requirement}: its message queue is installed already")
        return 0
    with tempfile.TemporaryDirectory(prefix="vllm-wheel-") as folder:
        print(f"{pinned()}: downloading the wheel, of which some files are kept", flush=True)
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--dest", folder, pinned()],
            check=True,
        )
        [wheel] = Path(folder).glob("*.whl")
        if executor:
            print(f"  {len(extract_executor(wheel, target))} files")
        else:
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


def extract_executor(wheel: Path, target: Path) -> list[str]:
    """Unpack all Python files, and the metadata with the version of a build for CPUs; return what was unpacked."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith((".py", *METADATA))]
        for name in names:
            if ".dist-info/" not in name:
                archive.extract(name, target)
                continue
            place = target / name.replace(".dist-info/", f"{CPU}.dist-info/")
            place.parent.mkdir(parents=True, exist_ok=True)
            text = archive.read(name).decode()
            place.write_text(re.sub(r"(?m)^(Version: \S+)$", rf"\1{CPU}", text, count=1))
    return names


def _metadata_folder(requirement: str) -> str:
    return requirement.replace("==", "-") + ".dist-info"


if __name__ == "__main__":
    sys.exit(main())
