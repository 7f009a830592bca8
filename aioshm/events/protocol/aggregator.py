"""Which events every worker has seen. No I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Generic, TypeVar

E = TypeVar("E", bound=Hashable)


class KVEventAggregator(Generic[E]):
    """Counts, over several workers, who reported which event."""

    __slots__ = ("_events", "_num_workers", "_reports")

    def __init__(self, num_workers: int) -> None:
        if num_workers <= 0:
            raise ValueError(f"num_workers must be greater than zero, not {num_workers}")
        self._events: Counter[E] = Counter()  # every time it was added
        self._reports: Counter[E] = Counter()  # once for every list it was in
        self._num_workers = num_workers

    def add_events(self, events: list[E]) -> None:
        """Add what one worker reported.

        Raises:
            TypeError: Not a list.
        """
        if not isinstance(events, list):
            raise TypeError(f"events must be a list of events, not {type(events).__name__}")
        self._events.update(events)
        self._reports.update(set(events))

    def get_common_events(self) -> list[E]:
        """Return the events that all workers reported, in the order in which they first came."""
        return [event for event in self._events if self._reports[event] >= self._num_workers]

    def get_all_events(self) -> list[E]:
        """Return all events, as often as they were added."""
        return list(self._events.elements())

    def clear_events(self) -> None:
        """Forget all events; the number of workers stays."""
        self._events.clear()
        self._reports.clear()

    def increment_workers(self, count: int = 1) -> None:
        """Expect ``count`` more workers.

        Raises:
            ValueError: ``count`` is not positive.
        """
        if count <= 0:
            raise ValueError(f"count must be positive, not {count}")
        self._num_workers += count

    def decrement_workers(self, count: int = 1) -> None:
        """Expect ``count`` fewer workers.

        Raises:
            ValueError: ``count`` is not positive, or nobody would be left.
        """
        if not 0 < count < self._num_workers:
            raise ValueError(f"count must be from 1 to {self._num_workers - 1}, not {count}")
        self._num_workers -= count

    def reset_workers(self) -> None:
        """Expect one worker."""
        self._num_workers = 1

    def get_number_of_workers(self) -> int:
        """Return how many workers are expected."""
        return self._num_workers

    def __repr__(self) -> str:
        return f"<KVEventAggregator workers={self._num_workers}, events={len(self._events)}>"
