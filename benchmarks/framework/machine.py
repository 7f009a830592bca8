"""Where the figures come from: a figure without its machine says nothing."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import zmq

from aioshm import __version__, native_core
from aioshm.wait.cpus import usable_cpus

_PACKAGES = ["pyzmq", "uvloop", "numpy", "msgspec"]


def describe(loop: str, packages: Sequence[str] = ()) -> dict[str, str | int | float]:
    """Return processor, system, and versions, those of these packages too."""
    return {
        "date": date.today().isoformat(),
        "cpu": _cpu_model(),
        "usable_cpus": usable_cpus(),
        "load_1m": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "loop": loop,
        "aioshm": f"{__version__} ({'native' if native_core else 'portable'} core)",
        "libzmq": zmq.zmq_version(),
        **{package: _version(package) for package in (*_PACKAGES, *packages)},
    }


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    except OSError:
        pass  # no Linux
    return platform.processor() or platform.machine()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
