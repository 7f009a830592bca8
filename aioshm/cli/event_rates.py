"""What publishers of KV-cache events did: rates, lag, and gaps, as ``aioshm events stats`` reports them."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from aioshm.cli.event_lines import kind_of
from aioshm.events import Lost, Received, Restarted


class EventMeter:
    """What one publisher did since the last report, and in all."""

    def __init__(self) -> None:
        self._batches = self._events = self._total = self._gaps = self._lost = self._restarts = 0
        self._lag_s: float | None = None
        self._kinds: Counter[str] = Counter()

    def count(self, item: Received | Lost | Restarted) -> None:
        """Count what has come."""
        if isinstance(item, Lost):
            self._gaps += 1
            self._lost += item.last - item.first + 1
        elif isinstance(item, Restarted):
            self._restarts += 1
        else:
            self._batches += 1
            self._total += 1
            self._events += len(item.batch.events)
            self._kinds.update(kind_of(event) for event in item.batch.events)
            if not item.replayed:
                lag = time.time() - item.batch.ts
                self._lag_s = lag if self._lag_s is None else max(self._lag_s, lag)

    def report(self, seconds: float) -> dict[str, Any]:
        """Return the figures since the last report, which was so long ago, and those in all."""
        line = {
            "batches_per_s": round(self._batches / seconds, 1),
            "events_per_s": round(self._events / seconds, 1),
            "max_lag_ms": None if self._lag_s is None else round(self._lag_s * 1000, 3),
            "batches": self._total,
            "gaps": self._gaps,
            "lost": self._lost,
            "restarts": self._restarts,
            "types": dict(self._kinds),
        }
        self._batches = self._events = 0
        self._lag_s = None
        return line
