"""Both ways of messages that do not fit a chunk, and what tests do to either behind the back of the queue."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest

from aioshm.queue.local.overflow import OverflowSegments

BOTH_WAYS = pytest.mark.parametrize("way", ["segments", "zmq"])


def overflow_of(writer: Any) -> Any:
    """Return the overflow of a writer of either API."""
    return (writer.end if hasattr(writer, "end") else writer.held.end).ring.overflow


def bodies(writer: Any) -> int:
    """Return how many bodies the writer has memory for."""
    overflow = overflow_of(writer)
    return len(overflow.segments if isinstance(overflow, OverflowSegments) else overflow._kept)


def withhold(writer: Any) -> Callable[[], None]:
    """Keep bodies from readers until the returned function is called; it can be called again and again."""
    overflow, held = overflow_of(writer), []
    if isinstance(overflow, OverflowSegments):
        deliver: Any = overflow.hand_over
        overflow.hand_over = held.append  # type: ignore[method-assign]
    else:
        deliver = overflow._send

        def hold(*message: Any) -> None:
            held.append(message)

        overflow._send = hold

    def release() -> None:
        for each in held:
            deliver(*each if isinstance(each, tuple) else (each,))
        held.clear()

    return release


def cut_lifelines(writer: Any) -> None:
    """End the connections to local readers, as the system does for a process that is killed."""
    for connection in list(writer.end.ring.listener._connections.values()):
        connection.close()


def sockets_of_zeromq() -> int:
    """Return how many ZeroMQ sockets of this process are open (overflow's, or a remote reader's)."""
    from aioshm.zeromq.sockets import _open

    gc.collect()
    return len(_open)
