"""Bytes to batches, whatever mixture of encodings and generations arrives.

The usual batch is small and of one encoding, and is decoded in one go. Anything else (a large one, mixed encodings, a
type from the future, a field too few or of another type) is taken apart event by event, a slice of time after the
other, so that what is not understood costs only itself, and a stranger's payload does not stop the loop.
"""

from __future__ import annotations

import math
import time
from types import GenericAlias
from typing import Any, TypeAlias, TypeVar

import msgspec
from msgspec.structs import astuple

from aioshm.errors import CodecError
from aioshm.events.protocol.messages import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    KVEvent,
    KVEventBatch,
    UnknownEvent,
    derived,
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


_NONE = msgspec.Raw(b"\xc0")
# In a large event, what may hold anything is left as it is at first.
_RAW: dict[str, tuple[Any, Any]] = dict.fromkeys(("extra_keys", "lookahead_token_ids"), (msgspec.Raw, _NONE))

_StoredMap, _RemovedMap, _ClearedMap = derived(BlockStored, 4), derived(BlockRemoved, 1), derived(AllBlocksCleared, 0)
# The first generation: nothing yet said where a block lies.
_FirstStored = derived(BlockStored, 5, last=5, array_like=True)
_FirstRemoved = derived(BlockRemoved, 1, last=1, array_like=True)
_LargeMap, _LargeArray = derived(BlockStored, 4, _RAW), derived(BlockStored, 4, _RAW, array_like=True)

_ArrayEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared
_MapEvent: Any = _StoredMap | _RemovedMap | _ClearedMap


def _batch_of(event: Any) -> Any:
    return derived(EventBatch, 2, {"events": (GenericAlias(list, (event,)), None)}, tag=None, array_like=True)


_T = TypeVar("_T")
_array_batch = built(lambda: msgspec.msgpack.Decoder(_batch_of(_ArrayEvent)))
_map_batch = built(lambda: msgspec.msgpack.Decoder(_batch_of(_MapEvent)))
_any_batch = built(lambda: msgspec.msgpack.Decoder(_batch_of(msgspec.Raw)))
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
        self._batch: Any = None  # with its events as they came
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
        if self._batch is None:
            try:
                self._batch = _any_batch.decode(self._payload)
            except _BAD_BYTES as error:
                raise CodecError(f"not an event batch: {error}") from None
        events, raws = self._events, self._batch.events
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
            if first is not None:
                fields = (*astuple(first), None)
                return BlockStored(*fields) if isinstance(first, _FirstStored) else BlockRemoved(*fields)
    elif isinstance(data, dict):
        tag = data.get("type")
    if not isinstance(tag, str):
        return UnknownEvent(None, data, "no type")
    if tag in ("BlockStored", "BlockRemoved", "AllBlocksCleared"):
        return UnknownEvent(tag, data, f"malformed: {complaint}")
    return UnknownEvent(tag, data)


def _from_map(event: Any) -> _ArrayEvent:
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
