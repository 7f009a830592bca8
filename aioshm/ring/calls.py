"""`enqueue` and `dequeue` of an awaited queue: ask the core, and take a Python coroutine only where it has to wait."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from aioshm.ring.cores import EMPTY, SLOW_PATH, ReaderBase, WriterBase, native_core

Call: TypeAlias = Callable[..., Coroutine[Any, Any, Any]]

if TYPE_CHECKING or not native_core:

    def bind_calls(parts: list[Any], *docs: str) -> tuple[Call, Call]:
        """Return `enqueue` and `dequeue` for a core and a slow path, which may be exchanged in the list."""

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
                    obj, outcome = EMPTY, error
                if obj is not EMPTY and obj is not SLOW_PATH:
                    return obj
            return await slow_path(outcome, timeout, cancel, indefinite)

        enqueue.__doc__, dequeue.__doc__ = docs
        return enqueue, dequeue

else:
    from aioshm.ring._native import bind_calls  # its calls take no frame unless they have to wait


class Calls:
    """`enqueue` and `dequeue`, bound to the core and the slow path of one end.

    Args:
        slow_path: The coroutine function that is called when the core cannot finish a call. Its arguments are the
            core's answer, its exception, or None without a core, and then those of `enqueue` or `dequeue`.
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
        """The core that is asked first; None: there is none, or it is of another make."""
        return self._parts[0]

    @core.setter
    def core(self, core: Any) -> None:
        self._parts[0] = core
