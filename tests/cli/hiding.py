"""Run an interpreter in which some modules are not installed."""

from __future__ import annotations

from collections.abc import Iterable

_HIDE = """
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}:
            return None
        return self.finder.find_spec(name, path, target)

sys.meta_path[:] = map(Without, sys.meta_path)
"""


def hiding(names: Iterable[str]) -> str:
    """Return source that hides modules from later imports."""
    return _HIDE.format(names=set(names))
