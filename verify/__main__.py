"""Checks every model, then that each mutation of it fails: ``python -m verify``; see docs/explanation/proof.md."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
import tomllib
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
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    parser.add_argument("--accept", action="store_true", help="take the code as it is for what is modelled, and end")
    parser.add_argument("--mutations-only", action="store_true", help="leave the models themselves out")
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
    figures: list[dict[str, Any]] = []
    for model in args.models or table:
        bad += _run_model(model, table[model], figures, mutations_only=args.mutations_only)
    caught = sum(row["ok"] for row in figures if row["kind"] == "mutations")
    asked = sum(row["kind"] == "mutations" for row in figures)
    print(f"{time.monotonic() - began:.0f} s; {caught} of {asked} mutations caught; {bad} failures")
    if args.json:
        Path(args.json).write_text(json.dumps(figures, indent=1) + "\n")
    return 1 if bad else 0


def _run_model(model: str, table: dict[str, Any], figures: list[dict[str, Any]], *, mutations_only: bool) -> int:
    bad = 0
    print(f"{model} ({MODELS / (model + '.pml')})", flush=True)
    for name, defines in ({} if mutations_only else table["runs"]).items():
        bad += _one(model, name, defines, "", figures, "runs")
    for kind in ("mutations", "findings", "spare"):
        for mutation in table.get(kind, ()):
            defines = f"-D{mutation['define']} {mutation.get('run', '')}"
            bad += _one(model, mutation["define"], defines, mutation["where"], figures, kind)
    return bad


def _one(model: str, name: str, defines: str, where: str, figures: list[dict[str, Any]], kind: str) -> int:
    print(f"  {name} ...", end="", flush=True)
    try:
        outcome = check(model, defines)
    except SpinError as error:
        print(f"\r  ERROR  {name}: {error}")
        figures.append({"model": model, "name": name, "kind": kind, "where": where, "ok": False, "why": str(error)})
        return 1
    ok = outcome.failed == (kind in ("mutations", "findings"))
    row = {"model": model, "name": name, "defines": defines, "kind": kind, "where": where}
    figures.append({**row, "ok": ok, **vars(outcome)})
    print(f"\r  {VERDICTS[kind][ok]} {name}: {_words(outcome)}{f'  [{where}]' if where else ''}", flush=True)
    return not ok


def _words(outcome: Outcome) -> str:
    figures = f"{outcome.states} states, depth {outcome.depth}, {outcome.megabytes:.0f} MB, {outcome.seconds:.1f} s"
    return f"{figures}; {outcome.why}" if outcome.why else figures


if __name__ == "__main__":
    sys.exit(main())
