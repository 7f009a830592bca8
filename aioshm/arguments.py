"""Checks of arguments: the errors name the argument and the value."""

from __future__ import annotations

import inspect
import math
from typing import TypeVar

T = TypeVar("T")

MAX_SECONDS = 1e9
"""Upper bound of durations, 31 years: timers of the system overflow soon above."""

_SHOWN = 100  # characters of a value in an error


def shown(value: object) -> str:
    """Return any value as a short line for an error text."""
    try:
        text = repr(value)
    except Exception as error:  # of the value's own code, or of an int with too many digits
        text = f"{type(value).__name__} ({error})"
        if isinstance(value, int):
            text = f"an int of {value.bit_length()} bits"
    if len(text) <= _SHOWN:
        return text
    return f"{text[:_SHOWN]}..."


def check_int(name: str, value: object, *, minimum: int, maximum: int | None = None) -> int:
    """Return ``value`` if it is an int within these bounds; the errors name the argument and the value."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, not {shown(value)}")
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}, not {shown(value)}")
    if maximum is not None and value > maximum:
        raise ValueError(f"{name} must be at most {maximum}, not {shown(value)}")
    return value


def check_seconds(name: str, value: object, *, zero: bool = False) -> float:
    """Return ``value`` if it is a number of seconds above 0, or ``zero``, at most `MAX_SECONDS`; the errors name it."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number of seconds, not {shown(value)}")
    if not (0 < value < math.inf or (zero and value == 0)):
        bound = ", at least 0" if zero else " above 0"
        raise ValueError(f"{name} must be a finite number of seconds{bound}, not {shown(value)}")
    if value > MAX_SECONDS:
        raise ValueError(f"{name} must be at most {MAX_SECONDS:g} seconds, not {shown(value)}")
    return float(value)


def check_limit(name: str, value: object) -> None:
    """Raise unless ``value`` is None, or a number of seconds as for `check_seconds`."""
    if value is not None:
        check_seconds(name, value)


def check_timeout(name: str, value: object) -> float | None:
    """Return ``value`` if it is None or a number of seconds from 0 on; infinity waits for ever, as None does."""
    if value is None:
        return None
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number of seconds or None, not {shown(value)}")
    if not value >= 0:
        raise ValueError(f"{name} must be at least 0 seconds, not {shown(value)}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} must be a number of seconds that fits a float, not {shown(value)}") from None


def check_type(name: str, value: object, kind: type[T]) -> T | None:
    """Return ``value`` if it is None or a ``kind``; the error names the argument and the value."""
    if value is None or isinstance(value, kind):
        return value
    article = "an" if kind.__name__[0] in "AEIOU" else "a"
    raise TypeError(f"{name} must be {article} {kind.__name__}, or None, not {shown(value)}")


def check_plain(name: str, value: T) -> T:
    """Return ``value`` unless it is a coroutine function, which nothing would await; the error names the argument."""
    for each in (value, getattr(type(value), "__call__", None)):  # noqa: B004
        if inspect.iscoroutinefunction(each) or inspect.isasyncgenfunction(each):
            raise TypeError(f"{name} must be a plain function: nothing would await {shown(value)}")
    return value


def check_bool(name: str, value: object) -> bool:
    """Return ``value`` if it is True or False; the error names the argument and the value."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, not {shown(value)}")
    return value
