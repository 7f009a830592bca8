"""The registry of codecs, by name and by code."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Sequence
from typing import Any, NewType, get_origin

from aioshm.arguments import check_plain, shown
from aioshm.codec.base import Codec, Typed
from aioshm.codec.msgpack import MsgpackCodec
from aioshm.codec.pickle5 import PickleCodec
from aioshm.codec.raw import RawCodec

FIRST_FREE_CODE = 16
"""Codes below are aioshm's own."""

_OWN: tuple[type[PickleCodec | RawCodec | MsgpackCodec], ...] = (PickleCodec, RawCodec, MsgpackCodec)
_factories: dict[str, Callable[[], Codec]] = {codec.name: codec for codec in _OWN}
_codes: dict[str, int] = {codec.name: codec.code for codec in _OWN}


def register_codec(name: str, factory: Callable[[], Codec]) -> None:
    """Register a codec by name in this process.

    A handle carries only the name, so do this in every process that has an end of the queue. Registering the same
    factory again changes nothing.

    Args:
        name: The ``name`` of the codecs that the factory makes.
        factory: Called without arguments, once now and once for each end of a queue; a class, for example.

    Raises:
        TypeError: What the factory makes is no codec; the text names what is missing.
        ValueError: The name or the code is taken, or not a codec's to have.
    """
    if not isinstance(name, str) or not name:
        raise TypeError(f"name must be the name of a codec, not {shown(name)}")
    if not callable(factory):
        raise TypeError(f"factory must be what makes a codec, such as its class, not {shown(factory)}")
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
    """Return a new instance of the codec of this name, or the given instance once it has been checked.

    Raises:
        TypeError: This is neither a name nor a codec; the text names what is missing.
        ValueError: There is no codec of this name, or the instance has a name or code that is not its own.
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
    """Return the name of the codec that has a code; the code itself, if none is registered here."""
    return next((name for name, known in _codes.items() if known == code), str(code))


def typed_codec(codec: str | Codec, type: Any) -> Codec:  # noqa: A002  # what MessageQueue calls it
    """Return a codec, from its name or as `get_codec` does, that decodes a type; None: what it decodes by itself.

    A codec that is not `Typed` decodes what was sent, whatever that is: the type is a promise to type checkers then.

    Raises:
        TypeError: This is no codec, or no type, or none that it can decode.
        ValueError: As `get_codec`, or the codec decodes another type.
    """
    own = get_codec(codec)
    if type is None:
        return own
    if not isinstance(type, (builtins.type, NewType)) and get_origin(type) is None and not hasattr(type, "__value__"):
        raise TypeError(f"type must be the type of the messages or None, not {shown(type)}")
    if not isinstance(own, Typed):
        return own
    try:
        return own.of_type(type)
    except TypeError as error:
        raise TypeError(f"type is {shown(type)}, which the codec {own.name!r} cannot decode: {error}") from error


def loads_of(codec: Codec) -> Callable[[bytes], Any]:
    """Return the function that decodes a message without buffers: ``loads``, or ``decode`` in that form."""
    own: Callable[[bytes], Any] | None = getattr(codec, "loads", None)  # `isinstance` takes 40 us for a protocol
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
    name, code = codec.name, codec.code
    if not isinstance(codec, _OWN) and not FIRST_FREE_CODE <= code <= 255:
        raise ValueError(
            f"code of codec {name!r} is {code}, not {FIRST_FREE_CODE} to 255; those below are aioshm's own"
        )
    for other_name, other_code in _codes.items():
        if (name == other_name) != (code == other_code):
            raise ValueError(f"codec {name!r} (code {code}) collides with codec {other_name!r} (code {other_code})")
