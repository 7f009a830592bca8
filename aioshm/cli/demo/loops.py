"""Which event loop the demo's processes run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


def loop_factory(name: str) -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return what makes the loops of ``"uvloop"`` or ``"asyncio"``; None is asyncio's own."""
    if name == "uvloop":
        import uvloop

        factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
        return factory
    return None
