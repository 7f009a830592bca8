"""Batches to bytes, in either of the two encodings that consumers of vLLM's events read.

``"array"``: an event is ``[tag, field, field, ...]``. Fields of the first vLLM releases are always written, later
fields up to the last one that is set, and the newest fields never. ``"map"``: an event is
``{"type": tag, name: field, ...}`` without unset fields.

The native encoder, if it was built, encodes usual batches, three times as fast as msgspec. msgspec encodes all
further batches, and reports errors.
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


# How many fields of an event are written even if they are None.
_ALWAYS: dict[Encoding, dict[type[KnownEvent], int]] = {
    "array": {BlockStored: 6, BlockRemoved: 2, AllBlocksCleared: 0},
    "map": {BlockStored: 7, BlockRemoved: 2, AllBlocksCleared: 0},
}


def _load() -> type[EventEncoder] | None:
    if not native_wanted():
        return None
    try:
        from aioshm.events.protocol._encoder import EventEncoder
    except ImportError:  # not built: no compiler, or not for this interpreter
        return None
    return EventEncoder


NativeEncoder: type[EventEncoder] | None = _load()
"""The native encoder, or None if it is not available."""


def _native_encoder(encoding: Encoding) -> EventEncoder | None:
    if NativeEncoder is None:
        return None
    pack = msgspec.msgpack.encode
    maps = encoding == "map"
    kinds = []
    for kind, always in _ALWAYS[encoding].items():
        head = pack(kind.__name__)
        fields = kind.__struct_fields__
        keys = None
        if maps:
            head = pack("type") + head
            keys = tuple(map(pack, fields))
        else:
            fields = fields[: ARRAY_FIELDS[kind]]
        kinds.append((kind, head, fields, keys, always))
    try:
        return NativeEncoder(tuple(kinds), maps)
    except TypeError:  # this version of msgspec has another memory layout of structs
        return None


class BatchEncoder:
    """Encodes batches; not thread-safe."""

    def __init__(self, encoding: Encoding = "map", *, native: bool = True) -> None:
        if encoding not in ENCODINGS:
            raise ValueError(f"encoding must be one of {ENCODINGS}, not {encoding!r}")
        self._native: EventEncoder | None = None
        if native:
            self._native = _native_encoder(encoding)
        self._encode = msgspec.msgpack.Encoder().encode
        self._arrays = encoding == "array"

    def encode(self, batch: EventBatch, rank: int | None) -> bytes:
        """Encode ``batch``, or raise CodecError; ``rank`` is used if the batch names no rank."""
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
                events = list(map(_without_wrapper, events))
            return self._encode([batch.ts, events, rank, *astuple(batch)[3:]])
        except (TypeError, ValueError, OverflowError, AttributeError, RecursionError) as error:
            raise CodecError(f"cannot encode this event batch: {error}") from error


def _without_wrapper(event: Any) -> Any:
    return event.data if type(event) is UnknownEvent else event


def _to_array(event: Any) -> Any:
    kind = type(event)
    if not isinstance(event, KVCacheEvent):
        return _without_wrapper(event)  # msgspec encodes any further type, or raises
    fields = astuple(event)[: ARRAY_FIELDS.get(kind)]
    always = _ALWAYS["array"].get(kind, len(fields))
    end = len(fields)
    while end > always and fields[end - 1] is None:
        end -= 1
    return (event.__struct_config__.tag, *fields[:end])
