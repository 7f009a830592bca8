"""Says where its process was when this module was imported."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

CPUS = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
ENV = {name: os.environ.get(name) for name in ("PLACED", "UNWANTED")}


class Placed:
    """Where this process is; also a worker."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.found = ENV, CPUS

    def place(self) -> Any:
        return self.found

    def usable_cpus(self) -> int:
        from aioshm.process.placement import usable_cpus

        return usable_cpus()


def tell_place(path: str, **_: Any) -> None:
    """Write environment and CPUs at the import of this module, and memory policy and CPUs of all threads now."""
    policies = {line.split()[1] for line in Path("/proc/self/numa_maps").read_text().splitlines()}
    threads = [sorted(os.sched_getaffinity(thread.native_id or 0)) for thread in threading.enumerate()]
    Path(f"{path}.new").write_text(json.dumps([ENV, CPUS, sorted(policies), threads]))
    os.replace(f"{path}.new", path)
    sys.exit(3)
