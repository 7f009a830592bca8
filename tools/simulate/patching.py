"""Plants a bug: a module is loaded from a source in which a piece of text stands for another."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from types import ModuleType
from typing import NamedTuple


class Bug(NamedTuple):
    """A bug to be planted.

    Attributes:
        name: What it is called.
        module: Where.
        old: A piece of its source, which is there once.
        new: What stands there instead.
        breaks: What it breaks.
        seed: One that is known to find it, if the first ones may not: it is tried first.
    """

    name: str
    module: str
    old: str
    new: str
    breaks: str
    seed: int | None = None

    @property
    def part(self) -> str:
        """The part of the simulation in which that module runs."""
        parts = {"queue": "remote", "events": "events", "engine": "engine", "process": "engine", "wait": "waiting"}
        return parts[self.module.split(".")[1]]

    def source(self) -> str:
        """Return the module's source with the bug in it.

        Raises:
            ValueError: The text is not there once: the code has changed, and this is to be looked at again.
        """
        spec = importlib.machinery.PathFinder.find_spec(self.module, _path_of(self.module))
        assert spec is not None
        assert isinstance(spec.loader, importlib.machinery.SourceFileLoader)
        source = spec.loader.get_source(self.module) or ""
        if source.count(self.old) != 1:
            raise ValueError(f"{self.name}: {source.count(self.old)} times in {self.module}: {self.old!r}")
        return source.replace(self.old, self.new)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, bug: Bug) -> None:
        self._bug = bug

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.util.spec_from_loader(name, self) if name == self._bug.module else None

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self._bug.source(), f"<{self._bug.name}>", "exec"), module.__dict__)


def plant(bug: Bug) -> None:
    """Have a module loaded with a bug, in this process, which must not have loaded it yet."""
    assert bug.module not in sys.modules, f"{bug.module} is loaded"
    sys.meta_path.insert(0, _Finder(bug))


def _path_of(module: str) -> list[str] | None:
    package = module.rpartition(".")[0]
    found = importlib.util.find_spec(package)
    return None if found is None else list(found.submodule_search_locations or ())
