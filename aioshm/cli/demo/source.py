"""The text that the demo sends: where it is, unless told otherwise the licence of aioshm, and whether it will do."""

from __future__ import annotations

import os
import stat
from importlib import metadata
from pathlib import Path

import aioshm
from aioshm.cli.outcome import UNUSABLE, CommandFailed

_PACKAGE = Path(aioshm.__file__).parent


def default_input() -> tuple[Path, str | None]:
    """Return a text that is at hand wherever aioshm is, and what to say about it if it is not the licence."""
    found = _in_checkout() or _in_installation()
    if found is not None:
        return found, None
    return _PACKAGE / "errors.py", "(aioshm's licence is not installed here: this is one of its source files)"


def read_checked(path: Path) -> bytes:
    """Return what is in the file.

    Raises:
        CommandFailed: It cannot be sent; the text says why.
    """
    name = f"--input {printable(os.fsencode(path))}"
    try:
        # Every process reads the file for itself, and a pipe can be read only once.
        if not stat.S_ISREG(path.stat().st_mode):
            what = "a directory" if path.is_dir() else "not a regular file"
            raise CommandFailed(f"{name} is {what}", UNUSABLE)
        text = path.read_bytes()
    except OSError as error:
        raise CommandFailed(f"{name} cannot be read: {error.strerror}", UNUSABLE) from None
    if not text:
        raise CommandFailed(f"{name} is empty", UNUSABLE)
    return text


def printable(path: bytes) -> str:
    """Return a path for people; on Linux, a path is bytes and need not be text."""
    return path.decode(errors="backslashreplace")


def _in_checkout() -> Path | None:
    root = _PACKAGE.parent
    # In site-packages, a LICENSE beside the package belongs to another one.
    return _readable(root / "LICENSE") if (root / "pyproject.toml").is_file() else None


def _in_installation() -> Path | None:
    try:
        files = metadata.files("aioshm") or []
    except metadata.PackageNotFoundError:
        return None
    licences = (file for file in files if file.name == "LICENSE" and ".dist-info" in str(file))
    return next((_readable(Path(str(file.locate()))) for file in licences), None)


def _readable(path: Path) -> Path | None:
    return path if path.is_file() and os.access(path, os.R_OK) else None
