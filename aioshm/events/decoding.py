"""Bytes to batches, whatever mixture of encodings and generations arrives.

The usual batch is of one encoding and is decoded in one go. Anything else (mixed encodings, a type from the
future, a field too few or of another type) is taken apart event by event, so that what is not understood
costs only itself.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from msgspec.structs import astuple

from aioshm.errors import CodecError
from aioshm.events.messages import (
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    KVEvent,
    KVEventBatch,
    UnknownEvent,
)
from aioshm.events.wire import Encoding
from aioshm.guard import built

# What msgspec raises for bytes from strangers; the last four for strings, nesting and map keys.
_BAD_BYTES = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TypeError, ValueError, OverflowError)


class _StoredMap(msgspec.Struct, gc=False, tag="BlockStored"):
    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: list[list[int]] | None = None


class _RemovedMap(msgspec.Struct, gc=False, tag="BlockRemoved"):
    block_hashes: list[BlockHash]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class _ClearedMap(msgspec.Struct, gc=False, tag="AllBlocksCleared"):
    pass


class _FirstStored(msgspec.Struct, array_like=True, gc=False, tag="BlockStored"):
    """The first generation: nothing yet said where a block lies."""

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None


class _FirstRemoved(msgspec.Struct, array_like=True, gc=False, tag="BlockRemoved"):
    block_hashes: list[BlockHash]


_ArrayEvent = BlockStored | BlockRemoved | AllBlocksCleared
_MapEvent = _StoredMap | _RemovedMap | _ClearedMap


class _ArrayBatch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[_ArrayEvent]
    data_parallel_rank: int | None = None


class _MapBatch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[_MapEvent]
    data_parallel_rank: int | None = None


class _AnyBatch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[msgspec.Raw]
    data_parallel_rank: int | None = None


_T = TypeVar("_T")
_array_event = built(lambda: msgspec.msgpack.Decoder(_ArrayEvent))
_map_event = built(lambda: msgspec.msgpack.Decoder(_MapEvent))
_first_event = built(lambda: msgspec.msgpack.Decoder(_FirstStored | _FirstRemoved))
_FIRST_LENGTHS = {"BlockStored": 6, "BlockRemoved": 2}  # tag included


class BatchDecoder:
    """Turns payloads into batches; remembers which encoding came last and tries it first."""

    def __init__(self) -> None:
        self._array = built(lambda: msgspec.msgpack.Decoder(_ArrayBatch))
        self._map = built(lambda: msgspec.msgpack.Decoder(_MapBatch))
        self._any = built(lambda: msgspec.msgpack.Decoder(_AnyBatch))
        self._maps_first = True

    @property
    def encoding(self) -> Encoding:
        """How the last batch that held events, all of one encoding, was encoded; ``"map"`` before the first."""
        return "map" if self._maps_first else "array"

    def decode(self, payload: bytes) -> KVEventBatch:
        """Return the batch in ``payload``.

        Raises:
            CodecError: These bytes are not a batch at all. A single bad event is never that: it arrives as an
                ``UnknownEvent`` with the reason.
        """
        for maps in (self._maps_first, not self._maps_first):
            batch = self._decode_maps(payload) if maps else _attempt(self._array, payload)
            if batch is not None:
                if batch.events:
                    self._maps_first = maps
                return KVEventBatch(batch.ts, list(batch.events), batch.data_parallel_rank)
        return self._decode_one_by_one(payload)

    def _decode_maps(self, payload: bytes) -> _ArrayBatch | None:
        batch = _attempt(self._map, payload)
        if batch is None:
            return None
        return _ArrayBatch(batch.ts, [_from_map(event) for event in batch.events], batch.data_parallel_rank)

    def _decode_one_by_one(self, payload: bytes) -> KVEventBatch:
        try:
            batch = self._any.decode(payload)
        except _BAD_BYTES as error:
            raise CodecError(f"not an event batch: {error}") from None
        return KVEventBatch(batch.ts, [decode_event(raw) for raw in batch.events], batch.data_parallel_rank)


def decode_event(raw: msgspec.Raw | bytes) -> KVEvent:
    """Return the event in ``raw``, well-formed msgpack; never raises for what the event says."""
    event: KVEvent | None = _attempt(_array_event, raw)
    if event is not None:
        return event
    in_map = _attempt(_map_event, raw)
    if in_map is not None:
        return _from_map(in_map)
    try:
        data = msgspec.msgpack.decode(raw)
    except _BAD_BYTES as error:
        return UnknownEvent(None, bytes(raw), f"unreadable: {error}")
    return _from_anything(data, raw)


def _from_anything(data: Any, raw: msgspec.Raw | bytes) -> KVEvent:
    tag: Any = None
    if isinstance(data, list) and data:
        tag = data[0]
        if isinstance(tag, str) and _FIRST_LENGTHS.get(tag) == len(data):
            first = _attempt(_first_event, raw)
            if isinstance(first, _FirstStored):
                return BlockStored(
                    first.block_hashes,
                    first.parent_block_hash,
                    first.token_ids,
                    first.block_size,
                    first.lora_id,
                    None,
                )
            if first is not None:
                return BlockRemoved(first.block_hashes, None)
    elif isinstance(data, dict):
        tag = data.get("type")
    if not isinstance(tag, str):
        return UnknownEvent(None, data, "no type")
    if tag in ("BlockStored", "BlockRemoved", "AllBlocksCleared"):
        return UnknownEvent(tag, data, f"malformed: {_complaint(data, raw)}")
    return UnknownEvent(tag, data)


def _from_map(event: _MapEvent) -> _ArrayEvent:
    if isinstance(event, _StoredMap):
        return BlockStored(*astuple(event))
    if isinstance(event, _RemovedMap):
        return BlockRemoved(*astuple(event))
    return AllBlocksCleared()


def _attempt(decoder: msgspec.msgpack.Decoder[_T], raw: msgspec.Raw | bytes) -> _T | None:
    try:
        return decoder.decode(raw)
    except _BAD_BYTES:
        return None


def _complaint(data: Any, raw: msgspec.Raw | bytes) -> str:
    try:
        (_array_event if isinstance(data, list) else _map_event).decode(raw)
    except _BAD_BYTES as error:
        return str(error)
    return "no reason found"
