"""The arguments of calls, checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any


def method_name(method: object) -> str:
    """Return what a method that is to be called is called, for people.

    Raises:
        TypeError: It is neither a name nor a function.
    """
    if isinstance(method, str) and method:
        return method
    if not callable(method):
        raise TypeError(f"method must be the name of a method, or a function, not {method!r}")
    return named(method)


def named(method: str | Callable[..., Any]) -> str:
    """Return the same of one that can be called."""
    return method if isinstance(method, str) else getattr(method, "__qualname__", repr(method))


def arguments(args: object) -> tuple[Any, ...]:
    """Return positional arguments.

    Raises:
        TypeError: These are none.
    """
    if not isinstance(args, Sequence) or isinstance(args, (str, bytes, bytearray, memoryview)):
        raise TypeError(f"args must be a sequence of arguments, not {args!r}")
    return tuple(args)


def keywords(kwargs: object) -> dict[str, Any]:
    """Return arguments by name.

    Raises:
        TypeError: These are none.
    """
    if kwargs is None:
        return {}
    if not isinstance(kwargs, Mapping):
        raise TypeError(f"kwargs must be a mapping, not {kwargs!r}")
    return dict(kwargs)
