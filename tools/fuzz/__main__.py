"""``python -m tools.fuzz``: fuzz all targets, or one, for some time in all; fails if anything was found."""

from __future__ import annotations

import argparse
import base64
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tools.fuzz.target import MAX_KEPT_BYTES, Target
from tools.fuzz.targets import TARGETS

ROOT = Path(__file__).parents[2]
BUILT = ROOT / "build" / "fuzz-native"
SOURCES = {
    "aioshm/ring/_native.so": "aioshm/ring/core/*.c",
    "aioshm/events/protocol/_encoder.so": "aioshm/events/protocol/_encoder.c",
}

_SANITIZERS = "address,undefined"
_FLAGS = ("-std=c11", "-g", "-O1", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all", "-Wno-everything")
WORK = ROOT / "build" / "fuzz"
INPUT_S, MEMORY_MB = 10, 2048
"""What one input may take."""
MAX_BYTES = 4096
MAX_KEPT = 150
"""Inputs of one target that are kept in the repository."""
STARTUP_S = 120


class Job(NamedTuple):
    """One target in one way of fuzzing."""

    target: Target
    how: str
    command: list[str]
    environ: dict[str, str]


class Outcome(NamedTuple):
    """What came of a job."""

    runs: int
    branches: int
    found: list[Path]
    log: Path
    failed: bool


def main() -> int:
    """Fuzz; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="for all targets together (default: 60)")
    parser.add_argument("--target", choices=TARGETS, help="fuzz only this one")
    parser.add_argument("--input", type=Path, help="run the target on this file instead")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes at a time")
    parser.add_argument("--keep", action="store_true", help="keep what was found to be new in tools/fuzz/corpus")
    given = parser.parse_args()
    if given.input is not None:
        if given.target is None:
            parser.error("--input needs --target")
        TARGETS[given.target].run(given.input.read_bytes())
        return 0
    targets = [TARGETS[given.target]] if given.target else list(TARGETS.values())
    program = build()
    if program is None:
        print("no clang with libFuzzer, or no shared libpython: the native parts are fuzzed without the sanitizers")
    jobs = list(_jobs(targets, program))
    share = given.seconds * min(given.jobs, len(jobs)) / len(jobs)
    print(f"{len(jobs)} jobs of {share:.1f} s each, {given.jobs} at a time")
    began = time.monotonic()
    with ThreadPoolExecutor(given.jobs) as pool:
        outcomes = list(pool.map(lambda job: _run(job, share), jobs))
    print(f"{'target':<12} {'by':<10} {'runs':>10} {'branches':>9}  found")
    for job, outcome in zip(jobs, outcomes, strict=True):
        what = ", ".join(map(str, outcome.found)) or (f"FAILED: see {outcome.log}" if outcome.failed else "nothing")
        print(f"{job.target.name:<12} {job.how:<10} {outcome.runs:>10} {outcome.branches:>9}  {what}")
    runs, bad = sum(outcome.runs for outcome in outcomes), [o for o in outcomes if o.found or o.failed]
    print(f"{runs} inputs in {time.monotonic() - began:.0f} s, {len(bad)} jobs have found something")
    if bad:
        print("again: python -m tools.fuzz --target TARGET --input FILE")
    if given.keep:
        for target in targets:
            _keep(target)
    return 1 if bad else 0


def _jobs(targets: list[Target], program: Path | None) -> Iterator[Job]:
    for target in targets:
        yield Job(target, "atheris", [sys.executable, "-m", "tools.fuzz.one", target.name], dict(os.environ))
        if target.native and program is not None:
            yield Job(target, "libFuzzer", [str(program)], environment(target.name))


def _run(job: Job, seconds: float) -> Outcome:
    work = WORK / f"{job.target.name}-{job.how}"
    seeds, new, found = work / "seeds", WORK / f"{job.target.name}-new", work / "found"
    temporary = work / "tmp"  # libFuzzer ends its process without a word to what would be done at its exit
    shutil.rmtree(work, ignore_errors=True)
    for directory in (seeds, new, found, temporary):
        directory.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(job.target.inputs()):
        (seeds / f"{number:04}").write_bytes(data)
    options = [
        f"-max_total_time={max(1, round(seconds))}",
        f"-timeout={INPUT_S}",
        f"-rss_limit_mb={MEMORY_MB}",
        f"-max_len={MAX_BYTES}",
        f"-artifact_prefix={found}/",
        "-print_final_stats=1",
    ]
    log = work / "log"
    with log.open("wb") as output:
        try:
            done = subprocess.run(
                [*job.command, *options, str(new), str(seeds)],
                cwd=ROOT,
                env=job.environ | {"TMPDIR": str(temporary)},
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=seconds + STARTUP_S,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            done = 1
    shutil.rmtree(temporary, ignore_errors=True)
    text = log.read_text(errors="replace")
    runs = re.findall(r"number_of_executed_units: (\d+)", text) or re.findall(r"^#(\d+)", text, re.MULTILINE)
    branches = re.findall(r" cov: (\d+) ", text)
    return Outcome(int((runs or [0])[-1]), int((branches or [0])[-1]), sorted(found.iterdir()), log, done != 0)


def _keep(target: Target) -> None:
    """Write what is new, the smallest first, beside what is kept: as much as is worth reading in a diff."""
    known = set(target.seeds())
    kept = [data for data in target.inputs() if data not in known]
    new = sorted((path.read_bytes() for path in (WORK / f"{target.name}-new").glob("*")), key=len)
    for data in new:
        if len(kept) < MAX_KEPT and len(data) <= MAX_KEPT_BYTES and data not in known and data not in kept:
            kept.append(data)
    if kept:
        target.kept.write_text("".join(f"{base64.b64encode(data).decode()}\n" for data in kept))


def build() -> Path | None:
    """Return the program; None where there is no clang that has libFuzzer, or no Python to link with."""
    compiler = shutil.which("clang")
    library = Path(sysconfig.get_config_var("LIBDIR") or "") / str(sysconfig.get_config_var("LDLIBRARY"))
    if compiler is None or library.suffix != ".so" or not library.exists():
        return None
    include = f"-I{sysconfig.get_path('include')}"
    shutil.rmtree(BUILT, ignore_errors=True)
    shutil.copytree(ROOT / "aioshm", BUILT / "aioshm", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for module, pattern in SOURCES.items():
        kind = ("-shared", "-fPIC", "-fvisibility=hidden", f"-fsanitize=fuzzer-no-link,{_SANITIZERS}")
        subprocess.run([compiler, *kind, *_FLAGS, include, *BUILT.glob(pattern), "-o", BUILT / module], check=True)
    program = BUILT / "fuzz"
    # What the sanitizers and libFuzzer are called by is in the program, for the libraries that it loads.
    link = (library, f"-Wl,-rpath,{library.parent}", "-rdynamic", f"-fsanitize=fuzzer,{_SANITIZERS}")
    harness = Path(__file__).with_name("harness.c")
    subprocess.run([compiler, *_FLAGS, include, harness, "-o", program, *link], check=True)
    return program


def environment(target: str) -> dict[str, str]:
    """Return what the program is to be started with, to fuzz a target."""
    return {
        **os.environ,
        "FUZZ_TARGET": target,
        "AIOSHM_NATIVE": "1",
        "PYTHONPATH": os.pathsep.join([str(BUILT), str(ROOT), *(path for path in sys.path if "site-packages" in path)]),
        "PYTHONMALLOC": "malloc",  # the sanitizer's, or it would not see what is read beyond an object
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1",  # what Python itself never frees is no leak
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }


if __name__ == "__main__":
    sys.exit(main())
