"""Calls of the engine's methods by clients."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, cast, get_type_hints

import msgspec

from aioshm.engine.protocol.messages import UtilityOutput
from aioshm.errors import CodecError
from aioshm.process import progress
from aioshm.process.progress import BUSY

if TYPE_CHECKING:
    from aioshm.engine.core.core import EngineCore

logger: logging.Logger = logging.getLogger("aioshm.engine")

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_NOT_TO_BE_CALLED = frozenset({"initialize", "add_request", "abort_requests", "step", "shutdown"})


class Call(NamedTuple):
    """A call, as received."""

    client_index: int
    call_id: int
    method: str
    args: list[Any]


def call_of(payload: Any) -> Call:
    """Return the decoded payload of a call."""
    try:
        return msgspec.convert(payload, Call)
    except ValueError as error:
        raise CodecError(f"no call: {error}") from None


class Calls:
    """Calls methods of the engine, and sends the results."""

    def __init__(self, engine: Any, core: EngineCore) -> None:
        self._engine = engine
        self._core = core
        self._progress = progress.own()
        self._running: set[asyncio.Task[None]] = set()

    def take(self, client: int, call: Call) -> None:
        """Call a method for a client; an async one runs in a task."""
        try:
            method = self._method(call.method)
            self._progress.enter(BUSY)
            result = method(*_converted(method, call.args))
        except Exception as error:
            self._fail(client, call, error)
            return
        if inspect.isawaitable(result):
            task = asyncio.ensure_future(self._finish(client, call, result))
            self._running.add(task)
            task.add_done_callback(self._running.discard)
        else:
            self._succeed(client, call, result)

    def cancel(self) -> None:
        for task in self._running:
            task.cancel()

    def _method(self, name: str) -> Callable[..., Any]:
        method: Any = None
        if not name.startswith("_") and name not in _NOT_TO_BE_CALLED:
            method = getattr(self._engine, name, None)
        if not callable(method):
            raise AttributeError(f"the engine has no method {name!r} that may be called")
        return cast("Callable[..., Any]", method)

    async def _finish(self, client: int, call: Call, result: Any) -> None:
        try:
            value = await result
        except Exception as error:
            self._fail(client, call, error)
        else:
            self._succeed(client, call, value)

    def _succeed(self, client: int, call: Call, result: Any) -> None:
        try:
            self._core.answer(client, UtilityOutput(call.call_id, None, (None, result)))
        except CodecError as error:
            self._fail(client, call, error)

    def _fail(self, client: int, call: Call, error: Exception) -> None:
        logger.debug("a call of %s has failed", call.method, exc_info=error)
        text = f"Call to {call.method} method failed: {error}"  # vLLM's words: clients look for them
        self._core.answer(client, UtilityOutput(call.call_id, text))


def _converted(method: Callable[..., Any], args: list[Any]) -> list[Any]:
    """Return the arguments, with plain data converted to the structs of the method's annotations."""
    try:
        hints = get_type_hints(method)
        parameters = inspect.signature(method).parameters.values()
    except (TypeError, ValueError, NameError):
        return args
    wanted = [hints.get(each.name) for each in parameters if each.kind in _POSITIONAL]
    wanted += [None] * (len(args) - len(wanted))
    return [
        msgspec.convert(arg, kind) if isinstance(kind, type) and issubclass(kind, msgspec.Struct) else arg
        for arg, kind in zip(args, wanted, strict=False)
    ]
