"""The core that `EndState` opens and shuts: a ring's core, or a stand-in where there is no ring."""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from typing import Any, Protocol


class Core(Protocol):
    """`EndState`'s interface to a ring's core; see ``ring/reference.py``."""

    open: bool
    budget: int
    budget_ends_ns: int
    published_ns: int
    spin_ns: int
    spin_yields: bool
    spins: int
    hits: int
    spun_ns: int
    copied: int
    garbled: int

    def passes(self) -> bool: ...

    def belong(self, runs: Callable[[], object] | None, /) -> None: ...

    def share(self, turn: Any, /) -> None: ...

    def spin(self, budget_ns: int, /) -> bool: ...


class NoRing:
    """The core of an end that has no ring, or none yet."""

    def __init__(self) -> None:
        self.open = False
        self.spin_yields: bool = False
        self.budget = self.budget_ends_ns = self.published_ns = self.spin_ns = self.spins = self.hits = self.spun_ns = 0
        self.copied: int = 0
        self.garbled: int = 0
        self._thread = -1
        self._runs: Callable[[], object] | None = bool

    def passes(self) -> bool:
        """Return whether this thread may pass."""
        if not self.open or self.budget <= 0:
            return False
        return self._runs is None or (get_ident() == self._thread and bool(self._runs()))

    def belong(self, runs: Callable[[], object] | None, /) -> None:
        """Belong to this thread, while ``runs()`` is true; None: to whichever uses it."""
        self._thread = get_ident()
        self._runs = runs

    def share(self, _turn: Any, /) -> None:
        """Belong to any thread."""
        self.belong(None)

    def spin(self, _budget_ns: int, /) -> bool:
        """Return False: there is no memory to look at."""
        return False
