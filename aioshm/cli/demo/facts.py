"""What the demo says about itself and the machine, and how."""

from __future__ import annotations

import platform
from typing import Any

import msgspec

import aioshm
from aioshm.wait.cpus import usable_cpus


def machine_facts(loop: str) -> dict[str, Any]:
    """Return where the figures come from; ``loop`` is the event loop's name."""
    return {
        "aioshm": aioshm.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "native_core": aioshm.native_core,
        "usable_cpus": usable_cpus(),
        "loop": loop,
    }


def counted(number: int, what: str) -> str:
    """Return a number of things: ``1 reader``, ``2 readers``."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def print_json(report: dict[str, Any]) -> None:
    """Print one JSON object."""
    print(msgspec.json.format(msgspec.json.encode(report), indent=2).decode())
