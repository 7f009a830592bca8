"""Look at live queues from outside: nothing here needs the cooperation of their processes, or costs them anything."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aioshm.observe.culprit import who as who
    from aioshm.observe.messages import MessageHeader as MessageHeader
    from aioshm.observe.messages import last_messages as last_messages
    from aioshm.observe.scan import find_queue as find_queue
    from aioshm.observe.scan import find_queues as find_queues
    from aioshm.observe.snapshot import QueueSnapshot as QueueSnapshot
    from aioshm.observe.snapshot import Scan as Scan
    from aioshm.observe.verdict import Suspect as Suspect
    from aioshm.observe.watch import Watch as Watch

_HOME = {
    "MessageHeader": "messages",
    "QueueSnapshot": "snapshot",
    "Scan": "snapshot",
    "Suspect": "verdict",
    "Watch": "watch",
    "find_queue": "scan",
    "find_queues": "scan",
    "last_messages": "messages",
    "who": "culprit",
}
"""Which module of this package has a name; imported when it is asked for."""

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
