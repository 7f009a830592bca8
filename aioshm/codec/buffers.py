"""Out-of-band buffers: which blocks of memory travel beside a message, and what they arrive in."""

from __future__ import annotations

import sys
from pickle import PickleBuffer
from typing import Any

OUT_OF_BAND_BYTES = 4096
"""From this size on, a buffer travels beside the pickle stream; below, copying it into the stream costs less."""

HUGE_PAGE_BYTES = 4 * 1024 * 1024
"""From this size on, NumPy asks the kernel for huge pages."""


def is_loaded(name: str) -> bool:
    """Return whether the program has finished importing the module.

    One that is still being imported, perhaps by another thread, does not count: importing it too would wait for that.
    """
    module = sys.modules.get(name)
    return module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False)


class OwnMemory:
    """Base of memory that belongs to one received message: whoever decodes the message may keep views of it."""


def own_copy(view: memoryview) -> bytearray | memoryview:
    """Copy a buffer into writable memory of its own; a buffer that is most of its `OwnMemory` stays there.

    Where messages are dropped about as fast as they come, malloc hands out warm memory, and a ``bytearray`` is as fast
    as anything. Where they pile up, and always beyond malloc's greatest mmap threshold of 32 MiB, each page is touched
    for the first time, at many times the cost of the copy; NumPy's huge pages make that 3 to 5 times cheaper.
    """
    if view.nbytes < HUGE_PAGE_BYTES or not is_loaded("numpy"):
        return bytearray(view)
    if isinstance(view.obj, OwnMemory) and not view.readonly and 2 * view.nbytes >= memoryview(view.obj).nbytes:
        return view
    import numpy as np

    fresh = np.empty(view.nbytes, np.uint8).data
    fresh[:] = view
    return fresh


def flat(obj: Any) -> memoryview:
    """Return a view of C-contiguous memory, of any shape and type, as plain bytes.

    A memoryview is cast, not exported: CPython (3.11 at least) crashes when its collector frees a cycle in which one
    memoryview exports to another, and a message on its way may well hang in the cycle of an error and its frames.
    """
    try:
        return memoryview(obj).cast("B")
    except TypeError:  # cast refuses structured formats and empty shapes; a PickleBuffer shows both
        return PickleBuffer(obj).raw()
