"""NumPy arrays to heads and elements, and back. Imports NumPy."""

from __future__ import annotations

import re
from functools import lru_cache
from pickle import PickleBuffer
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from aioshm.codec.array_heads import NUMPY, ArrayHead, Order, describers, message_head, numbers, packers, reducers
from aioshm.codec.base import Encoded

Array: TypeAlias = npt.NDArray[Any]

# dtype.str of elements without Python objects. With more, a sender could choose what np.dtype() does.
_PLAIN_KINDS = "biufcSUVmM"
_PLAIN_DTYPE = re.compile(rf"[<>|=][{_PLAIN_KINDS}]\d{{1,9}}(\[\w{{1,20}}\])?")


def order_of(array: Array) -> Order:
    """Return the order of `elements`."""
    return "F" if array.flags.fnc else "C"


def elements(array: Array) -> memoryview:
    """Return the elements as bytes; a copy only if they are not contiguous."""
    return exported(array).raw()


def exported(array: Any) -> PickleBuffer:
    """Return the elements as a buffer of the array itself, not of ``array.data``: see `buffers.flat`."""
    if not array.flags.forc:
        array = array.copy()
    try:
        return PickleBuffer(array)
    except ValueError:  # the buffer protocol does not support some types, for example dates
        return PickleBuffer(array.ravel("K").view(np.uint8))


def reduce_array(array: Array) -> str | tuple[Any, ...]:
    """Reduce an array for pickle: out of band in every layout, and writable on arrival."""
    dtype = array.dtype
    if dtype.hasobject or not dtype.itemsize:
        return array.__reduce_ex__(5)
    if not array.flags.writeable:
        array = array.copy("K")  # pickle would wrap the received memory in a read-only view
    element: Any = dtype
    if dtype.isbuiltin == 1:  # a name identifies the type; others have byte order, fields, units or metadata
        element = dtype.str
    return np.ndarray, (array.shape, element, exported(array), 0, None, order_of(array))


def _is_plain(dtype: np.dtype[Any]) -> bool:
    """Return whether a dtype's name says everything; those of ml_dtypes, such as bfloat16, go by names of voids."""
    has_elements = dtype.fields is None and dtype.itemsize > 0
    return has_elements and _PLAIN_DTYPE.fullmatch(dtype.str) is not None and _named(dtype.str) == dtype


def describe(array: Array) -> tuple[ArrayHead, memoryview]:
    """Return an array's head and elements; `TypeError`: the elements are objects, have fields, or have no size."""
    dtype = array.dtype
    if not _is_plain(dtype):
        raise TypeError(f"arrays of dtype {dtype} cannot be encoded")
    return ArrayHead(NUMPY, dtype.str, array.shape, order_of(array)), elements(array)


def pack(array: Array) -> Encoded | None:
    """Encode an array as a message of its own; None for Python objects, fields, and metadata of the dtype."""
    dtype = array.dtype
    if dtype.kind not in _PLAIN_KINDS or dtype.metadata:  # may not be hashable
        return None
    head = _message_head(dtype, array.shape, order_of(array))
    if head is None:
        return None
    return (head,), (elements(array),)


@lru_cache(256)
def _message_head(dtype: np.dtype[Any], shape: tuple[int, ...], order: Order) -> bytes | None:
    if _is_plain(dtype):
        return message_head(ArrayHead(NUMPY, dtype.str, shape, order))
    return None


def rebuild(head: ArrayHead, memory: Any) -> Array:
    """Return an array over memory, without a copy."""
    return np.ndarray(head.shape, _named(head.dtype), memory, 0, None, head.order)


@lru_cache(256)
def _named(name: str) -> np.dtype[Any]:
    if not _PLAIN_DTYPE.fullmatch(name):
        raise ValueError(f"no dtype: {name!r}")
    return np.dtype(name)


class _Writable:
    """Exposes an array through NumPy's array interface as writable, and keeps the array alive."""

    def __init__(self, array: Array) -> None:
        self._array = array
        self.__array_interface__ = {**array.__array_interface__, "data": (array.__array_interface__["data"][0], False)}


def writable(array: Array) -> Array:
    """Return a writable array over the same memory: torch has no read-only tensors, and would warn."""
    return array if array.flags.writeable else np.asarray(_Writable(array))


packers[np.ndarray] = pack
describers[np.ndarray] = describe
reducers[np.ndarray] = reduce_array
numbers.update((np.bool_, np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64))
numbers.update((np.float16, np.float32, np.float64))
