"""The tensors that the demo sends: every process computes the same bytes from a message's number, and compares all.

A block is a slice of one long run of random bytes, at a place that its number gives, so that making one costs nothing
and checking one costs a single pass. Compared are bits: of random bytes read as floats many are NaN.
"""

from __future__ import annotations

import random
from typing import Any, Literal

Arrays = Literal["torch", "numpy", "bytes"]

SEED = 6
LINE_BYTES = 64
_PLACES = 16_381  # a prime, so that no simple pattern of numbers meets the same place again soon
_STRIDE = 7_919
_ROW = 128  # elements

_DTYPES = {
    "torch": ("float32", "bfloat16", "int64", "float16", "uint8", "complex64", "float8_e4m3fn"),
    "numpy": ("float32", "int64", "float16", "uint8", "complex64", "int16"),
    "bytes": (),
}


class Blocks:
    """Makes blocks, and says what is wrong with a received one. Imports what it needs, which takes a while.

    Args:
        arrays: What a block is: a torch tensor, a NumPy array, or, where neither is installed, plain bytes.
        max_bytes: The size of the largest block.
    """

    def __init__(self, arrays: Arrays, max_bytes: int) -> None:
        self._arrays = arrays
        self._module: Any = None
        self._pool: Any = random.Random(SEED).randbytes(max_bytes + _PLACES * LINE_BYTES)
        if arrays == "torch":
            import torch

            torch.set_num_threads(1)  # the other cores belong to the other processes
            self._module, self._pool = torch, torch.frombuffer(bytearray(self._pool), dtype=torch.uint8)
        elif arrays == "numpy":
            import numpy as np

            self._module, self._pool = np, np.frombuffer(self._pool, np.uint8)
        self._dtypes = [getattr(self._module, name) for name in _DTYPES[arrays] if hasattr(self._module, name)]

    def make(self, number: int, size: int) -> Any:
        """Return the block of a message, ``size`` bytes in all."""
        start = number * _STRIDE % _PLACES * LINE_BYTES
        block = self._pool[start : start + size]
        return block.view(self._dtypes[number % len(self._dtypes)]).reshape(-1, _ROW) if self._dtypes else block

    def difference(self, number: int, size: int, found: Any) -> str | None:
        """Return what distinguishes ``found`` from the block of a message, or None."""
        wanted = self.make(number, size)
        if type(found) is not type(wanted):
            return f"is of type {type(found).__name__}, not {type(wanted).__name__}"
        if not self._dtypes:
            return None if found == wanted else _first_difference(found, wanted)
        if found.dtype != wanted.dtype:
            return f"has dtype {found.dtype}, not {wanted.dtype}"
        if found.shape != wanted.shape:
            return f"has shape {tuple(found.shape)}, not {tuple(wanted.shape)}"
        if not (found.is_contiguous() if self._arrays == "torch" else found.flags.c_contiguous):
            return "is not contiguous"
        found, wanted = found.view(self._module.int64), wanted.view(self._module.int64)
        if self._arrays == "torch":
            found, wanted = found.numpy(), wanted.numpy()
        return None if (found == wanted).all() else _first_difference(found.tobytes(), wanted.tobytes())


def _first_difference(found: bytes, wanted: bytes) -> str:
    if len(found) != len(wanted):
        return f"has {len(found)} bytes, not {len(wanted)}"
    offset = next(i for i, (one, other) in enumerate(zip(found, wanted, strict=True)) if one != other)
    return f"differs from byte {offset} on"
