"""The messages between a group and its workers, pickled tuples with three leading ints; and their connections."""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
import struct
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pickletools import genops
from typing import Any, NamedTuple, TypeAlias

from aioshm.codec import PickleCodec, cannot_decode
from aioshm.errors import CodecError, RemoteFailure

MAX_TEXT = 1 << 14
"""Characters of an exception's text, and of its traceback's end, that are sent."""

_LENGTH = struct.Struct("!Q")
_HERE = os.path.dirname(__file__)
_INTS = frozenset({"BININT", "BININT1", "BININT2", "LONG1"})

# To the worker
CALL, STREAM, CANCEL, CREDIT = range(4)
# From the worker
RESULT, FAILURE, ITEM = range(4, 7)

Message: TypeAlias = tuple[int, int, int, Any]
"""A kind, the number of a call, ``after``, and a value: a plain tuple, which pickle handles fastest.

A worker answers a call or stream by one result or failure, after any number of items. In a call of one worker,
``after`` is the number of the last call of all workers that was sent before. The value is the fields of a `Request`, a
result, an item, a `RemoteFailure`, or the number of further items wanted (CREDIT); an `Undecodable` if the value cannot
be decoded.
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
        try:
            return PickleCodec.loads(data)
        except Exception as error:
            return _without_value(data, cannot_decode(error))

    def decode(self, main: bytes | memoryview, buffers: Sequence[memoryview]) -> Any:
        try:
            return super().decode(main, buffers)
        except CodecError as error:
            return _without_value(main, error)


def _without_value(pickled: bytes | memoryview, error: CodecError) -> Message:
    """Read the first three fields, all ints, from the pickle's opcodes."""
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
    name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
    trace = error.__traceback__
    while trace is not None and os.path.dirname(trace.tb_frame.f_code.co_filename) == _HERE:
        trace = trace.tb_next
    lines = traceback.format_exception(kind, error, trace or error.__traceback__)
    try:
        text = str(error)
    except Exception as broken:
        text = f"the text is not available: {type(broken).__name__}"
    return RemoteFailure(name, text[:MAX_TEXT], "".join(lines)[-MAX_TEXT:])


class ControlSocket:
    """Sends and receives pickled messages of any size over a stream socket, without blocking the loop.

    Every method raises EOFError or OSError if the peer has exited, or if either end is closed. A cancelled call may
    leave a part of a message behind: close the socket then.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._forgotten = weakref.finalize(self, sock.close)  # no second warning: an unclosed group gives one

    async def send(self, message: object) -> None:
        data = pickle.dumps(message)
        await asyncio.get_running_loop().sock_sendall(self._socket, _LENGTH.pack(len(data)) + data)

    async def receive(self) -> Any:
        (length,) = _LENGTH.unpack(await self._receive(_LENGTH.size))
        return pickle.loads(await self._receive(length))

    async def _receive(self, n_bytes: int) -> bytearray:
        received = bytearray(n_bytes)
        missing = memoryview(received)
        while missing:
            n_received = await asyncio.get_running_loop().sock_recv_into(self._socket, missing)
            if not n_received:
                raise EOFError("the peer has closed its end")
            missing = missing[n_received:]
        return received

    def close(self) -> None:
        """Close the socket, on its loop or without a running loop. Cancel waiting tasks first. Idempotent."""
        if self._socket.fileno() >= 0:
            loop = asyncio._get_running_loop()
            if loop is not None:
                loop.remove_reader(self._socket)
                loop.remove_writer(self._socket)
            self._forgotten()
