"""A package's names, each imported when it is first asked for."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any


def import_when_used(
    package: str, homes: Mapping[str, Iterable[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return a package's ``__getattr__`` and ``__dir__`` (PEP 562), which know names of modules not yet imported.

    Args:
        package: Its ``__name__``.
        homes: Which modules define what it exports. Their first parts below the package, which importing the package
            has always imported, are attributes of it, too.
    """
    home_of = {name: home for home, names in homes.items() for name in names}
    inside = f"{package}."
    below = {home.removeprefix(inside).partition(".")[0] for home in homes if home.startswith(inside)}

    def find(name: str) -> Any:
        if (home := home_of.get(name)) is not None:
            found = getattr(import_module(home), name)
        elif name in below:
            return import_module(f"{package}.{name}")  # which makes it an attribute
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        setattr(sys.modules[package], name, found)  # from now on without a call
        return found

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *home_of, *below})

    return find, names


def import_extra(module: str, extra: str, what: str) -> Any:
    """Return a module that is not among what aioshm itself needs.

    Args:
        module: Its name.
        extra: Of aioshm, which installs it.
        what: What needs it, as the beginning of the error.

    Raises:
        ImportError: It cannot be imported; the text says what to install.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise ImportError(f"{what}: pip install 'aioshm[{extra}]' ({error})", name=error.name) from error
