"""Builds the native parts of aioshm, and a program that fuzzes them, with clang, libFuzzer and the sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUILT = ROOT / "build" / "fuzz-native"
SOURCES = {
    "aioshm/ring/_native.so": "aioshm/ring/core/*.c",
    "aioshm/events/protocol/_encoder.so": "aioshm/events/protocol/_encoder.c",
}

_SANITIZERS = "address,undefined"
_FLAGS = ("-std=c11", "-g", "-O1", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all", "-Wno-everything")


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
