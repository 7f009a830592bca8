"""Pickle, protocol 5: any Python object, with large buffers beside the stream instead of in it."""

from __future__ import annotations

import copyreg
import pickle
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

from aioshm.codec.buffers import OUT_OF_BAND_BYTES, is_loaded, own_copy
from aioshm.codec.frames import MAX_BUFFERS
from aioshm.errors import CodecError

_modules = sys.modules
_loads = pickle.loads
_NONE_LEFT = object()

# dump, clear_memo, chunks, buffers: a plain tuple, because unpacking a named one takes 70 ns longer
_Stream: TypeAlias = tuple[Callable[[Any], None], Callable[[], None], list[bytes], list[memoryview]]


class PickleCodec:
    """Carries whatever pickle does; NumPy arrays, CPU tensors and other large buffers without copies in the stream.

    Every buffer arrives as writable memory of its own. A ``PickleBuffer`` of the caller's arrives as pickle has it: as
    some bytes-like object, and read-only if it showed read-only memory. Decoding can run any code that the sender
    chooses.
    """

    name = "pickle"
    code = 1

    def __init__(self) -> None:
        self._kept: _Stream | None = None
        self._modules_seen = 0

    def encode(self, obj: Any) -> tuple[bytes, Sequence[memoryview]]:
        """Pickle an object.

        Raises:
            CodecError: Pickle, or code of the object that pickle ran, raised an error; it is the cause.
        """
        if len(_modules) != self._modules_seen:
            self._find_reducers()
        # Keeping the pickler saves making one for each message, which costs about as much as pickling a small one. It
        # is out of reach while it works: a __reduce__ that encodes with this codec, and whoever comes after an error,
        # gets a new one.
        stream, self._kept = self._kept or _new_stream(), None
        dump, forget, chunks, buffers = stream
        try:
            dump(obj)
        except Exception as error:
            raise CodecError(f"cannot pickle {type(obj).__qualname__}: {error}") from error
        forget()
        # Pickle writes a large bytes or str apart from what stands around it.
        main = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        chunks.clear()
        if buffers:
            out = tuple(buffers)
            buffers.clear()
            self._kept = stream
            return main, out
        self._kept = stream
        return main, ()

    def decode(self, main: memoryview, buffers: Sequence[memoryview]) -> Any:
        """Unpickle an object.

        Raises:
            CodecError: Pickle, or code that the message made it run, raised an error; it is the cause.
        """
        try:
            if not buffers:
                return _loads(main)
            copies = iter([own_copy(view) for view in buffers])
            obj = _loads(main, buffers=copies)
            if next(copies, _NONE_LEFT) is not _NONE_LEFT:
                raise pickle.UnpicklingError("it has more buffers than it uses")
        except Exception as error:
            # Otherwise the views would live as long as the error does, and the memory could not be unmapped.
            traceback.clear_frames(error.__traceback__)
            del main, buffers
            raise CodecError(f"cannot unpickle a message: {type(error).__name__}: {error}") from error
        return obj

    def _find_reducers(self) -> None:
        """Learn how arrays and tensors travel once the program has imported their libraries, never before."""
        # Both noted first: another thread may be importing, and what it does after this moment is looked at next time.
        seen = len(_modules)
        half_imported = any(_modules.get(name) is not None and not is_loaded(name) for name in ("numpy", "torch"))
        if is_loaded("numpy"):
            from aioshm.codec import arrays

            _reducers.update(arrays.REDUCERS)
        if is_loaded("torch"):
            with suppress(ImportError):  # torch without numpy: then torch pickles its tensors in its own way
                from aioshm.codec import tensors

                _reducers.update(tensors.REDUCERS)
        self._modules_seen = -1 if half_imported else seen
        self._kept = None


class _Reducers(dict[type, Callable[[Any], Any]]):
    """How some exact types are reduced here; all others as everywhere.

    A pickler with a dispatch table of its own does not ask ``copyreg`` any more. Passing the question on, rather than
    starting from a copy, also finds what is registered later.
    """

    __missing__ = copyreg.dispatch_table.__getitem__


_reducers = _Reducers()


@dataclass(frozen=True, slots=True)
class _Sink:
    """The file that a pickler writes to."""

    write: Callable[[bytes], None]


def _new_stream() -> _Stream:
    """Make a pickler, and the lists where it puts what it makes."""
    chunks: list[bytes] = []
    buffers: list[memoryview] = []

    def keep_in_band(buffer: pickle.PickleBuffer) -> bool:
        view = buffer.raw()
        if view.nbytes < OUT_OF_BAND_BYTES or len(buffers) == MAX_BUFFERS:
            return True
        buffers.append(view)
        return False

    pickler = pickle.Pickler(_Sink(chunks.append), 5, buffer_callback=keep_in_band)
    if _reducers:  # an empty table would still slow down every object that has to be reduced
        pickler.dispatch_table = _reducers
    return pickler.dump, pickler.clear_memo, chunks, buffers
