"""Checks every model, then that each mutation of it fails: ``python -m verify``; see docs/explanation/proof.md."""

from __future__ import annotations

import argparse
import signal
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from verify import steps
from verify.spin import MODELS, Outcome, SpinError, check

TABLE = Path(__file__).parent / "models.toml"

VERDICTS = {
    "runs": ("FAILED", "ok    "),
    "mutations": ("MISSED", "caught"),
    "findings": ("CURED?", "OPEN  "),
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
    for kind in ("mutations", "findings", "spare"):
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
    ok = outcome.failed == (kind in ("mutations", "findings"))
    print(f"\r  {VERDICTS[kind][ok]} {name}: {_words(outcome)}{f'  [{where}]' if where else ''}", flush=True)
    return ok


def _words(outcome: Outcome) -> str:
    figures = f"{outcome.states} states, depth {outcome.depth}, {outcome.megabytes:.0f} MB, {outcome.seconds:.1f} s"
    return f"{figures}; {outcome.why}" if outcome.why else figures


if __name__ == "__main__":
    sys.exit(main())
