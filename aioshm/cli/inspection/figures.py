"""How figures are written, and the JSON that every command of this kind prints."""

from __future__ import annotations

from typing import Any, Final

import msgspec

JSON_VERSION: Final = 1
"""Of the shape of what ``--json`` prints; see docs/howto/inspection.md. What is added does not change it."""

NONE: Final = "-"


def report(**content: Any) -> dict[str, Any]:
    """Return what ``--json`` prints."""
    return {"version": JSON_VERSION, **{name: msgspec.to_builtins(value) for name, value in content.items()}}


def count(number: float) -> str:
    """Return a number of things, short: ``999``, ``12.3k``, ``4.56M``."""
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= unit * 10 or (abs(number) >= unit and unit > 1e3):
            return f"{number / unit:.3g}{name}"
    return f"{number:.0f}"


def size(nbytes: float) -> str:
    """Return a number of bytes: ``512 B``, ``4.7 MiB``."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.1f} {name}"
    return f"{nbytes:.0f} B"


def duration(seconds: float | None) -> str:
    """Return a time: ``870 ns``, ``12 us``, ``3.4 ms``, ``5.6 s``, ``12 min``, ``3.4 h``, ``5.6 d``."""
    if seconds is None:
        return NONE
    for unit, name in ((86400 * 2, "d"), (7200, "h"), (120, "min")):
        if seconds >= unit:
            return f"{seconds / {'d': 86400, 'h': 3600, 'min': 60}[name]:.3g} {name}"
    for least, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= least:
            return f"{seconds / least:.3g} {name}"
    return f"{seconds * 1e9:.0f} ns"


def share(part: float | None) -> str:
    """Return a share: ``12%``."""
    return NONE if part is None else f"{part * 100:.0f}%"
