"""Imports at first use: the names of a package, and optional dependencies."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from os.path import splitext
from typing import Any


def import_when_used(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` for a package that imports its names at first use (PEP 562).

    The names are listed once, for type checkers, too: in ``__init__.pyi``, as lines "from HOME import NAME as NAME".

    Args:
        package: The ``__name__`` of the package.
        file: The ``__file__`` of the package.
    """
    try:
        with open(f"{splitext(file)[0]}.pyi") as stub:
            text = stub.read()
    except NotADirectoryError:  # the package is in a zip archive
        from pkgutil import get_data  # takes 5 ms

        text = (get_data(package, "__init__.pyi") or b"").decode()
    lines = [line.split() for line in text.splitlines() if line.startswith("from ")]
    home_of = {name: home for _, home, _, name, *_ in lines}
    inside = f"{package}."
    below = {home.removeprefix(inside).partition(".")[0] for home in home_of.values() if home.startswith(inside)}

    def find(name: str) -> Any:
        if (home := home_of.get(name)) is not None:
            module = import_module(home)
            found = getattr(module, name) if hasattr(module, name) else import_module(f"{home}.{name}")
        elif name in below:
            return import_module(f"{package}.{name}")  # sets the attribute, too
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        setattr(sys.modules[package], name, found)  # later lookups do not call this function
        return found

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *home_of, *below})

    return find, names, sorted(home_of)


def import_extra(module: str, extra: str, what: str) -> Any:
    """Import an optional dependency.

    Args:
        module: The name of the module.
        extra: The extra of aioshm that installs the module.
        what: The feature that needs the module, for the error.

    Raises:
        ImportError: The module cannot be imported; the text names the extra.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise ImportError(f"{what}: pip install 'aioshm[{extra}]' ({error})", name=error.name) from error
