"""How a group ends, for all of its parts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aioshm.errors import AioshmError


class Fate:
    """Tells, once, that a group has ended.

    Attributes:
        failure: Makes the error of every call from then on.
        ended: Set then.
        on_end: Called then, with the same.
    """

    def __init__(self) -> None:
        self.failure: Callable[[], AioshmError] | None = None
        self.ended = asyncio.Event()
        self.on_end: list[Callable[[Callable[[], AioshmError]], None]] = []

    def end(self, failure: Callable[[], AioshmError]) -> None:
        """Answer every call, the waiting ones too, with an error from now on; only the first one counts."""
        if self.failure is None:
            self.failure = failure
            self.ended.set()
            for tell in self.on_end:
                tell(failure)

    def check(self) -> None:
        """Raise the error, if there is one."""
        if self.failure is not None:
            raise self.failure()
