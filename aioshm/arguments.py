"""Checks of arguments: the errors name the argument and the value."""

from __future__ import annotations

import inspect
import math
from typing import TypeVar

T = TypeVar("T")

MAX_SECONDS = 1e9
"""No number of seconds may be larger: 31 years are for ever, and more is what no timer of the system takes."""

_SHOWN = 100  # characters of a value in an error


def shown(value: object) -> str:
    """Return a value as an error shows it: in one line, not too long, whatever it is."""
    try:
        text = repr(value)
    except Exception as error:  # its own code, or an int of more digits than Python writes
        text = f"an int of {value.bit_length()} bits" if isinstance(value, int) else f"{type(value).__name__} ({error})"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def check_int(name: str, value: object, *, minimum: int, maximum: int | None = None) -> int:
    """Return ``value`` if it is an int within these bounds; the errors name the argument and the value."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, not {shown(value)}")
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}, not {shown(value)}")
    if maximum is not None and value > maximum:
        raise ValueError(f"{name} must be at most {maximum}, not {shown(value)}")
    return value


def check_seconds(name: str, value: object) -> float:
    """Return ``value`` if it is a number of seconds above 0, at most `MAX_SECONDS`; the errors name the argument."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number of seconds, not {shown(value)}")
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be a finite number of seconds above 0, not {shown(value)}")
    if value > MAX_SECONDS:
        raise ValueError(f"{name} must be at most {MAX_SECONDS:g} seconds, not {shown(value)}")
    return float(value)


def check_timeout(name: str, value: object) -> float | None:
    """Return ``value`` if it is None or a number of seconds, 0 or more; infinity, too, which is for ever as None is."""
    if value is None:
        return None
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number of seconds or None, not {shown(value)}")
    if not value >= 0:
        raise ValueError(f"{name} must be at least 0 seconds, not {shown(value)}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} must be a number of seconds that a float can be, not {shown(value)}") from None


def check_plain(name: str, value: T) -> T:
    """Return ``value`` unless calling it would make a coroutine that nothing awaits; the error names the argument."""
    for each in (value, getattr(type(value), "__call__", None)):  # noqa: B004
        if inspect.iscoroutinefunction(each) or inspect.isasyncgenfunction(each):
            raise TypeError(f"{name} must be a plain function, and nothing would await {shown(value)}")
    return value


def check_bool(name: str, value: object) -> bool:
    """Return ``value`` if it is True or False; the error names the argument and the value."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, not {shown(value)}")
    return value
