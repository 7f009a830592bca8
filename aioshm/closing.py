"""Base classes of context managers that close at the end of a block, and the warning about unclosed objects."""

from __future__ import annotations

import warnings
from types import TracebackType
from typing import Self


class Closing:
    """Calls ``close`` at the end of a ``with`` block."""

    __slots__ = ()

    def close(self) -> None:
        """Release all resources. Idempotent."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncClosing:
    """Calls ``aclose`` at the end of an ``async with`` block."""

    __slots__ = ()

    async def aclose(self) -> None:
        """Release all resources. Idempotent; finishes even if cancelled."""
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


def warn_not_closed(owner: object, remedy: str = "use `async with`") -> None:
    """Issue a `ResourceWarning` for an unclosed object; ``__del__`` calls this."""
    warnings.warn(f"{owner!r} was not closed: {remedy}", ResourceWarning, stacklevel=3, source=owner)
