"""Which remote readers are too slow to be waited for. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Iterable

from aioshm.queue.remote.places import RemotePeer

GRACE_S = 1.0
"""For how long a reader may finish with nothing while the window is full of what it has: news of what it has finished
with takes its time, and comes in only when the writer's loop runs."""


class Slowness:
    """Finds the readers that are to be evicted, of those that have asked for that.

    Attributes:
        concerns: Whether there are any.
    """

    def __init__(self) -> None:
        self.concerns = False
        self._stuck: dict[int, tuple[int, float]] = {}  # by rank: what it had finished with, and since when

    def overdue(
        self, peers: Iterable[RemotePeer], laggards: list[int], consumed: dict[int, int], now: float
    ) -> list[RemotePeer]:
        """Return who is to be evicted; asked whenever the window has no room.

        Args:
            peers: Those that are there.
            laggards: The ranks of those that the window waits for.
            consumed: How many messages each has finished with, by rank.
            now: By ``time.monotonic()``.
        """
        stuck = {}
        overdue = []
        for peer in peers:
            if peer.slow != "evict" or peer.rank not in laggards:
                continue
            count, since = self._stuck.get(peer.rank, (-1, now))
            if count != consumed[peer.rank]:
                since = now
            stuck[peer.rank] = consumed[peer.rank], since
            if now - since >= GRACE_S:
                overdue.append(peer)
        self._stuck = stuck
        return overdue
