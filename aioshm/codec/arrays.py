"""NumPy arrays on the wire: one block of memory, and its dtype, shape and order. Imports NumPy."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import lru_cache
from pickle import PickleBuffer
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from aioshm.codec.base import Encoded
from aioshm.codec.buffers import OUT_OF_BAND_BYTES
from aioshm.codec.frames import NUMPY, ArrayKind, Order, pack_array_head
from aioshm.errors import CodecError

Array: TypeAlias = npt.NDArray[Any]
Memory: TypeAlias = bytearray | PickleBuffer

# What dtype.str can be for elements without Python objects: more would let a sender choose what np.dtype() does.
_PLAIN_KINDS = "biufcSUVmM"
PLAIN_DTYPE = re.compile(r"[<>|=][biufcSUVmM]\d{1,9}(\[\w{1,20}\])?")


def memory_of(array: Array) -> tuple[Memory, Order]:
    """Return the buffer that pickle stores of an array's elements, and their order."""
    flags = array.flags
    order: Order = "F" if flags.fnc else "C"
    if array.nbytes < OUT_OF_BAND_BYTES:
        # A bytearray arrives as one, so writable; and it takes pickle less time than a buffer that it has to ask about.
        return bytearray(array.tobytes(order)), order
    return _exported(array), order


def _exported(array: Array) -> PickleBuffer:
    """Return the elements in their order; copied only where they are not contiguous."""
    if not array.flags.forc:
        array = array.copy()
    try:
        return PickleBuffer(_exporter(array))
    except ValueError:  # the buffer protocol has no word for some types, dates among them
        return PickleBuffer(_exporter(array.ravel("K").view(np.uint8)))


def _exporter(array: Any) -> Any:
    # Not array.data, because of what `buffers.flat` says. That an array exports its memory, its stubs do not say.
    return array


def reduce_array(array: Array) -> str | tuple[Any, ...]:
    """Reduce an array for pickle: twice as fast as its own reduction when small, and out of band in every layout."""
    dtype = array.dtype
    if dtype.hasobject or not dtype.itemsize:
        return array.__reduce_ex__(5)
    memory, order = memory_of(array)
    # NumPy's singletons are their names; other types (byte order, fields, units, metadata) are more.
    element = dtype.str if dtype.isbuiltin == 1 else dtype
    if not array.flags.writeable and type(memory) is PickleBuffer:
        return _writable_array, (array.shape, element, memory, order)
    if order == "C":
        return np.ndarray, (array.shape, element, memory)
    return np.ndarray, (array.shape, element, memory, 0, None, order)


def _writable_array(shape: tuple[int, ...], element: Any, memory: Any, order: Order) -> Array:
    """Rebuild an array whose source was read-only: pickle wraps new memory in a read-only view."""
    if not isinstance(memory, memoryview):
        return np.ndarray(shape, element, bytearray(memory), 0, None, order)
    owner: Any = memory.obj
    return np.ndarray(shape, element, owner, _address(memory) - _address(owner), None, order)


def _address(memory: Any) -> int:
    address: int = np.ndarray((), np.uint8, memory).__array_interface__["data"][0]
    return address


def lent_array(shape: tuple[int, ...], element: Any, memory: Any, order: Order) -> Array:
    """Stand in for `_writable_array` where memory is lent: it stays as it is, read-only."""
    return np.ndarray(shape, element, memory, 0, None, order)


class _Holder:
    """Shows an array through NumPy's array interface as if it could be written to, and keeps it alive."""

    def __init__(self, array: Array) -> None:
        self._array = array
        self.__array_interface__ = {**array.__array_interface__, "data": (array.__array_interface__["data"][0], False)}


def array_for_torch(shape: tuple[int, ...], dtype: np.dtype[Any], memory: Any, order: Order) -> Array:
    """Lay an array over memory, without a copy, for a tensor: torch knows none that is read-only, and would warn."""
    array: Array = np.ndarray(shape, dtype, memory, 0, None, order)
    if array.flags.writeable:
        return array
    owner = memory.obj if isinstance(memory, memoryview) else None
    address: int | None = getattr(owner, "address", None)
    if address is not None:  # of a lease's mapping, which is writable though this view of it is not
        over: Any = owner
        array = np.ndarray(shape, dtype, over, array.__array_interface__["data"][0] - address, None, order)
    return array if array.flags.writeable else np.asarray(_Holder(array))


# Messages that are one array


def pack(array: Array) -> Encoded | None:
    """Encode an array as a message of its own; None for Python objects, fields, and metadata of the dtype."""
    dtype = array.dtype
    if dtype.kind not in _PLAIN_KINDS or dtype.metadata:  # of others not all can be hashed
        return None
    order: Order = "F" if array.flags.fnc else "C"
    head = _head(dtype, array.shape, order)
    return None if head is None else ((head,), (flat(array),))


def flat(array: Array) -> memoryview:
    """Return the elements as bytes, in their order; copied only where they are not contiguous."""
    return _exported(array).raw()


@lru_cache(256)
def _head(dtype: np.dtype[Any], shape: tuple[int, ...], order: Order) -> bytes | None:
    plain = dtype.fields is None and dtype.subdtype is None and dtype.itemsize and PLAIN_DTYPE.fullmatch(dtype.str)
    return pack_array_head(NUMPY, order, shape, dtype.str) if plain else None


def kind_of(shape: tuple[int, ...], dtype: str, order: Order) -> ArrayKind:
    """Return the array's size, and the function that lays the array over memory."""
    if not PLAIN_DTYPE.fullmatch(dtype):
        raise CodecError(f"damaged array: no dtype {dtype!r}")
    try:
        element = np.dtype(dtype)
    except (TypeError, ValueError) as error:
        raise CodecError(f"damaged array: {error}") from error

    def over(memory: Any) -> Array:
        return np.ndarray(shape, element, memory, 0, None, order)

    return ArrayKind(element.itemsize * math.prod(shape), over)


PACKERS: dict[type, Callable[[Any], Encoded | None]] = {np.ndarray: pack}
REDUCERS: dict[type, Callable[[Any], Any]] = {np.ndarray: reduce_array}
