"""What ``with`` and ``async with`` do at the end of a block, and the warning where an object was never closed."""

from __future__ import annotations

import warnings
from types import TracebackType
from typing import Self


class Closing:
    """A class whose objects are closed with ``close`` at the end of ``with``."""

    __slots__ = ()

    def close(self) -> None:
        """Give back what this holds. Idempotent."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncClosing:
    """A class whose objects are closed with ``aclose`` at the end of ``async with``."""

    __slots__ = ()

    async def aclose(self) -> None:
        """Give back what this holds. Idempotent; finishes also when it is cancelled."""
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


def warn_not_closed(owner: object, remedy: str = "use `async with`") -> None:
    """Issue the `ResourceWarning` for an object that is collected, and was never closed; called by its ``__del__``."""
    warnings.warn(f"{owner!r} was not closed: {remedy}", ResourceWarning, stacklevel=3, source=owner)
