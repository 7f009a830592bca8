"""Running one model under SPIN."""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

MODELS = Path(__file__).parent / "models"
MEMORY_MB = 6000
DEPTH = 2_000_000
_INCOMPLETE = ("max search depth too small", "out of memory", "Search not completed")


class SpinError(Exception):
    """A model could not be checked: SPIN or the compiler refused it, or it did not end."""


@dataclass(frozen=True)
class Outcome:
    """What came of searching every state of a model."""

    failed: bool
    why: str
    states: int
    depth: int
    megabytes: float
    seconds: float


def check(model: str, defines: str, limit_s: float = 300.0) -> Outcome:
    """Search a model exhaustively, or until it fails."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="aioshm-verify-") as folder:
        text, others = source(model, defines.split())
        Path(folder, f"{model}.pml").write_text(text)
        _run(["spin", *others, "-a", f"{model}.pml"], folder, 60)
        flags = ["-O2", "-w", "-DSAFETY", "-DNOBOUNDCHECK", "-DCOLLAPSE", f"-DMEMLIM={MEMORY_MB}"]
        _run(["gcc", *flags, "-o", "pan", "pan.c"], folder, 120)
        text = _run(["./pan", f"-m{DEPTH}", "-w24"], folder, limit_s)
    found = re.search(r"errors: (\d+)", text)
    failed = found is not None and int(found[1]) > 0
    if not failed and (found is None or any(words in text for words in _INCOMPLETE)):
        raise SpinError(f"{model} {defines}: the search did not end:\n{text[-1000:]}")
    why = re.search(r"^pan:\d+: (.*)$", text, re.MULTILINE)
    return Outcome(
        failed=failed,
        why="" if why is None else why[1],
        states=int(float(_number(r"([\d.e+]+) states, stored", text))),
        depth=int(_number(r"depth reached (\d+)", text)),
        megabytes=float(_number(r"([\d.]+)\s+total actual memory usage", text)),
        seconds=time.monotonic() - began,
    )


def source(model: str, defines: list[str]) -> tuple[str, list[str]]:
    """Return a model with its bounds and its mutation, and the definitions that are left for SPIN.

    ``-DN=5`` sets a bound, a line "#define N 4". ``-DNAME`` removes lines that end with "/* -NAME */", and takes in the
    text of lines "/* +NAME: text */".
    """
    text = (MODELS / f"{model}.pml").read_text()
    others = []
    for define in defines:
        name, _, value = define.removeprefix("-D").partition("=")
        text = re.sub(rf"^.*/\* -{name} \*/\n", "", text, flags=re.MULTILINE)
        text = re.sub(rf"^ */\* \+{name}: (.*) \*/$", r"\1", text, flags=re.MULTILINE)
        text, bounds = re.subn(rf"^#define {name} \S+", f"#define {name} {value or 1}", text, flags=re.MULTILINE)
        if not bounds:
            others.append(define)
    return text, others


def _number(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    return "0" if found is None else found[1]


def _run(command: list[str], folder: str, limit_s: float) -> str:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=limit_s, check=False)
    except FileNotFoundError:
        raise SpinError(f"there is no {command[0]} here: apt-get install spin gcc, or make verify as root") from None
    except subprocess.TimeoutExpired:
        raise SpinError(f"{' '.join(command)} did not end within {limit_s:g} s") from None
    text = done.stdout + done.stderr
    if done.returncode != 0 or (command[0] == "spin" and "Error" in text):
        raise SpinError(f"{' '.join(command)}:\n{text[-2000:]}")
    return text
