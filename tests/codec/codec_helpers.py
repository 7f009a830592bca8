from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def encode(codec: Any, obj: Any) -> tuple[Any, Sequence[memoryview]]:
    """Encode, with the parts of the main part joined; one that is alone is not copied."""
    encoded = codec.encode(obj)
    if type(encoded) is bytes:
        return encoded, ()
    parts, buffers = encoded
    return parts[0] if len(parts) == 1 else b"".join(parts), buffers
