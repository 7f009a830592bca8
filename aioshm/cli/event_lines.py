"""How events, losses and restarts look, to people and as JSON."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from aioshm.events import Delivery, KVEvent, Lost, PublisherGone, Restarted, UnknownEvent


def lines_of(item: Delivery, kinds: set[str], as_json: bool) -> list[str]:
    """Return a delivery as lines, one for each event; ``kinds``, unless empty, says which."""
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
    """Return what type of event this is."""
    return event.type or "unknown" if isinstance(event, UnknownEvent) else type(event).__name__


def _fields(event: KVEvent) -> dict[str, Any]:
    """Return what is set, with bytes as hex."""
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
