"""Imports at first use: the names of a package, and optional dependencies."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any


def import_when_used(
    package: str, homes: Mapping[str, Iterable[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` for a package (PEP 562), which import a name at first use.

    Args:
        package: The ``__name__`` of the package.
        homes: The names that each module defines. The submodules of the package among these modules are attributes of
            the package, too.
    """
    home_of = {name: home for home, names in homes.items() for name in names}
    inside = f"{package}."
    below = {home.removeprefix(inside).partition(".")[0] for home in homes if home.startswith(inside)}

    def find(name: str) -> Any:
        if (home := home_of.get(name)) is not None:
            found = getattr(import_module(home), name)
        elif name in below:
            return import_module(f"{package}.{name}")  # sets the attribute, too
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        setattr(sys.modules[package], name, found)  # later lookups do not call this function
        return found

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *home_of, *below})

    return find, names


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
