"""Usage reports: nothing is reported unless somebody asks for it, and never over a network."""

from __future__ import annotations

import logging
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec

from aioshm.config import usage_stats_path

Sink = str | os.PathLike[str] | Callable[[dict[str, Any]], object]
"""Where reports go: a file's path, or something to call with each."""

_log = logging.getLogger("aioshm.engine")


def report_usage_stats(
    stats: Mapping[str, Any] | None = None, usage_context: str = "unknown", *, to: Sink | None = None
) -> bool:
    """Report how this process is used, if that is wanted; return whether a report was made.

    A report has the time, the versions of aioshm, of Python and of the system, the context, and what the caller adds. A
    file gets one line of JSON for each. A report that fails is a warning in the log: nobody's service ends for it.

    Args:
        stats: What to add; values that JSON cannot express become text.
        usage_context: What kind of program this is.
        to: Where it goes. None: to the file that ``AIOSHM_USAGE_STATS`` names, or nowhere if it names none.
    """
    sink = usage_stats_path() if to is None else to
    if sink is None:
        return False
    report = {
        "time": time.time(),
        "usage_context": usage_context,
        "aioshm": _own_version(),
        "python": platform.python_version(),
        "platform": sys.platform,
        "machine": platform.machine(),
        **(stats or {}),
    }
    try:
        if callable(sink):
            sink(report)
        else:
            _append(os.fspath(sink), msgspec.json.encode(report, enc_hook=str) + b"\n")
    except Exception as error:
        _log.warning("the usage report failed: %s", error)
        return False
    return True


def _append(path: str, line: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, line)  # at once, so that lines of several processes do not mix
    finally:
        os.close(fd)


def _own_version() -> str:
    try:
        return version("aioshm")
    except PackageNotFoundError:  # it runs from a source tree
        return "unknown"
