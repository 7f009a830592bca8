"""Batches to bytes, in either of the two encodings that consumers of vLLM's events read.

``"array"``: an event is ``[tag, field, field, ...]``; the fields that the first consumers knew always, later
ones up to the last that is set, and the newest ones never. ``"map"``: an event is ``{"type": tag, name: field, ...}``
with unset fields left out.

The usual batch is the native encoder's, where that was built; whatever else one may publish is encoded by its twin
here, which also says what is wrong with a batch that nobody can encode.
"""

from __future__ import annotations

from collections.abc import Callable
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
    KVEventBatch,
    UnknownEvent,
    derived,
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


# ``lora_name`` is always written: the consumers that read maps require the key.
_MAPS = {kind: derived(kind, always, omit_defaults=True) for kind, always in _ALWAYS["map"].items()}


class BatchEncoder:
    """Turns batches into payloads; not for several threads at once.

    Args:
        encoding: ``"array"`` or ``"map"``.
        native: Use the native encoder, where there is one; the bytes are the same.
    """

    def __init__(self, encoding: Encoding = "map", *, native: bool = True) -> None:
        if encoding not in ENCODINGS:
            raise ValueError(f"encoding must be one of {ENCODINGS}, not {encoding!r}")
        self._native = _native_encoder(encoding) if native else None
        self._encode = msgspec.msgpack.Encoder().encode
        self._convert: Callable[[list[Any]], list[Any]] = _to_arrays if encoding == "array" else _to_maps

    def encode(self, batch: EventBatch, rank: int | None) -> bytes:
        """Return the payload of ``batch``; ``rank`` stands in where the batch names none.

        Raises:
            CodecError: An event holds something that msgpack cannot express, such as a number above 64 bits.
        """
        own = batch.data_parallel_rank
        if own is not None:
            rank = own
        kind = type(batch)
        if self._native is not None and (kind is EventBatch or kind is KVEventBatch):
            payload = self._native.encode(batch.ts, batch.events, rank)
            if payload is not None:
                return payload
        try:
            return self._encode([batch.ts, self._convert(batch.events), rank, *astuple(batch)[3:]])
        except (TypeError, ValueError, OverflowError, AttributeError, RecursionError) as error:
            raise CodecError(f"cannot encode this event batch: {error}") from error


def _to_arrays(events: list[Any]) -> list[Any]:
    # The usual event is handled in the comprehension itself: a call for each would double what this costs,
    # and nine plain comparisons are half as dear as building a tuple of the tail and comparing that.
    return [
        (
            "BlockStored",
            event.block_hashes,
            event.parent_block_hash,
            event.token_ids,
            event.block_size,
            event.lora_id,
            event.medium,
        )
        if type(event) is BlockStored
        and event.lookahead_token_ids is None
        and event.lora_name is None
        and event.extra_keys is None
        and event.group_idx is None
        and event.kv_cache_spec_kind is None
        and event.kv_cache_spec_sliding_window is None
        and event.locality is None
        and event.ownership is None
        and event.session_id is None
        else _to_array(event)
        for event in events
    ]


def _to_array(event: Any) -> Any:
    kind = type(event)
    if kind is BlockStored or kind is BlockRemoved:
        return _trimmed(kind.__name__, astuple(event)[: ARRAY_FIELDS[kind]], _ALWAYS["array"][kind])
    if kind is UnknownEvent:
        return event.data
    return event  # AllBlocksCleared, and whatever else the caller made: msgspec knows how


def _trimmed(tag: str, fields: tuple[Any, ...], always: int) -> tuple[Any, ...]:
    end = len(fields)
    while end > always and fields[end - 1] is None:
        end -= 1
    return (tag, *fields[:end])


def _to_maps(events: list[Any]) -> list[Any]:
    return [_to_map(event) for event in events]


def _to_map(event: Any) -> Any:
    form = _MAPS.get(type(event))
    if form is not None:
        return form(*astuple(event))
    return event.data if type(event) is UnknownEvent else event
