"""The messages between a group and its workers: pickled tuples with three leading ints."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pickletools import genops
from typing import Any, NamedTuple, TypeAlias

from aioshm.codec import PickleCodec, cannot_decode
from aioshm.errors import CodecError, RemoteFailure

MAX_TEXT = 1 << 14
"""Characters of an exception's text, and of its traceback's end, that are sent."""

_HERE = os.path.dirname(__file__)
_INTS = frozenset({"BININT", "BININT1", "BININT2", "LONG1"})

# To the worker
CALL, STREAM, CANCEL, CREDIT, LEAVE = range(5)
# From the worker
RESULT, FAILURE, ITEM = range(5, 8)

Message: TypeAlias = tuple[int, int, int, Any]
"""A kind, the number of a call, ``after``, and a value: a plain tuple, which pickle handles fastest.

A call or stream is answered by one result or failure, after any number of items. With a call of one worker, ``after``
is the number of the last call of all workers that was sent before. The value is the fields of a `Request`, a result, an
item, a `RemoteFailure`, the number of further items wanted (CREDIT), or the ranks that are to exit (LEAVE); an
`Undecodable` where it could not be decoded.
"""


class Request(NamedTuple):
    """A method to call, with its arguments."""

    method: str | Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    prefetch: int = 0
    reply_rank: int | None = None
    after: Mapping[int, int] = {}


class Undecodable(NamedTuple):
    """Stands for a value that could not be decoded."""

    error: CodecError


class MessageCodec(PickleCodec):
    """Pickle, for messages: a message whose value cannot be decoded still names its call."""

    @staticmethod
    def loads(data: bytes) -> Any:
        """Decode a message without buffers."""
        try:
            return PickleCodec.loads(data)
        except Exception as error:
            return _without_value(data, cannot_decode(error))

    def decode(self, main: bytes | memoryview, buffers: Sequence[memoryview]) -> Any:
        """Decode a message."""
        try:
            return super().decode(main, buffers)
        except CodecError as error:
            return _without_value(main, error)


def _without_value(pickled: bytes | memoryview, error: CodecError) -> Message:
    """Read the first three fields, which are ints, from the pickle itself."""
    fields: Iterator[Any] = (argument for opcode, argument, _ in genops(bytes(pickled)) if opcode.name in _INTS)
    kind, call, after = islice(fields, 3)
    return kind, call, after, Undecodable(error)


def method_name(method: object) -> str:
    """Return the name of a method or function for error texts; raise `TypeError` if it is neither."""
    if isinstance(method, str) and method:
        return method
    if not callable(method):
        raise TypeError(f"method must be the name of a method, or a function, not {method!r}")
    return str(getattr(method, "__qualname__", repr(method)))


def failure_of(error: BaseException) -> RemoteFailure:
    """Describe an exception, without the frames of this package that lead to the method."""
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    trace = error.__traceback__
    while trace is not None and os.path.dirname(trace.tb_frame.f_code.co_filename) == _HERE:
        trace = trace.tb_next
    lines = traceback.format_exception(kind, error, trace or error.__traceback__)
    try:
        text = str(error)
    except Exception as broken:
        text = f"its text cannot be told: {type(broken).__name__}"
    return RemoteFailure(name, text[:MAX_TEXT], "".join(lines)[-MAX_TEXT:])
