"""Bytes to batches, whatever mixture of encodings and generations arrives.

The usual batch is small and of one encoding, and is decoded in one go. Anything else (a large one, mixed encodings, a
type from the future, a field too few or of another type) is taken apart event by event, a slice of time after the
other, so that what is not understood costs only itself, and a stranger's payload does not stop the loop.
"""

from __future__ import annotations

import math
import time
from typing import Any, TypeVar

import msgspec
from msgspec.structs import astuple

from aioshm.errors import CodecError
from aioshm.events.protocol.messages import (
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    KVEvent,
    KVEventBatch,
    UnknownEvent,
)
from aioshm.events.protocol.wire import Encoding
from aioshm.process.guard import built

# Some thousand times what a step's batch has.
MAX_EVENTS = 1 << 16
# What is decoded in one go, whatever it is.
SMALL_BYTES = 1 << 16
# In an event, of what may hold anything: 20 ms and 5 MB.
_MAX_CONTAINERS = 1 << 16
# In all of a larger batch: random hashes and tokens look like one in 8 bytes.
_BYTES_PER_CONTAINER = 5

# https://github.com/msgpack/msgpack/blob/master/spec.md
_NIL = 0xC0
_ARRAYS = frozenset([0xDC, 0xDD])
_MAPS = frozenset([*range(0x80, 0x90), 0xDE, 0xDF])
_NO_CONTAINERS = bytes(one for one in range(256) if not (one in _MAPS or one in _ARRAYS or 0x90 <= one <= 0x9F))
# How many bytes a number has behind its type, plus that.
_TIME_BYTES = {0xCA: 5, 0xCB: 9, 0xCC: 2, 0xCD: 3, 0xCE: 5, 0xCF: 9, 0xD0: 2, 0xD1: 3, 0xD2: 5, 0xD3: 9}

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


_NONE = msgspec.Raw(b"\xc0")


class _LargeMap(msgspec.Struct, gc=False, tag="BlockStored"):
    """A large ``BlockStored`` with what may hold anything left as it is."""

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: msgspec.Raw = _NONE
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: msgspec.Raw = _NONE


class _LargeArray(msgspec.Struct, array_like=True, gc=False, tag="BlockStored"):
    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: msgspec.Raw = _NONE
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: msgspec.Raw = _NONE


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
_array_batch = built(lambda: msgspec.msgpack.Decoder(_ArrayBatch))
_map_batch = built(lambda: msgspec.msgpack.Decoder(_MapBatch))
_any_batch = built(lambda: msgspec.msgpack.Decoder(_AnyBatch))
_large_map = built(lambda: msgspec.msgpack.Decoder(_LargeMap | _RemovedMap | _ClearedMap))
_large_array = built(lambda: msgspec.msgpack.Decoder(_LargeArray | BlockRemoved | AllBlocksCleared))
_extra_keys = built(lambda: msgspec.msgpack.Decoder(list[tuple[Any, ...] | None] | None))
_lookahead = built(lambda: msgspec.msgpack.Decoder(list[list[int]] | None))
_array_event = built(lambda: msgspec.msgpack.Decoder(_ArrayEvent))
_map_event = built(lambda: msgspec.msgpack.Decoder(_MapEvent))
_first_event = built(lambda: msgspec.msgpack.Decoder(_FirstStored | _FirstRemoved))
_FIRST_LENGTHS = {"BlockStored": 6, "BlockRemoved": 2}  # tag included


class Decoding:
    """One payload on its way to a batch, a slice of time after the other.

    Raises:
        CodecError: These bytes are not a batch at all, or one that is too large.
    """

    def __init__(self, payload: bytes, max_events: int) -> None:
        count, at = _begin(payload)
        if count > max_events:
            raise CodecError(f"not an event batch: {count} events, at most {max_events} are taken")
        if len(payload) > SMALL_BYTES:
            _check_containers(payload, len(payload) // _BYTES_PER_CONTAINER)
        self.maps: bool | None = None if at >= len(payload) or not count else payload[at] in _MAPS
        self._payload = payload
        self._raws: list[msgspec.Raw] | None = None
        self._batch: _AnyBatch | None = None
        self._events: list[KVEvent] = []

    def whole(self) -> KVEventBatch | None:
        """Decode a small one in one go; None where it is not small, or not of one encoding and well-formed."""
        if len(self._payload) > SMALL_BYTES:
            return None
        try:
            if self.maps:
                mapped = _map_batch.decode(self._payload)
                events: list[KVEvent] = [_from_map(event) for event in mapped.events]
                return KVEventBatch(mapped.ts, events, mapped.data_parallel_rank)
            batch = _array_batch.decode(self._payload)
            return KVEventBatch(batch.ts, list(batch.events), batch.data_parallel_rank)
        except _BAD_BYTES:
            return None

    def work(self, deadline: float) -> KVEventBatch | None:
        """Decode event by event until the deadline (``time.perf_counter``); None if some are left."""
        if self._raws is None:
            try:
                self._batch = _any_batch.decode(self._payload)
            except _BAD_BYTES as error:
                raise CodecError(f"not an event batch: {error}") from None
            self._raws = self._batch.events
        assert self._batch is not None
        events, raws = self._events, self._raws
        for index in range(len(events), len(raws)):
            events.append(decode_event(raws[index]))
            if time.perf_counter() > deadline and len(events) < len(raws):
                return None
        return KVEventBatch(self._batch.ts, events, self._batch.data_parallel_rank)


class BatchDecoder:
    """Turns payloads into batches.

    Args:
        max_events: Of one batch; more of them are no batch.
        max_bytes: Of one payload.
    """

    def __init__(self, max_events: int = MAX_EVENTS, max_bytes: int | None = None) -> None:
        self._max_events = max_events
        self._max_bytes = max_bytes
        self._maps = True

    @property
    def encoding(self) -> Encoding:
        """How the last batch that held events was encoded, by its first one; ``"map"`` before the first."""
        return "map" if self._maps else "array"

    def begin(self, payload: bytes) -> KVEventBatch | Decoding:
        """Return the batch in ``payload``, or what there is to do for it where that may take long.

        Raises:
            CodecError: These bytes are not a batch at all, or one that is too large. A single bad event is never
                that: it arrives as an ``UnknownEvent`` with the reason.
        """
        if self._max_bytes is not None and len(payload) > self._max_bytes:
            raise CodecError(
                f"a payload of {len(payload)} bytes, at most {self._max_bytes} are taken: max_payload_bytes"
            )
        decoding = Decoding(payload, self._max_events)
        batch = decoding.whole()
        if decoding.maps is not None:
            self._maps = decoding.maps
        return decoding if batch is None else batch

    def decode(self, payload: bytes) -> KVEventBatch:
        """Return the batch in ``payload``, however long it takes; raises what ``begin`` does."""
        found = self.begin(payload)
        while isinstance(found, Decoding):
            found = found.work(math.inf) or found
        return found


def _begin(payload: bytes) -> tuple[int, int]:
    """Return how many events a batch says it has, and where the first one begins.

    Raises:
        CodecError: It does not begin like a batch.
    """
    try:
        if payload[0] & 0xF0 != 0x90 or payload[0] < 0x92:
            raise CodecError("not an event batch: not an array of a time, events and a rank")
        at = 1 + _TIME_BYTES.get(payload[1], 1)
        kind = payload[at]
        if kind & 0xF0 == 0x90:
            return kind & 0x0F, at + 1
        if kind in _ARRAYS:
            size = 2 if kind == 0xDC else 4
            if len(payload) < at + 1 + size:
                raise IndexError
            return int.from_bytes(payload[at + 1 : at + 1 + size], "big"), at + 1 + size
    except IndexError:
        raise CodecError("not an event batch: cut off") from None
    raise CodecError("not an event batch: no array of events")


def _check_containers(raw: bytes | memoryview, most: int) -> None:
    """Refuse what would become more small objects than anything that means something: each takes 80 times its byte.

    Raises:
        CodecError: More bytes than ``most`` look like the beginning of an array or a map.
    """
    found = len(bytes(raw).translate(None, _NO_CONTAINERS))
    if found > most:
        raise CodecError(f"not an event batch: some {found} nested values in {len(raw)} bytes")


def decode_event(raw: msgspec.Raw | bytes) -> KVEvent:
    """Return the event in ``raw``, well-formed msgpack; never raises for what the event says."""
    view = memoryview(raw)
    first = view[0] if len(view) else _NIL
    maps, arrays = first in _MAPS, 0x90 <= first <= 0x9F or first in _ARRAYS
    complaint = ""
    if len(view) > SMALL_BYTES:
        return _decode_large(raw, view, maps)
    if maps or arrays:
        try:
            return _from_map(_map_event.decode(raw)) if maps else _array_event.decode(raw)
        except _BAD_BYTES as error:
            complaint = str(error)
    try:
        data = msgspec.msgpack.decode(raw)
    except _BAD_BYTES as error:
        return UnknownEvent(None, bytes(raw), f"unreadable: {error}")
    return _from_anything(data, raw, complaint)


def _decode_large(raw: msgspec.Raw | bytes, view: memoryview, maps: bool) -> KVEvent:
    """Decode an event that takes its time; what may hold anything is looked at before it is decoded."""
    try:
        large: _LargeMap | _LargeArray | BlockRemoved | _RemovedMap | AllBlocksCleared | _ClearedMap
        large = (_large_map if maps else _large_array).decode(raw)
        if isinstance(large, (_LargeMap, _LargeArray)):
            for some in (large.extra_keys, large.lookahead_token_ids):
                if len(memoryview(some)) > SMALL_BYTES:
                    _check_containers(memoryview(some), _MAX_CONTAINERS)
            fields = list(astuple(large))
            fields[7] = _extra_keys.decode(large.extra_keys)
            fields[14] = _lookahead.decode(large.lookahead_token_ids)
            return BlockStored(*fields)
        return large if isinstance(large, (BlockRemoved, AllBlocksCleared)) else _from_map(large)
    except _BAD_BYTES as error:
        return UnknownEvent(None, bytes(view), f"malformed, and too large to be looked into: {error}")


def _from_anything(data: Any, raw: msgspec.Raw | bytes, complaint: str) -> KVEvent:
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
        return UnknownEvent(tag, data, f"malformed: {complaint}")
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
