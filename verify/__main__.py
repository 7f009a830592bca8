"""Checks every model, then that each mutation of it fails: ``python -m verify``; see docs/explanation/proof.md."""

from __future__ import annotations

import argparse
import re
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verify import steps

TABLE = Path(__file__).parent / "models.toml"
MODELS = Path(__file__).parent / "models"
MEMORY_MB = 6000
DEPTH = 2_000_000
_INCOMPLETE = ("max search depth too small", "out of memory", "Search not completed")

VERDICTS = {
    "runs": ("FAILED", "ok    "),
    "mutations": ("MISSED", "caught"),
    "spare": ("NEEDED", "spare "),
}
"""What is printed of each kind of run, by whether it came out as `TABLE` says."""


def main() -> int:
    """Run what the command line asks for; return the exit status: 1 if a model fails, or a mutation does not."""
    parser = argparse.ArgumentParser(prog="python -m verify", description=__doc__)
    parser.add_argument("models", nargs="*", help="which models; without any: all")
    parser.add_argument("--accept", action="store_true", help="take the code as it is for what is modelled, and end")
    args = parser.parse_args()
    if args.accept:
        print(f"{steps.accept()} hashes in verify/steps.toml changed")
        return 0
    table = tomllib.loads(TABLE.read_text())
    unknown = set(args.models) - set(table)
    if unknown:
        parser.error(f"there is no model {', '.join(sorted(unknown))}; there are {', '.join(table)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # removes what SPIN has made so far
    began, bad = time.monotonic(), 0
    for line in steps.changed():
        bad += 1
        print(f"CHANGED {line}: look at the model, then python -m verify --accept")
    caught = asked = 0
    for model in args.models or table:
        print(f"{model} ({MODELS / (model + '.pml')})", flush=True)
        for kind, name, defines, where in _runs(table[model]):
            ok = _one(model, kind, name, defines, where)
            bad += not ok
            asked += kind == "mutations"
            caught += ok and kind == "mutations"
    print(f"{time.monotonic() - began:.0f} s; {caught} of {asked} mutations caught; {bad} failures")
    return 1 if bad else 0


def _runs(table: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    """Yield kind, name and defines of each run of a model, and where the code has the mutation."""
    for name, defines in table["runs"].items():
        yield "runs", name, defines, ""
    for kind in ("mutations", "spare"):
        for mutation in table.get(kind, ()):
            name = mutation["define"]
            for also in ("", mutation["also"]) if "also" in mutation else ("",):
                yield kind, name, f"-D{name} {mutation.get('run', '')} {also}", f"{mutation['where']} {also}".rstrip()


def _one(model: str, kind: str, name: str, defines: str, where: str) -> bool:
    print(f"  {name} ...", end="", flush=True)
    try:
        outcome = check(model, defines)
    except SpinError as error:
        print(f"\r  ERROR  {name}: {error}")
        return False
    ok = outcome.failed == (kind == "mutations")
    print(f"\r  {VERDICTS[kind][ok]} {name}: {_words(outcome)}{f'  [{where}]' if where else ''}", flush=True)
    return ok


def _words(outcome: Outcome) -> str:
    figures = f"{outcome.states} states, depth {outcome.depth}, {outcome.megabytes:.0f} MB, {outcome.seconds:.1f} s"
    return f"{figures}; {outcome.why}" if outcome.why else figures


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


if __name__ == "__main__":
    sys.exit(main())
