"""The calls of a reader that return one message, and messages that do something while they are decoded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from aioshm import MessageQueue

_amid: list[Callable[[], Any]] = []


async def dequeue(reader: MessageQueue, **limits: Any) -> Any:
    return await reader.dequeue(**limits)


async def dequeue_many(reader: MessageQueue, **limits: Any) -> Any:
    return (await reader.dequeue_many(1, **limits))[0]


async def dequeue_nowait(reader: MessageQueue, **_limits: Any) -> Any:
    return reader.dequeue_nowait()


async def lease(reader: MessageQueue, **limits: Any) -> Any:
    async with reader.lease(**limits) as message:
        return message


async def acquire_read(reader: MessageQueue, **limits: Any) -> Any:
    async with reader.acquire_read(**limits) as view:
        return bytes(view)


class Decoded:
    """A message that makes the call of `while_decoding`; then it is the text "decoded", or cannot be decoded."""

    def __init__(self, *, fails: bool = False, size: int = 0) -> None:
        self._arguments = fails, bytes(size)

    def __reduce__(self) -> Any:
        return _decode, self._arguments


def _decode(fails: bool, _ballast: bytes) -> str:
    for call in _amid:
        call()
    if fails:
        raise LookupError("boom")
    return "decoded"


@contextmanager
def while_decoding(call: Callable[[], Any]) -> Iterator[None]:
    """Let a call be made whenever a `Decoded` is decoded during the block."""
    _amid.append(call)
    try:
        yield
    finally:
        _amid.clear()
