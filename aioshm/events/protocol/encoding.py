"""Batches to bytes, in either of the two encodings that consumers of vLLM's events read.

``"array"``: an event is ``[tag, field, field, ...]``; the fields that the first consumers knew always, later
ones up to the last that is set, and the newest ones never. ``"map"``: an event is ``{"type": tag, name: field, ...}``
with unset fields left out.

The native encoder, where it was built, encodes the usual batch, three times as fast as msgspec. msgspec encodes all
other batches, and says what is wrong with those that nobody can encode.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import astuple

from aioshm.config import native_wanted
from aioshm.errors import CodecError
from aioshm.events.protocol.messages import (
    ARRAY_FIELDS,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    KnownEvent,
    KVCacheEvent,
    KVEventBatch,
    UnknownEvent,
)
from aioshm.events.protocol.wire import ENCODINGS, Encoding

if TYPE_CHECKING:
    from aioshm.events.protocol._encoder import EventEncoder


# How many of an event's fields are written although they are None.
_ALWAYS: dict[Encoding, dict[type[KnownEvent], int]] = {
    "array": {BlockStored: 6, BlockRemoved: 2, AllBlocksCleared: 0},
    "map": {BlockStored: 7, BlockRemoved: 2, AllBlocksCleared: 0},
}


def _load() -> type[EventEncoder] | None:
    if not native_wanted():
        return None
    try:
        from aioshm.events.protocol._encoder import EventEncoder
    except ImportError:  # it was not built: no compiler, or not for this interpreter
        return None
    return EventEncoder


NativeEncoder: type[EventEncoder] | None = _load()
"""What encodes natively, or None."""


def _native_encoder(encoding: Encoding) -> EventEncoder | None:
    if NativeEncoder is None:
        return None
    pack, maps = msgspec.msgpack.encode, encoding == "map"
    kinds = []
    for kind, always in _ALWAYS[encoding].items():
        tag, fields = pack(kind.__name__), kind.__struct_fields__
        if maps:
            head, keys = pack("type") + tag, tuple(map(pack, fields))
        else:
            head, keys, fields = tag, None, fields[: ARRAY_FIELDS[kind]]
        kinds.append((kind, head, fields, keys, always))
    try:
        return NativeEncoder(tuple(kinds), maps)
    except TypeError:  # a msgspec whose structs lie otherwise in memory
        return None


class BatchEncoder:
    """Turns batches into payloads; not for several threads at once."""

    def __init__(self, encoding: Encoding = "map", *, native: bool = True) -> None:
        if encoding not in ENCODINGS:
            raise ValueError(f"encoding must be one of {ENCODINGS}, not {encoding!r}")
        self._native = _native_encoder(encoding) if native else None
        self._encode = msgspec.msgpack.Encoder().encode
        self._arrays = encoding == "array"

    def encode(self, batch: EventBatch, rank: int | None) -> bytes:
        """Return the payload of ``batch``, or raise CodecError; ``rank`` stands in where the batch names none."""
        own = batch.data_parallel_rank
        if own is not None:
            rank = own
        kind = type(batch)
        if self._native is not None and (kind is EventBatch or kind is KVEventBatch):
            payload = self._native.encode(batch.ts, batch.events, rank)
            if payload is not None:
                return payload
        try:
            events = batch.events
            if self._arrays:
                events = list(map(_to_array, events))
            elif UnknownEvent in map(type, events):
                events = [event.data if type(event) is UnknownEvent else event for event in events]
            return self._encode([batch.ts, events, rank, *astuple(batch)[3:]])
        except (TypeError, ValueError, OverflowError, AttributeError, RecursionError) as error:
            raise CodecError(f"cannot encode this event batch: {error}") from error


def _to_array(event: Any) -> Any:
    kind = type(event)
    if kind is UnknownEvent:
        return event.data
    if not isinstance(event, KVCacheEvent):
        return event  # whatever else the caller made: msgspec knows how
    fields = astuple(event)[: ARRAY_FIELDS.get(kind)]
    always = _ALWAYS["array"].get(kind, len(fields))
    end = len(fields)
    while end > always and fields[end - 1] is None:
        end -= 1
    return (event.__struct_config__.tag, *fields[:end])
