"""A writer and its local readers in one process, attached and ready."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
from remotes import ready_ends

from aioshm import MessageQueue

EITHER_PLACE = pytest.mark.parametrize(("n_local", "n_remote"), [(1, 0), (0, 1)], ids=["local", "remote"])
"""For tests of one reader, be it local or remote."""


def attached(
    n_reader: int = 1, **arguments: Any
) -> AbstractAsyncContextManager[tuple[MessageQueue, list[MessageQueue]]]:
    """Give a ready writer and its ready readers to the block; the arguments are those of `ready_ends`."""
    return ready_ends(n_reader, 0, **arguments)
