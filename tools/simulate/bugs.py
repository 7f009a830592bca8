"""Runs seeds, also with one of the planted bugs of ``bugs.txt``, each of which some seed must find."""

from __future__ import annotations

import asyncio
import importlib.abc
import importlib.util
import itertools
import logging
import sys
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from tools.simulate.world import Violation, World

PARTS = {"queue": "remote", "events": "events", "engine": "engine", "process": "engine"}
"""The part of the simulation that runs the modules of a folder."""


class Bug(NamedTuple):
    """A bug: its name, its module, what it breaks, a seed that finds it, the text to replace, and its replacement."""

    name: str
    module: str
    breaks: str
    seed: int | None
    old: str
    new: str

    @property
    def part(self) -> str:
        """The part of the simulation in which the module runs."""
        return PARTS[self.module.split(".")[1]]

    def source(self) -> str:
        """Return the module's source with the bug in it."""
        file = Path(__file__).parents[2].joinpath(*self.module.split(".")).with_suffix(".py")
        source = file.read_text()
        if source.count(self.old) != 1:
            raise ValueError(f"{self.name}: {source.count(self.old)} times in {self.module}: {self.old!r}")
        return source.replace(self.old, self.new)


def _parse(text: str) -> Bug:
    """Read one entry: name, module and seed; what the bug breaks; the lines it removes (-) and puts there (+)."""
    head, breaks, *lines = text.splitlines()
    name, module, *seed = head.split()
    old, new = ("\n".join(line[1:] for line in lines if line[0] == sign) for sign in "-+")
    return Bug(name, module, breaks, int(seed[0]) if seed else None, old, new)


BUGS = tuple(map(_parse, Path(__file__).with_suffix(".txt").read_text().split("\n\n")))


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, bug: Bug) -> None:
        self._bug = bug

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.util.spec_from_loader(name, self) if name == self._bug.module else None

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self._bug.source(), f"<{self._bug.name}>", "exec"), module.__dict__)


def plant(bug: Bug) -> None:
    """Load the bug's module, which this process has not loaded yet, with the bug in it."""
    assert bug.module not in sys.modules, f"{bug.module} is loaded"
    sys.meta_path.insert(0, _Finder(bug))


def prepare() -> None:
    """Have this process simulate from now on."""
    from tools.simulate import engine, remote  # not before a bug is planted

    logging.disable(logging.CRITICAL)
    remote.stand_in()
    engine.stand_in()


def run_seed(
    seed: int, *, traced: bool = False, only: str | None = None
) -> tuple[World, dict[str, int], Violation | None]:
    """Run a seed, or only one part of it; return its world, what there was in it, and what does not hold."""
    from tools.simulate import engine, events, remote

    parts = {"remote": remote.run, "events": events.run, "engine": engine.run}
    if only is not None:
        parts = {only: parts[only]}
    world = World(seed, traced=traced)
    figures: dict[str, int] = {}
    violation: Violation | None = None

    async def main() -> None:
        for found in await asyncio.gather(*(run(world.part(name)) for name, run in parts.items())):
            figures.update(found)

    try:
        world.loop.run_until_complete(main())
    except Violation as error:
        violation = error
    except asyncio.CancelledError:
        assert world.violation is not None
    except Exception as error:
        violation = Violation(f"{type(error).__name__}: {error}")
        violation.__cause__ = error
    finally:
        for task in asyncio.all_tasks(world.loop):
            task.cancel()
        world.loop.close()
    return world, figures, world.violation or violation


def hunt(bug: Bug, first: int, seeds: int) -> tuple[int | None, str]:
    """Plant a bug, and run the part that runs its module, as in the whole; return the seed that finds the bug."""
    plant(bug)
    prepare()
    known = [] if bug.seed is None or not seeds else [bug.seed]
    for seed in itertools.chain(known, range(first, first + seeds)):
        _, _, violation = run_seed(seed, only=bug.part)
        if violation is not None:
            return seed, str(violation)
    return None, ""
