"""A writer and its local readers in one process, attached and ready."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Any

from remotes import ready_ends

from aioshm import MessageQueue


def attached(
    n_reader: int = 1, **arguments: Any
) -> AbstractAsyncContextManager[tuple[MessageQueue, list[MessageQueue]]]:
    """Give a ready writer and its ready readers to the block; the arguments are those of `ready_ends`."""
    return ready_ends(n_reader, 0, **arguments)
