"""Pickle, protocol 5: any Python object, with large buffers out of band instead of in the stream."""

from __future__ import annotations

import copyreg
import pickle
import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from aioshm.codec.array_heads import is_array, load_libraries, packers, reducers, unpack_message
from aioshm.codec.base import OUT_OF_BAND_BYTES, Encoded, cannot_decode, check_again, is_loaded, own_copy
from aioshm.codec.frames import MAX_BUFFERS
from aioshm.errors import CODE_ERRORS, CodecError, text_of

_modules = sys.modules
_loads = pickle.loads
_NONE_LEFT = object()


class PickleCodec:
    """Carries any object that pickle supports; NumPy arrays, CPU tensors and other large buffers go out of band.

    Every buffer arrives in writable memory of its own. The caller's own ``PickleBuffer`` arrives as with pickle: as
    a bytes-like object, read-only if its memory was read-only. Decoding can run any code that the sender
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
            CodecError: Pickle, or code that the message runs, raised an error, which is the cause.
        """
        try:
            return _decoded(main, buffers, False)
        except CODE_ERRORS as error:
            check_again(error, _decoded, main, buffers, False)
            del main, buffers  # the error must not keep them alive, nor their memory
            raise cannot_decode(error) from error

    def view(self, main: memoryview, buffers: Sequence[memoryview]) -> Any:
        """Unpickle an object in place: large arrays and tensors are views of the buffers.

        Arrays of `OUT_OF_BAND_BYTES` and more, and any ``PickleBuffer``, are read-only. A tensor cannot be read-only:
        writing to it writes to the buffer. Smaller arrays and tensors, and ``bytes`` of any size, are copies.

        Raises:
            CodecError: Pickle, or code that the message runs, raised an error, which is the cause.
        """
        try:
            return _decoded(main, buffers, True)
        except CODE_ERRORS as error:
            check_again(error, _decoded, main, buffers, True)
            del main, buffers
            raise cannot_decode(error) from error


def _decoded(main: bytes | memoryview, buffers: Sequence[Any], in_place: bool) -> Any:
    if not buffers:
        return _loads(main)
    if is_array(main):
        return unpack_message(main, buffers, in_place=in_place)
    memory_of: Callable[[memoryview], Any] = memoryview.toreadonly if in_place else own_copy
    left = map(memory_of, buffers)
    obj = _loads(main, buffers=left)
    if next(left, _NONE_LEFT) is not _NONE_LEFT:
        raise pickle.UnpicklingError("it has more buffers than it uses")
    return obj


class _DispatchTable(dict[type, Callable[[Any], Any]]):
    """The reducers of arrays and tensors, by exact type; ``copyreg`` has those of other types."""

    __missing__ = copyreg.dispatch_table.__getitem__


_dispatch_table = _DispatchTable()


def _load_reducers() -> int:
    """Load the reducers; return the size of `sys.modules`, or -1 while NumPy or torch is being imported."""
    # Read both first: another thread may be importing, and the next call must notice later imports.
    loaded = len(_modules)
    half_imported = any(_modules.get(name) is not None and not is_loaded(name) for name in ("numpy", "torch"))
    load_libraries()
    _dispatch_table.update(reducers)
    return -1 if half_imported else loaded


def _new_encode() -> Callable[[Any], Encoded]:
    """Create the `encode` of one codec: a closure, which is faster than a method."""
    chunks: list[bytes] = []
    buffers: list[memoryview] = []
    sink: Any = SimpleNamespace(write=chunks.append)  # the output file of picklers
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
        pickler = pickle.Pickler(sink, 5, buffer_callback=keep_in_band)
        if _dispatch_table:  # an empty table would slow down every object that must be reduced
            pickler.dispatch_table = _dispatch_table
        return pickler.dump, pickler.clear_memo

    dump, forget = new_pickler()

    def encode(obj: Any) -> Encoded:
        """Pickle an object; `CodecError` if pickle, or code of the object, raises."""
        nonlocal busy, dump, forget, modules_seen
        # One pickler serves all messages, because creating one costs as much as pickling a small message. While it
        # is busy, a __reduce__ that encodes with this codec gets a new pickler.
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
                if not isinstance(error, CODE_ERRORS):
                    raise
                check_again(error, lambda: new_pickler()[0](obj))  # each pickler has a memo
                raise CodecError(f"cannot pickle {type(obj).__qualname__}: {text_of(error) or repr(error)}") from error
            finally:
                chunks.clear()
                buffers.clear()
                dump, forget = new_pickler()
                busy = False
        if chunks or buffers:
            # Pickle writes a large bytes or str in a chunk of its own.
            parts = (*chunks, main)
            taken = tuple(buffers)
            chunks.clear()
            buffers.clear()
            busy = False
            return parts, taken
        busy = False
        return main

    return encode
