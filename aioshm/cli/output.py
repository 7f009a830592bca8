"""What commands print in the same way."""

from __future__ import annotations

from typing import Any

import msgspec


def print_json(report: dict[str, Any]) -> None:
    """Print one JSON object, for people to read, too."""
    print(msgspec.json.format(msgspec.json.encode(report), indent=2).decode())


def counted(number: int, what: str) -> str:
    """Return a number of things: ``1 reader``, ``2 readers``."""
    return f"{number} {what}{'' if number == 1 else 's'}"
