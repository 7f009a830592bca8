"""The protocols of codecs, the error of decoding, and out-of-band buffers."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from pickle import PickleBuffer
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from aioshm.errors import CODE_ERRORS, CodecError, text_of

if TYPE_CHECKING:  # the defaults are for type checkers: a queue or codec without a type is one of Any
    from typing_extensions import TypeVar

    S = TypeVar("S", default=Any)
    T = TypeVar("T", default=Any)
    T_co = TypeVar("T_co", default=Any, covariant=True)
else:
    from typing import TypeVar

    S = TypeVar("S")
    T = TypeVar("T")
    T_co = TypeVar("T_co", covariant=True)

# The message is at fault if encoding or decoding fails so often; otherwise a signal handler raised the error.
TRIES = 3

OUT_OF_BAND_BYTES = 4096
"""Buffers of this size and more are stored outside of the pickle stream; copying smaller ones into it is cheaper."""

HUGE_PAGE_BYTES = 4 * 1024 * 1024
"""From this size on, NumPy asks the kernel for huge pages."""

Encoded: TypeAlias = bytes | tuple[Sequence[bytes | memoryview], Sequence[memoryview]]


class Codec(Protocol[T_co]):
    """Encodes objects into bytes and buffers, and decodes them.

    An instance belongs to one end of one queue and is used by one thread at a time. User code that runs while
    the codec encodes may encode with the same instance.

    These four members are required. A codec may have three more:

    * ``loads(data: bytes)`` decodes a message without buffers, faster than `decode`. The result may keep ``data``. May
      raise any error.
    * ``view(main: memoryview, buffers: Sequence[memoryview])`` decodes in place: arrays, tensors and bytes-like parts
      refer to the arguments, and are read-only if their types allow that. The caller keeps the memory unchanged while
      the result is in use.
    * ``of_type(type)`` returns an equal codec that decodes messages as ``type``, and refuses messages of other types.
      Raises TypeError if this codec cannot decode the type, ValueError if it already decodes another type.

    Attributes:
        name: The name in handles and ``MessageQueue(codec=...)``.
        code: The identification in one byte, for the slot header: 1 to 15 are aioshm's own, 16 to 255 are for users.
    """

    @property
    def name(self) -> str: ...

    @property
    def code(self) -> int: ...

    def encode(self, obj: Any) -> Encoded:
        """Encode an object into a main part and out-of-band buffers.

        Returns:
            Plain ``bytes`` for a main part in one piece without buffers. Otherwise ``(parts, buffers)``: the
            parts, one by one, are the main part. Every view is one-dimensional, C-contiguous and of format
            ``B``. Parts and buffers refer to the caller's own memory and keep it alive: copy them before the memory may
            change.

        Raises:
            CodecError: The object cannot be encoded; the text names its type.
        """

    def decode(self, main: bytes | memoryview, buffers: Sequence[memoryview]) -> T_co:
        """Decode the result of `encode` into an object.

        The result shares no memory with the arguments, and is writable if its types allow that. No error raised here
        keeps the arguments alive: their memory may be reused or unmapped after the call.

        Raises:
            CodecError: These bytes cannot be decoded.
        """


# Errors


def cannot_decode(error: BaseException, codec: str = "pickle") -> CodecError:
    """Return the error for a message that cannot be decoded, with ``error`` as its cause.

    The frames of ``error`` are cleared: their views would keep the memory mapped. A caller with
    views of its own must delete them.
    """
    _clear_frames(error)
    action = "unpickle a message" if codec == "pickle" else f"decode a {codec} message"
    result = CodecError(f"cannot {action}: {type(error).__name__}: {text_of(error)}")
    result.__cause__ = error
    return result


def check_again(error: BaseException, call: Callable[..., object], *arguments: Any) -> None:
    """Raise the error if it does not recur: a signal handler raised it, and the message is sound."""
    for _ in range(TRIES - 1):
        try:
            call(*arguments)
        except CODE_ERRORS:
            continue
        _clear_frames(error)
        raise error


def _clear_frames(error: BaseException) -> None:
    """Clear the frames of an error, its causes and its contexts."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        link = waiting.pop()
        if link is not None and id(link) not in seen:
            seen.add(id(link))
            traceback.clear_frames(link.__traceback__)
            waiting += link.__cause__, link.__context__


# Buffers


def is_loaded(name: str) -> bool:
    """Return whether the program has finished importing the module."""
    module = sys.modules.get(name)
    return module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False)


class OwnMemory:
    """Memory of one received message; decoded objects may refer to it."""

    def may_keep(self, nbytes: int, size: int) -> bool:
        """Return whether a decoded buffer of ``nbytes`` stays in this memory of ``size`` bytes, uncopied."""
        return 2 * nbytes >= size  # a small buffer would keep all of the memory alive


def own_copy(view: memoryview) -> bytearray | memoryview:
    """Return a writable copy of a buffer, or the buffer itself if its `OwnMemory` lets it stay there."""
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
    except TypeError:  # cast refuses structured formats and empty shapes; a PickleBuffer accepts both
        return PickleBuffer(obj).raw()
