"""The hot calls of a ring's ends, in C where it was built, else in Python, and the awaitables on top of them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from aioshm.config import native_wanted
from aioshm.ring.reference import STRONG_ORDER

__all__ = [
    "EMPTY",
    "FULL_FENCE",
    "RECHECK_S",
    "SLOW_PATH",
    "STRONG_ORDER",
    "Calls",
    "ReaderBase",
    "WriterBase",
    "memory_fence",
    "native_core",
]

RECHECK_S = 0.005
"""How long a parked end sleeps at most where there is no `FULL_FENCE`."""

native_core: bool = False
if native_wanted():
    with suppress(ImportError):  # it was not built: no compiler, or not for this machine
        importlib.import_module("aioshm.ring._native")
        native_core = True
"""Whether the native core runs."""

FULL_FENCE = native_core or STRONG_ORDER
"""Whether `memory_fence` is a full one, so that no wake-up can be lost."""

if TYPE_CHECKING:
    from aioshm.ring.reference import EMPTY, SLOW_PATH, ReaderBase, WriterBase, memory_fence
elif native_core:
    from aioshm.ring._native import EMPTY, SLOW_PATH, ReaderBase, WriterBase, memory_fence
else:
    from aioshm.ring.reference import EMPTY, SLOW_PATH, ReaderBase, WriterBase, memory_fence


Call: TypeAlias = Callable[..., Coroutine[Any, Any, Any]]

if TYPE_CHECKING or not native_core:

    def bind_calls(parts: list[Any], *docs: str) -> tuple[Call, Call]:
        """Return `enqueue` and `dequeue` for the core and the slow path in a list, whose items may be exchanged."""

        async def enqueue(obj: Any, timeout: float | None = None) -> None:
            core, slow_path = parts
            outcome = None
            if isinstance(core, WriterBase):
                try:
                    outcome = core.send(obj)
                except Exception as error:
                    outcome = error
                if outcome is None:
                    return
            await slow_path(outcome, obj, timeout)

        async def dequeue(timeout: float | None = None, cancel: Any = None, indefinite: bool = False) -> Any:
            core, slow_path = parts
            outcome = None
            if isinstance(core, ReaderBase):
                try:
                    obj = outcome = core.receive()
                except Exception as error:
                    obj = EMPTY
                    outcome = error
                if obj is not EMPTY and obj is not SLOW_PATH:
                    return obj
            return await slow_path(outcome, timeout, cancel, indefinite)

        enqueue.__doc__ = docs[0]
        dequeue.__doc__ = docs[1]
        return enqueue, dequeue

else:
    from aioshm.ring._native import bind_calls


class Calls:
    """`enqueue` and `dequeue` of an awaited end: a call of the core, or else ``slow_path``.

    The slow path gets the core's result or error (None: no core), then the arguments of the call.
    """

    docs: ClassVar[tuple[str, str]] = "", ""
    """The docstrings of `enqueue` and `dequeue`."""

    def __init__(self, slow_path: Call) -> None:
        self._parts = [None, slow_path]
        self.enqueue: Call
        self.dequeue: Call
        self.enqueue, self.dequeue = bind_calls(self._parts, *self.docs)

    @property
    def core(self) -> Any:
        """The core that is called first; None: the slow path handles all calls."""
        return self._parts[0]

    @core.setter
    def core(self, core: Any) -> None:
        self._parts[0] = core
