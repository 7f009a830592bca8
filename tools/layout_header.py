"""``python -m tools.layout_header``: write the constants of the ring's C code, which are those of the Python code."""

from __future__ import annotations

from pathlib import Path

from aioshm.codec import base
from aioshm.ring import layout, record, reference

HEADER = Path(__file__).parents[1] / "aioshm" / "ring" / "core" / "layout.h"

_LAYOUT = """
WRITER_LINE WRITER_PARKED READERS_PARKED SLOT_HEADER_BYTES CHUNK SIZE OVERFLOW_SIZE CHUNK_HEADER_BYTES SPINNING
BYTES OVERFLOWS LATENCY_NS LATENCY_BUCKETS LATENCY_FIRST_BIT LATENCY_EVERY TRACE_BYTES TRAIL
"""


def constants() -> dict[str, int]:
    """Return the constants of the C code."""
    return {
        **{name: getattr(layout, name) for name in _LAYOUT.split()},
        "OVERFLOW": layout.OVERFLOW_KIND,
        "CHUNK_LISTS": record.CHUNK_LISTS,
        "UNREAD": record.UNREAD,
        "TRACES": record.TRACES,
        "TAKE_MAX": base.HUGE_PAGE_BYTES,
        "COPY_MAX": reference.COPY_MAX,
        "BATCH_LOOKS": reference.BATCH_LOOKS,
        "RUSH_NS": reference.RUSH_NS,
        "HELD_SPIN_NS": reference.HELD_SPIN_NS,
    }


def text() -> str:
    """Return the header."""
    lines = [f"#define {name} {value}" for name, value in constants().items()]
    origin = "/* Written by python -m tools.layout_header: the constants of the Python code, which explains each. */"
    return "\n".join([origin, "", "#ifndef AIOSHM_LAYOUT_H", "#define AIOSHM_LAYOUT_H", "", *lines, "", "#endif", ""])


if __name__ == "__main__":
    HEADER.write_text(text())
