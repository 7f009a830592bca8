"""Shows the values of default arguments in the reference, not the names of constants. An extension of griffe."""

from __future__ import annotations

import importlib
from typing import Any

from griffe import Attribute, Expr, ExprName, Extension, Function


class Defaults(Extension):
    """Replaces the name of a constant by its value, in functions and in fields."""

    def on_function(self, *, func: Function, **_: Any) -> None:
        """Replace the defaults of parameters."""
        for parameter in func.parameters:
            parameter.default = value_of(func, parameter.default)

    def on_attribute(self, *, attr: Attribute, **_: Any) -> None:
        """Replace the default of a field of a class."""
        if attr.parent is not None and attr.parent.is_class:
            attr.value = value_of(attr, attr.value)


def value_of(owner: Function | Attribute, default: str | Expr | None) -> str | Expr | None:
    """Return the value of a constant as Python code; anything else as it is."""
    if not isinstance(default, ExprName) or not default.name.lstrip("_").isupper():
        return default
    try:
        module, _, name = default.canonical_path.rpartition(".")
        value = getattr(importlib.import_module(module), name)
    except Exception:
        return default
    return shown(value) if isinstance(value, (int, float, str)) else default


def shown(value: float | str) -> str:
    """Return a constant as a reader would write it: 24 * 1024**2."""
    if isinstance(value, int) and value and value % 1024**2 == 0:
        return f"{value // 1024**3} * 1024**3" if value % 1024**3 == 0 else f"{value // 1024**2} * 1024**2"
    return f"{value:_}" if isinstance(value, int) and value > 9999 else repr(value)
