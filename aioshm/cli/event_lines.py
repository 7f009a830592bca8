"""Events, losses and restarts as lines of text or JSON, and the rates of a publisher."""

from __future__ import annotations

import json
import time
from collections import Counter
from typing import Any

import msgspec

from aioshm.events import Delivery, KVEvent, Lost, PublisherGone, Received, Restarted, UnknownEvent


def lines_of(item: Delivery, kinds: set[str], as_json: bool) -> list[str]:
    """Return a line for each event of a delivery; ``kinds``, unless empty, selects event types."""
    source: dict[str, Any] = {"endpoint": item.source.endpoint, "rank": item.source.rank}
    if isinstance(item, Lost):
        found = {**source, "type": "lost", "first": item.first, "last": item.last, "reason": item.reason}
        return [json.dumps(found) if as_json else f"{item.source}: {item.first} to {item.last} lost: {item.reason}"]
    if isinstance(item, Restarted):
        found = {**source, "type": "restarted", "expected": item.expected, "reason": item.reason}
        text = f"{item.source}: began again, {item.expected} was next: {item.reason}"
        return [json.dumps(found) if as_json else text]
    if isinstance(item, PublisherGone):
        found = {**source, "type": "gone", "expected": item.expected, "after_s": round(item.after_s, 3)}
        return [json.dumps(found) if as_json else f"{item.source}: gone, no sign of it for {item.after_s:.3g} s"]
    lines = []
    for event in item.batch.events:
        kind = kind_of(event)
        if kinds and kind not in kinds:
            continue
        if as_json:
            head = {**source, "seq": item.seq, "ts": item.batch.ts, "replayed": item.replayed, "type": kind}
            lines.append(json.dumps(head | _fields(event)))
        else:
            shown = " ".join(f"{name}={value}" for name, value in _fields(event).items())
            lines.append(f"{item.source} #{item.seq} {kind} {shown}".rstrip())
    return lines


def kind_of(event: KVEvent) -> str:
    """Return the type of an event."""
    return event.type or "unknown" if isinstance(event, UnknownEvent) else type(event).__name__


def _fields(event: KVEvent) -> dict[str, Any]:
    """Return the fields that are set, with bytes as hex."""
    if isinstance(event, UnknownEvent):
        return {"data": _plain(event.data), "reason": event.reason}
    fields = msgspec.structs.asdict(event)
    return {name: _plain(value) for name, value in fields.items() if value is not None}


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(_plain(key)): _plain(item) for key, item in value.items()}
    return value if isinstance(value, (str, int, float, bool, type(None))) else repr(value)


class EventMeter:
    """Counts what one publisher sent since the last report, and in total."""

    def __init__(self) -> None:
        self._batches = self._events = self._total = self._gaps = self._lost = self._restarts = 0
        self._lag_s: float | None = None
        self._kinds: Counter[str] = Counter()

    def count(self, item: Received | Lost | Restarted) -> None:
        """Count a delivery."""
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
        """Return the rates since the last report, ``seconds`` ago, and the totals."""
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
