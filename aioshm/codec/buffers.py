"""Out-of-band buffers: the choice of buffers, and the memory that receives them."""

from __future__ import annotations

import sys
from pickle import PickleBuffer
from typing import Any

OUT_OF_BAND_BYTES = 4096
"""From this size on, a buffer travels beside the pickle stream; below, copying it into the stream costs less."""

HUGE_PAGE_BYTES = 4 * 1024 * 1024
"""From this size on, NumPy asks the kernel for huge pages."""


def is_loaded(name: str) -> bool:
    """Return whether the program has finished importing the module."""
    module = sys.modules.get(name)
    return module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False)


class OwnMemory:
    """Memory of one received message, of which the decoder may keep views."""

    def may_keep(self, nbytes: int, size: int) -> bool:
        """Return whether a decoded buffer of ``nbytes`` stays here, in ``size`` bytes, instead of being copied."""
        return 2 * nbytes >= size  # a small buffer would keep all of the memory


def own_copy(view: memoryview) -> bytearray | memoryview:
    """Copy a buffer into writable memory; a buffer that its `OwnMemory` may keep stays there."""
    if view.nbytes < HUGE_PAGE_BYTES or not is_loaded("numpy"):
        return bytearray(view)
    memory = view.obj
    if isinstance(memory, OwnMemory) and not view.readonly and memory.may_keep(view.nbytes, memoryview(memory).nbytes):
        return view
    import numpy as np

    fresh = np.empty(view.nbytes, np.uint8).data
    fresh[:] = view
    return fresh


def flat(obj: Any) -> memoryview:
    """Return C-contiguous memory as plain bytes, by a cast (platform notes: garbage collector)."""
    try:
        return memoryview(obj).cast("B")
    except TypeError:  # cast refuses structured formats and empty shapes; a PickleBuffer shows both
        return PickleBuffer(obj).raw()
