"""The protocol of codecs, and the error of decoding."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeAlias, runtime_checkable

from aioshm.errors import CodecError

if TYPE_CHECKING:  # the defaults are for type checkers: a queue, or a codec, of no type in particular is one of Any
    from typing_extensions import TypeVar

    S = TypeVar("S", default=Any)
    T = TypeVar("T", default=Any)
    T_co = TypeVar("T_co", default=Any, covariant=True)
else:
    from typing import TypeVar

    S = TypeVar("S")
    T = TypeVar("T")
    T_co = TypeVar("T_co", covariant=True)

TRIES = 3
"""An error of encoding or decoding counts as the message's fault if it comes so often."""

Encoded: TypeAlias = bytes | tuple[Sequence[bytes | memoryview], Sequence[memoryview]]


class Codec(Protocol[T_co]):
    """Encodes objects into bytes and buffers, and decodes them.

    An instance belongs to one end of one queue and is used by one thread at a time. It may be entered again while it
    is encoding: user code that runs then can encode something of its own.

    These four are required. `Loads`, `Views` and `Typed` are optional; `loads_of`, `view_of` and `typed_codec` make up
    for them.

    Attributes:
        name: What a handle and ``MessageQueue(codec=...)`` call it.
        code: The same in one byte, for the slot header: 1 to 15 are aioshm's own, 16 to 255 are for others.
    """

    @property
    def name(self) -> str: ...

    @property
    def code(self) -> int: ...

    def encode(self, obj: Any) -> Encoded:
        """Turn an object into a main part and out-of-band buffers.

        Returns:
            Plain ``bytes`` for a main part in one piece with nothing beside it. Otherwise ``(parts, buffers)``: the
            parts, one after the other, are the main part. Every view is one-dimensional, C-contiguous and of format
            ``B``. Parts and buffers show the caller's own memory and keep it alive: copy them before that may change.

        Raises:
            CodecError: The object cannot be encoded; the text names its type.
        """

    def decode(self, main: bytes | memoryview, buffers: Sequence[memoryview]) -> T_co:
        """Turn what `encode` returned into an object.

        The result shares no memory with the arguments, can be written to where its types allow that, and no error that
        this raises holds on to the arguments: the memory may be reused or unmapped as soon as the call is over.

        Raises:
            CodecError: These bytes cannot be decoded.
        """


@runtime_checkable
class Loads(Protocol):
    """A codec with a short cut for messages without buffers."""

    @property
    def loads(self) -> Callable[[bytes], Any]:
        """Decode a message that has no buffers, from bytes of its own that the result may keep.

        May raise anything; the caller turns that into a `CodecError` with `cannot_decode`.
        """


@runtime_checkable
class Views(Protocol):
    """A codec that can decode in place, zero-copy."""

    def view(self, main: memoryview, buffers: Sequence[memoryview]) -> Any:
        """Decode without copying: arrays, tensors and bytes-like parts point into the given memory.

        They are read-only where their types allow that. The caller passes read-only views of memory that may be
        written to all the same (by tensors), and keeps it as it is for as long as the result is in use.

        Raises:
            CodecError: These bytes cannot be decoded.
        """


@runtime_checkable
class Typed(Protocol):
    """A codec that can check, as it decodes, that messages are of a type."""

    def of_type(self, type: Any) -> Self:  # noqa: A002  # as everywhere else
        """Return a codec like this one that decodes messages as ``type``, and refuses those that are of another.

        Raises:
            TypeError: It cannot decode this type.
            ValueError: It decodes another one already.
        """


def cannot_decode(error: Exception, codec: str = "pickle") -> CodecError:
    """Return the error of a message that cannot be decoded; ``error`` is its cause.

    The frames that ``error`` came through are cleared: otherwise the views in them would live as long as the error
    does, and the memory could not be unmapped. A caller that was given views lets go of them itself.

    Args:
        error: What `Codec.decode`'s own means, or `Loads.loads`, raised.
        codec: The name of the codec, for the text.
    """
    _clear_frames(error)
    what = "unpickle a message" if codec == "pickle" else f"decode a {codec} message"
    result = CodecError(f"cannot {what}: {type(error).__name__}: {error}")
    result.__cause__ = error
    return result


def check_again(error: Exception, call: Callable[..., object], *arguments: Any) -> None:
    """Raise the error if it does not recur: a signal handler raised it, the message is sound."""
    for _ in range(TRIES - 1):
        try:
            call(*arguments)
        except Exception:
            continue
        _clear_frames(error)
        raise error


def _clear_frames(error: BaseException) -> None:
    """Clear the frames that an error, its causes and its contexts came through."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        link = waiting.pop()
        if link is not None and id(link) not in seen:
            seen.add(id(link))
            traceback.clear_frames(link.__traceback__)
            waiting += link.__cause__, link.__context__
