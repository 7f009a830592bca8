"""The codec of bytes-like objects, and the registry of codecs by name and code."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Sequence
from typing import Any, NewType, Self, get_origin

from aioshm.arguments import check_plain, shown
from aioshm.codec.base import OUT_OF_BAND_BYTES, Codec, Encoded, flat
from aioshm.codec.msgpack import MsgpackCodec
from aioshm.codec.pickle5 import PickleCodec
from aioshm.errors import CodecError

FIRST_FREE_CODE = 16
"""Codes below are aioshm's own."""


class RawCodec:
    """Carries objects with C-contiguous memory, which arrive as ``bytes``, without type and shape."""

    name = "raw"
    code = 2
    loads = bytes

    def encode(self, obj: Any) -> Encoded:
        """Return a view of a bytes-like object's memory.

        Raises:
            CodecError: The object exposes no C-contiguous memory.
        """
        if type(obj) is bytes:
            return obj
        try:
            contiguous = memoryview(obj).c_contiguous
        except (TypeError, ValueError, BufferError) as error:
            raise CodecError(f"the raw codec carries bytes-like objects, not {type(obj).__qualname__}") from error
        if not contiguous:
            raise CodecError(f"the raw codec cannot carry a {type(obj).__qualname__} that is not C-contiguous")
        memory = flat(obj)
        if len(memory) < OUT_OF_BAND_BYTES:
            return bytes(memory)
        return (memory,), ()

    def decode(self, main: bytes | memoryview, buffers: Sequence[memoryview]) -> bytes:
        """Copy the message.

        Raises:
            CodecError: The message has out-of-band buffers, which this codec never creates.
        """
        _refuse(buffers)
        return bytes(main)

    def of_type(self, type: Any) -> Self:  # noqa: A002
        """Return this codec; its messages are ``bytes``.

        Raises:
            ValueError: ``type`` is not ``bytes``.
        """
        if type is not bytes:
            raise ValueError(f"type must be bytes with the codec 'raw', not {shown(type)}")
        return self

    def view(self, main: memoryview, buffers: Sequence[memoryview]) -> memoryview:
        """Return the message itself, read-only.

        Raises:
            CodecError: The message has out-of-band buffers, which this codec never creates.
        """
        _refuse(buffers)
        return main.toreadonly()


def _refuse(buffers: Sequence[memoryview]) -> None:
    if buffers:
        raise CodecError(f"damaged message: {len(buffers)} buffers with a raw message")


_OWN: tuple[type[PickleCodec | RawCodec | MsgpackCodec], ...] = (PickleCodec, RawCodec, MsgpackCodec)
_factories: dict[str, Callable[[], Codec]] = {codec.name: codec for codec in _OWN}
_codes: dict[str, int] = {codec.name: codec.code for codec in _OWN}


def register_codec(name: str, factory: Callable[[], Codec]) -> None:
    """Register a codec by name in this process.

    A handle contains only the name, so register the codec in every process with an end of the queue. Registering the
    same factory again changes nothing.

    Args:
        name: The ``name`` of the factory's codecs.
        factory: Creates a codec, for example a class. Called without arguments, once now and once per end of a queue.

    Raises:
        TypeError: The factory creates no codec; the text names the missing members.
        ValueError: The name or the code is taken or reserved.
    """
    if not isinstance(name, str) or not name:
        raise TypeError(f"name must be a non-empty str, not {shown(name)}")
    if not callable(factory):
        raise TypeError(f"factory must be a callable that creates a codec, not {shown(factory)}")
    check_plain("factory", factory)
    if _factories.get(name) is factory:
        return
    codec = factory()
    _check_parts(codec)
    if codec.name != name:
        raise ValueError(f"the codec calls itself {codec.name!r}, not {name!r}")
    if name in _codes:
        raise ValueError(f"codec {name!r} (code {codec.code}): {name!r} (code {_codes[name]}) is registered already")
    _check_identity(codec)
    _codes[name] = codec.code
    _factories[name] = factory


def get_codec(codec: str | Codec) -> Codec:
    """Return a new codec of this name, or validate and return the given codec.

    Raises:
        TypeError: Neither a name nor a codec; the text names the missing members.
        ValueError: No codec has this name, or the name or code of the given codec is taken or reserved.
    """
    if isinstance(codec, str):
        factory = _factories.get(codec)
        if factory is None:
            raise ValueError(
                f"codec is {codec!r}, known are {', '.join(sorted(_factories))}; "
                "a third-party codec must be registered with register_codec in every process that uses it"
            )
        return factory()
    _check_parts(codec)
    _check_identity(codec)
    return codec


def name_of_code(code: int) -> str:
    """Return the name of the codec with a code, or the code itself if it is unknown."""
    for name, known in _codes.items():
        if known == code:
            return name
    return str(code)


def typed_codec(codec: str | Codec, type: Any) -> Codec:  # noqa: A002  # what MessageQueue calls it
    """Return `get_codec` of ``codec``, for messages of a type; None: for messages of any type.

    A codec without ``of_type`` does not check messages: the type is only a promise to type checkers then.

    Raises:
        TypeError: Not a codec, not a type, or a type that the codec cannot decode.
        ValueError: As `get_codec`, or the codec decodes another type.
    """
    own = get_codec(codec)
    if type is None:
        return own
    if not isinstance(type, (builtins.type, NewType)) and get_origin(type) is None and not hasattr(type, "__value__"):
        raise TypeError(f"type must be the type of the messages or None, not {shown(type)}")
    of_type: Callable[[Any], Codec] | None = getattr(own, "of_type", None)
    if of_type is None:
        return own
    try:
        return of_type(type)
    except TypeError as error:
        raise TypeError(f"type is {shown(type)}, which the codec {own.name!r} cannot decode: {error}") from error


def loads_of(codec: Codec) -> Callable[[bytes], Any]:
    """Return the function that decodes a message without buffers: ``loads``, or a wrapper of ``decode``."""
    own: Callable[[bytes], Any] | None = getattr(codec, "loads", None)  # `isinstance` is slow for a protocol
    if own is not None:
        return own
    decode = codec.decode

    def loads(data: bytes) -> Any:
        return decode(data, ())

    return loads


def view_of(codec: Codec) -> Callable[[memoryview, Sequence[memoryview]], Any]:
    """Return the function that decodes a message in place: the codec's ``view``, or its ``decode``, which copies."""
    own: Callable[[memoryview, Sequence[memoryview]], Any] = getattr(codec, "view", codec.decode)
    return own


def _check_parts(codec: Codec) -> None:
    if isinstance(codec, type):
        raise TypeError(f"codec is the class {codec.__qualname__}, not an instance of it")
    missing = [part for part in ("name", "code", "encode", "decode") if not hasattr(codec, part)]
    if missing:
        raise TypeError(f"codec is a {type(codec).__qualname__}, which has no {', '.join(missing)}")
    for part in ("encode", "decode", "loads", "view"):
        if not callable(getattr(codec, part, len)):
            raise TypeError(f"{part} of codec {type(codec).__qualname__} cannot be called")
    if type(codec.name) is not str or not codec.name:
        raise TypeError(f"name of codec {type(codec).__qualname__} is {codec.name!r}, not a text")
    if type(codec.code) is not int:
        raise TypeError(f"code of codec {codec.name!r} is {codec.code!r}, not an int")


def _check_identity(codec: Codec) -> None:
    name = codec.name
    code = codec.code
    if not isinstance(codec, _OWN) and not FIRST_FREE_CODE <= code <= 255:
        raise ValueError(
            f"code of codec {name!r} is {code}, not {FIRST_FREE_CODE} to 255; lower codes are aioshm's own"
        )
    for other_name, other_code in _codes.items():
        if (name == other_name) != (code == other_code):
            raise ValueError(f"codec {name!r} (code {code}) collides with codec {other_name!r} (code {other_code})")
