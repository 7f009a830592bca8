"""The tensors that the demo sends: every process computes the same bytes from a message's number, and compares all.

A block is a slice of one long run of random bytes, at a place that its number gives, so that making one costs nothing
and checking one costs a single pass. Compared are bits: of random bytes read as floats many are NaN.
"""

from __future__ import annotations

import random
from typing import Any, Protocol

from aioshm.cli.demo.orders import Arrays

SEED = 6
LINE_BYTES = 64
_PLACES = 16_381  # a prime, so that no simple pattern of numbers meets the same place again soon
_STRIDE = 7_919
_ROW = 128  # elements

_NUMPY_DTYPES = ("float32", "int64", "float16", "uint8", "complex64", "int16")
_TORCH_DTYPES = ("float32", "bfloat16", "int64", "float16", "uint8", "complex64", "float8_e4m3fn")


class Blocks(Protocol):
    """Makes blocks, and says what is wrong with a received one."""

    def make(self, number: int, size: int) -> Any:
        """Return the block of a message, ``size`` bytes in all."""

    def difference(self, number: int, size: int, found: Any) -> str | None:
        """Return what distinguishes ``found`` from the block of a message, or None."""


def make_blocks(arrays: Arrays, max_bytes: int) -> Blocks:
    """Return the maker of blocks of up to ``max_bytes``. Imports what it needs, which takes a while."""
    pool = random.Random(SEED).randbytes(max_bytes + _PLACES * LINE_BYTES)
    if arrays == "torch":
        return TorchBlocks(pool)
    if arrays == "numpy":
        return NumpyBlocks(pool)
    return BytesBlocks(pool)


class BytesBlocks:
    """Blocks of plain bytes, for where there is neither NumPy nor torch."""

    def __init__(self, pool: bytes) -> None:
        self._pool = pool

    def make(self, number: int, size: int) -> bytes:
        start = _start(number)
        return self._pool[start : start + size]

    def difference(self, number: int, size: int, found: Any) -> str | None:
        if not isinstance(found, bytes):
            return f"is of type {type(found).__name__}, not bytes"
        if len(found) != size:
            return f"has {len(found)} bytes, not {size}"
        wanted = self.make(number, size)
        if found == wanted:
            return None
        return _first_difference(next(i for i in range(size) if found[i] != wanted[i]))


class NumpyBlocks:
    """Blocks as NumPy arrays."""

    def __init__(self, pool: bytes) -> None:
        import numpy as np

        self._np = np
        self._pool = np.frombuffer(pool, np.uint8)

    def make(self, number: int, size: int) -> Any:
        start = _start(number)
        dtype = _NUMPY_DTYPES[number % len(_NUMPY_DTYPES)]
        return self._pool[start : start + size].view(dtype).reshape(-1, _ROW)

    def difference(self, number: int, size: int, found: Any) -> str | None:
        wanted = self.make(number, size)
        if (wrong := _wrong_form(wanted, found)) is not None:
            return wrong
        if not found.flags.c_contiguous:
            return "is not contiguous"
        if self._np.array_equal(found.view("uint64"), wanted.view("uint64")):
            return None
        return _first_difference(int((found.view("uint8") != wanted.view("uint8")).reshape(-1).argmax()))


class TorchBlocks:
    """Blocks as torch tensors."""

    def __init__(self, pool: bytes) -> None:
        import torch

        torch.set_num_threads(1)  # the other cores belong to the other processes
        self._torch = torch
        self._pool = torch.frombuffer(bytearray(pool), dtype=torch.uint8)
        self._dtypes = [getattr(torch, name) for name in _TORCH_DTYPES if hasattr(torch, name)]

    def make(self, number: int, size: int) -> Any:
        start = _start(number)
        dtype = self._dtypes[number % len(self._dtypes)]
        return self._pool[start : start + size].view(dtype).view(-1, _ROW)

    def difference(self, number: int, size: int, found: Any) -> str | None:
        torch, wanted = self._torch, self.make(number, size)
        if (wrong := _wrong_form(wanted, found)) is not None:
            return wrong
        if not found.is_contiguous():
            return "is not contiguous"
        if torch.equal(found.view(torch.int64), wanted.view(torch.int64)):
            return None
        differs = found.view(torch.uint8) != wanted.view(torch.uint8)
        return _first_difference(int(differs.flatten().nonzero()[0]))


def _start(number: int) -> int:
    return number * _STRIDE % _PLACES * LINE_BYTES


def _wrong_form(wanted: Any, found: Any) -> str | None:
    if type(found) is not type(wanted):
        return f"is of type {type(found).__name__}, not {type(wanted).__name__}"
    if found.dtype != wanted.dtype:
        return f"has dtype {found.dtype}, not {wanted.dtype}"
    if found.shape != wanted.shape:
        return f"has shape {tuple(found.shape)}, not {tuple(wanted.shape)}"
    return None


def _first_difference(offset: int) -> str:
    return f"differs from byte {offset} on"
