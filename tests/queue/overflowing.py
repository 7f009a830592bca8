"""Both ways of what does not fit a chunk, and what tests do to either behind the back of the queue."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest

from aioshm.queue.local.overflow import OverflowSegments

BOTH_WAYS = pytest.mark.parametrize("way", ["segments", "zmq"])


def ways(writer: Any) -> Any:
    """Return what sends the messages of a writer, of either face, that do not fit a chunk."""
    return (writer.end if hasattr(writer, "end") else writer.held.end).ring.overflow


def publisher_of(writer: Any) -> Any:
    """Return what sends them over ZeroMQ, be it the first way or the second."""
    overflow = ways(writer)
    return overflow._second_way if isinstance(overflow, OverflowSegments) else overflow


def bodies(writer: Any) -> int:
    """Return how many bodies the writer has memory for."""
    overflow = ways(writer)
    return len(overflow.segments if isinstance(overflow, OverflowSegments) else overflow._kept)


def withhold(writer: Any) -> Callable[[], None]:
    """Let no body reach a reader until what this returns is called; it can be called again and again."""
    overflow, held = ways(writer), []
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


def sockets_of_zeromq() -> int:
    """Return how many ZeroMQ sockets of this process are open, as far as they are overflow's or a remote reader's."""
    from aioshm.zeromq.sockets import _open

    gc.collect()
    return len(_open)
