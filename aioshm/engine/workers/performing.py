"""The object of a worker: made, called, closed; and what is told of its exceptions."""

from __future__ import annotations

import asyncio
import inspect
import pickle
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

from aioshm.errors import RemoteFailure
from aioshm.process.termination import Termination

Step = tuple[Any, tuple[Any, ...], dict[str, Any], int | None]
"""What to call, with what, and the one rank whose result is wanted; None: every rank's."""

MAX_TEXT = 1 << 14
"""How many characters are told of an exception, and of its traceback's end."""

_OWN_FILES = {__file__}
"""Files of frames that lead to a method: how it came to be called is nobody's concern."""


class Leave(NamedTuple):
    """What is called in a step that ends some of the workers, who do not answer it.

    Attributes:
        ranks: Theirs.
    """

    ranks: frozenset[int]


class Performer:
    """Makes a worker's object, and calls its methods.

    Args:
        rank: The worker's rank.
        termination: Lets SIGTERM end the worker, from when the object is made.
    """

    def __init__(self, rank: int, termination: Termination) -> None:
        self._rank, self._termination = rank, termination
        self._object: Any = None
        self._made = False

    @property
    def terminated(self) -> bool:
        """Whether SIGTERM ends the worker: what is cancelled now is not cancelled by the method."""
        return self._termination.came

    def call(self, what: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method by its name, or a function that is given the object; what it returns may be awaitable."""
        if isinstance(what, str):
            return getattr(self._object, what)(*args, **kwargs)
        return what(self._object, *args, **kwargs)

    async def answer(self, step: Step) -> tuple[bool, Any]:
        """Do a step; return whether that went well, and the result or a `RemoteFailure`."""
        try:
            result = self.begin(step)
            if inspect.isawaitable(result):
                result = await result
        except (Exception, asyncio.CancelledError) as error:  # the latter from the method, or for SIGTERM
            if self.terminated:
                raise
            return failed(error)
        return self.done(step, result)

    async def construct(self, construction: bytes | bytearray) -> tuple[bool, Any]:
        """Do a pickled step, as `answer` does."""
        try:
            step = pickle.loads(construction)
        except Exception as error:
            return failed(error)
        return await self.answer(step)

    def begin(self, step: Step) -> Any:
        """Do a step as far as that goes without waiting; what it returns may be awaitable."""
        what, args, kwargs, _ = step
        if not self._made:
            return self._make(what, args, kwargs)
        if isinstance(what, Leave):
            return None
        return self.call(what, args, kwargs)

    def done(self, step: Step, result: Any) -> tuple[bool, Any]:
        """Return the answer to a step that has a result."""
        wanted = step[3]
        return True, (result if wanted is None or wanted == self._rank else None)

    async def _make(self, what: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        made = what(*args, rank=self._rank, **kwargs)
        self._object = await made if inspect.isawaitable(made) else made
        self._made = True
        self._termination.arm()  # until now there was nothing to close: the signal itself ended the process
        self._termination.interrupts = True

    async def close(self) -> None:
        """Call the object's ``close``, if it has one; SIGTERM does not end that."""
        self._termination.ignored = not self._termination.came
        self._termination.interrupts = False
        close: Callable[[], Any] | None = getattr(self._object, "close", None)
        if callable(close):
            closing = close()
            if inspect.isawaitable(closing):
                await closing


def failed(error: BaseException) -> tuple[bool, RemoteFailure]:
    """Return the answer that an exception is."""
    return False, failure_of(error)


def failure_of(error: BaseException) -> RemoteFailure:
    """Return what is told of an exception."""
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in _OWN_FILES:
        trace = trace.tb_next
    lines = traceback.format_exception(kind, error, trace or error.__traceback__)
    try:
        text = str(error)
    except Exception as broken:
        text = f"its text cannot be told: {type(broken).__name__}"
    return RemoteFailure(name, text[:MAX_TEXT], "".join(lines)[-MAX_TEXT:])


def hide_frames(file: str) -> None:
    """Leave a module's own frames out of what is told of exceptions."""
    _OWN_FILES.add(file)
