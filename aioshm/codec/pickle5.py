"""Pickle, protocol 5: any Python object, with large buffers beside the stream instead of in it."""

from __future__ import annotations

import copyreg
import pickle
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from aioshm.codec.array_heads import is_array, load_libraries, packers, reducers, unpack_message
from aioshm.codec.base import Encoded, cannot_decode, check_again
from aioshm.codec.buffers import OUT_OF_BAND_BYTES, is_loaded, own_copy
from aioshm.codec.frames import MAX_BUFFERS
from aioshm.errors import CodecError

_modules = sys.modules
_loads = pickle.loads
_NONE_LEFT = object()


class PickleCodec:
    """Carries whatever pickle does; NumPy arrays, CPU tensors and other large buffers without copies in the stream.

    Every buffer arrives as writable memory of its own. A ``PickleBuffer`` of the caller's arrives as pickle has it: as
    some bytes-like object, and read-only if it showed read-only memory. Decoding can run any code that the sender
    chooses.
    """

    name = "pickle"
    code = 1
    loads: staticmethod[..., Any] = staticmethod(pickle.loads)

    def __init__(self) -> None:
        self.encode: Callable[[Any], Encoded] = _new_encode()

    def decode(self, main: bytes | memoryview, buffers: Sequence[memoryview]) -> Any:
        """Unpickle an object.

        Raises:
            CodecError: Pickle, or code that the message made it run, raised an error; it is the cause.
        """
        try:
            return _decoded(main, buffers)
        except Exception as error:
            check_again(error, _decoded, main, buffers)
            del main, buffers  # the error shall not keep them alive, nor the memory that they show
            raise cannot_decode(error) from error

    def view(self, main: memoryview, buffers: Sequence[memoryview]) -> Any:
        """Unpickle an object whose large buffers stay where they are.

        Arrays of `OUT_OF_BAND_BYTES` and more, and what was a ``PickleBuffer``, are read-only. A tensor cannot be: what
        is written to it is written to the memory. Smaller ones, and ``bytes`` of any size, are copies.

        Raises:
            CodecError: Pickle, or code that the message made it run, raised an error; it is the cause.
        """
        try:
            return _seen(main, buffers)
        except Exception as error:
            check_again(error, _seen, main, buffers)
            del main, buffers
            raise cannot_decode(error) from error


def _decoded(main: bytes | memoryview, buffers: Sequence[memoryview]) -> Any:
    if not buffers:
        return _loads(main)
    if is_array(main):
        return unpack_message(main, buffers, show=False)
    return _with_buffers(main, [own_copy(view) for view in buffers])


def _seen(main: memoryview, buffers: Sequence[memoryview]) -> Any:
    if not buffers:
        return _loads(main)
    if is_array(main):
        return unpack_message(main, buffers, show=True)
    return _with_buffers(main, buffers)


def _with_buffers(main: bytes | memoryview, buffers: Sequence[Any]) -> Any:
    left = iter(buffers)
    obj = _loads(main, buffers=left)
    if next(left, _NONE_LEFT) is not _NONE_LEFT:
        raise pickle.UnpicklingError("it has more buffers than it uses")
    return obj


class _DispatchTable(dict[type, Callable[[Any], Any]]):
    """The reducers of arrays and tensors, by exact type; all others are pickle's own.

    A pickler with a dispatch table of its own does not ask ``copyreg`` any more. Passing the question on, rather than
    starting from a copy, also finds what is registered later.
    """

    __missing__ = copyreg.dispatch_table.__getitem__


_dispatch_table = _DispatchTable()


def _load_reducers() -> int:
    """Load the reducers of arrays and tensors once the program has imported their libraries, never before.

    Returns:
        The number of modules that there were; -1 if one of these two was still being imported.
    """
    # Both noted first: another thread may be importing, and what it does after this moment is looked at next time.
    seen = len(_modules)
    half_imported = any(_modules.get(name) is not None and not is_loaded(name) for name in ("numpy", "torch"))
    load_libraries()
    _dispatch_table.update(reducers)
    return -1 if half_imported else seen


@dataclass(frozen=True, slots=True)
class _Sink:
    """The file that a pickler writes to."""

    write: Callable[[bytes], None]


def _new_encode() -> Callable[[Any], Encoded]:
    """Make the function that pickles for one codec: a closure, which takes 60 ns less than a method."""
    chunks: list[bytes] = []
    buffers: list[memoryview] = []
    take_chunk = chunks.pop
    modules_seen = -1
    busy = False

    def keep_in_band(buffer: pickle.PickleBuffer) -> bool:
        view = buffer.raw()
        if view.nbytes < OUT_OF_BAND_BYTES or len(buffers) == MAX_BUFFERS:
            return True
        buffers.append(view)
        return False

    def new_pickler() -> tuple[Callable[[Any], None], Callable[[], None]]:
        pickler = pickle.Pickler(_Sink(chunks.append), 5, buffer_callback=keep_in_band)
        if _dispatch_table:  # an empty table would still slow down every object that has to be reduced
            pickler.dispatch_table = _dispatch_table
        return pickler.dump, pickler.clear_memo

    dump, forget = new_pickler()

    def encode(obj: Any) -> Encoded:
        """Pickle an object.

        Raises:
            CodecError: Pickle, or code of the object that pickle ran, raised an error; it is the cause.
        """
        nonlocal busy, dump, forget, modules_seen
        # Keeping the pickler saves making one for each message, which costs about as much as pickling a small one. It
        # is out of reach while it works: a __reduce__ that encodes with this codec gets a new one.
        if busy:
            return _new_encode()(obj)
        if len(_modules) != modules_seen:
            modules_seen = _load_reducers()
            dump, forget = new_pickler()
        kind = type(obj)
        if kind in packers and (message := packers[kind](obj)) is not None:
            return message
        busy = True
        try:
            dump(obj)
            forget()
            main = take_chunk()
        except BaseException as error:
            try:
                if not isinstance(error, Exception):
                    raise
                check_again(error, lambda: new_pickler()[0](obj))  # each remembers what it has seen
                raise CodecError(f"cannot pickle {type(obj).__qualname__}: {error}") from error
            finally:
                chunks.clear()
                buffers.clear()
                dump, forget = new_pickler()
                busy = False
        if chunks or buffers:
            # Pickle writes a large bytes or str apart from what stands around it.
            parts, beside = (*chunks, main), tuple(buffers)
            chunks.clear()
            buffers.clear()
            busy = False
            return parts, beside
        busy = False
        return main

    return encode
