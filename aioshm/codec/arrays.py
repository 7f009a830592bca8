"""NumPy arrays on the wire: one block of memory, and its dtype, shape and order. Imports NumPy."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pickle import PickleBuffer
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from aioshm.codec.buffers import OUT_OF_BAND_BYTES

Array: TypeAlias = npt.NDArray[Any]
Order: TypeAlias = Literal["C", "F"]
Memory: TypeAlias = bytearray | PickleBuffer


def memory_of(array: Array) -> tuple[Memory, Order]:
    """Return the buffer that pickle stores of an array without objects in it, and the order of its elements.

    Only the elements that the array shows, however large the memory is that it is a view of. A large array that is
    contiguous in either order is not copied.
    """
    flags = array.flags
    order: Order = "F" if flags.fnc else "C"
    if array.nbytes < OUT_OF_BAND_BYTES:
        # A bytearray arrives as one, so writable; and it takes pickle less time than a buffer that it has to ask about.
        return bytearray(array.tobytes(order)), order
    if not flags.forc:
        array = array.copy(order)
    try:
        return PickleBuffer(_exporter(array)), order
    except ValueError:  # the buffer protocol has no word for some types, dates among them
        return PickleBuffer(_exporter(array.ravel("K").view(np.uint8))), order


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


class _Beside:
    """Is pickled as an array would be that is contiguous, can be written to, and is large enough to go out of band."""

    def __init__(self, array: Array) -> None:
        self._of = array.shape, array.dtype.str

    def __reduce__(self) -> tuple[Any, ...]:
        return np.ndarray, (*self._of, PickleBuffer(bytearray()))


def main_part(array: Array) -> bytes:
    """Return what the pickle stream says of an array of a built-in type whose memory is beside it, however small."""
    return pickle.dumps(_Beside(array), 5, buffer_callback=_leave_out)


def _leave_out(_: PickleBuffer) -> bool:
    return False


def _writable_array(shape: tuple[int, ...], element: Any, memory: Any, order: Order) -> Array:
    """Rebuild what was read-only where it came from: pickle wraps the memory, although new, in a read-only view."""
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
    return array if array.flags.writeable else np.asarray(_Holder(array))


REDUCERS: dict[type, Callable[[Any], Any]] = {np.ndarray: reduce_array}
