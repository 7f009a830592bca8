"""Bytes to batches, in either encoding and of every generation.

A batch of one encoding that is small is decoded in one call. A large batch, one of mixed encodings, or one with an
event that is unknown or malformed is decoded event by event, a slice of time after the other: a bad event costs only
itself, and a large payload does not stop the loop.

The size of the payload bounds what decoding takes. Numbers, text, bytes and tokens take at most 25 bytes of memory for
each byte of the payload. Lists and maps take up to 112, so in a large batch the fields and the events that may hold
anything are counted before they are decoded.
"""

from __future__ import annotations

import math
import time
from types import GenericAlias
from typing import Any, TypeAlias

import msgspec
from msgspec.structs import astuple

from aioshm.codec.walk import count_values
from aioshm.errors import CodecError
from aioshm.events.protocol.messages import (
    ARRAY_FIELDS,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    KnownEvent,
    KVEvent,
    KVEventBatch,
    UnknownEvent,
    derived,
)
from aioshm.events.protocol.wire import Encoding

# Default bound of a payload that a subscriber takes.
MAX_PAYLOAD_BYTES = 1 << 24
# The shortest event that says anything, ["BlockRemoved", []]: a batch cannot have more of them than fit its payload.
MIN_EVENT_BYTES = 15
# For so many bytes that a payload may have, one value in fields and events that may hold anything.
BYTES_PER_VALUE = 16
# A batch of this size is decoded in one call, whatever it holds: at most 7 MB, 25 ms.
SMALL_BYTES = 1 << 16

# https://github.com/msgpack/msgpack/blob/master/spec.md
_NIL = 0xC0
_ARRAYS = frozenset([*range(0x90, 0xA0), 0xDC, 0xDD])
_MAPS = frozenset([*range(0x80, 0x90), 0xDE, 0xDF])

_Decoder: TypeAlias = msgspec.msgpack.Decoder[Any]

# What msgspec raises for bytes from strangers; the last four for strings, nesting and map keys.
_BAD_BYTES = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TypeError, ValueError, OverflowError)

# How many fields an event must have; the first generations of vLLM, and other engines, leave the others out.
_REQUIRED: dict[type[KnownEvent], int] = {BlockStored: 4, BlockRemoved: 1, AllBlocksCleared: 0}
# The fields that may hold lists and maps without an end: in a large batch they are counted first.
_OPEN_FIELDS = ("extra_keys", "lookahead_token_ids", "mm_keys")
_NONE = msgspec.Raw(bytes([_NIL]))
_RAW_FIELDS: dict[str, tuple[Any, Any]] = dict.fromkeys(_OPEN_FIELDS, (msgspec.Raw, _NONE))

_public: dict[type, type[KnownEvent]] = {}
"""Which event a struct becomes that stands for it while it is decoded."""


def _decoder(kind: Any) -> _Decoder:
    return msgspec.msgpack.Decoder(kind)


def _events(maps: bool, replaced: dict[str, tuple[Any, Any]]) -> Any:
    """Return the union of the structs that stand for the known events in one encoding."""
    union: Any = None
    for kind, required in _REQUIRED.items():
        last = None if maps else ARRAY_FIELDS[kind]
        struct = derived(kind, required, replaced, last=last, array_like=not maps)
        _public[struct] = kind
        union = struct if union is None else union | struct
    return union


def _batches(events: Any) -> list[_Decoder]:
    """Return the decoders of batches that are arrays, and of those that are maps, as some releases write them."""
    fields = {"events": (events, None)}
    return [_decoder(derived(EventBatch, 2, fields, tag=None, array_like=not maps)) for maps in (False, True)]


# Each pair is for arrays and for maps.
_small_batch = [_batches(GenericAlias(list, (_events(maps, {}),))) for maps in (False, True)]
_any_batch = _batches(msgspec.Raw)
_raw_events: msgspec.msgpack.Decoder[list[msgspec.Raw]] = _decoder(list[msgspec.Raw])
_event = [_decoder(_events(maps, _RAW_FIELDS)) for maps in (False, True)]
_tag = [_decoder(msgspec.defstruct("Tag", [("type", str)], array_like=not maps)) for maps in (False, True)]
_open_fields = {
    at: (field.name, _decoder(field.type))
    for at, field in enumerate(msgspec.structs.fields(BlockStored))
    if field.name in _OPEN_FIELDS
}
_open_at = [[at for at in _open_fields if maps or at < ARRAY_FIELDS[BlockStored]] for maps in (False, True)]


class _TooManyValuesError(Exception):
    """A field has more values than are left to its batch."""


class Decoding:
    """One payload that is decoded event by event, a slice of time after the other."""

    def __init__(self, payload: bytes, max_events: int, max_values: int) -> None:
        try:
            self._batch = _any_batch[_is_map(payload)].decode(payload)
        except _BAD_BYTES as error:
            raise CodecError(f"not an event batch: {error}") from None
        count = _length(memoryview(self._batch.events))
        if count is None:
            raise CodecError("not an event batch: no array of events")
        if count > max_events:
            raise CodecError(f"a batch of {count} events, at most {max_events} are taken: max_payload_bytes")
        self.maps: bool | None = None  # whether the first event is a map; None if there is no event
        self.unknown: UnknownEvent | None = None  # the first event so far that is not understood
        self.unknown_events: int = 0  # how many are not
        self._values_left = max_values
        self._raws = _raw_events.decode(self._batch.events)
        self._events: list[KVEvent] = []
        if self._raws:
            self.maps = _is_map(self._raws[0])

    def work(self, deadline: float) -> KVEventBatch | None:
        """Decode events until the deadline (``time.perf_counter``); None if some are left."""
        events, raws = self._events, self._raws
        for index in range(len(events), len(raws)):
            event = self._decode(raws[index])
            if isinstance(event, UnknownEvent):
                self.unknown = self.unknown or event
                self.unknown_events += 1
            events.append(event)
            if time.perf_counter() > deadline and len(events) < len(raws):
                return None
        return KVEventBatch(self._batch.ts, events, self._batch.data_parallel_rank)

    def _decode(self, raw: msgspec.Raw) -> KVEvent:
        """Decode one event; it may say anything."""
        first = memoryview(raw)[0]
        maps = first in _MAPS
        if not maps and first not in _ARRAYS:
            return self._unknown(None, raw, "no type")
        try:
            found = _event[maps].decode(raw)
            kind = _public[type(found)]
            fields = [*astuple(found)]
            if kind is BlockStored:
                for at in _open_at[maps]:
                    fields[at] = None if fields[at] is _NONE else self._decode_field(fields[at], *_open_fields[at])
            return kind(*fields)
        except _TooManyValuesError as error:
            return UnknownEvent(kind.__name__, _copied(raw), str(error))
        except _BAD_BYTES as error:
            reason = str(error)
        try:
            tag = _tag[maps].decode(raw).type
        except _BAD_BYTES:
            return self._unknown(None, raw, "no type")
        known = any(tag == kind.__name__ for kind in _REQUIRED)
        return self._unknown(tag, raw, f"malformed: {reason}" if known else "unknown type")

    def _decode_field(self, raw: msgspec.Raw, name: str, decoder: _Decoder) -> Any:
        if not self._can_afford(raw):
            raise _TooManyValuesError(f"{name} has too many values")
        try:
            return decoder.decode(raw)
        except _BAD_BYTES as error:
            raise ValueError(f"{error}, in {name}") from None

    def _unknown(self, tag: str | None, raw: msgspec.Raw, reason: str) -> UnknownEvent:
        data: Any = _copied(raw)
        if self._can_afford(raw):
            try:
                data = msgspec.msgpack.decode(raw)
            except _BAD_BYTES as error:
                reason = f"unreadable: {error}"
        return UnknownEvent(tag, data, reason)

    def _can_afford(self, raw: msgspec.Raw) -> bool:
        """Whether the values in ``raw`` still fit what this batch may have; they count from then on."""
        count = count_values(memoryview(raw), self._values_left)
        if count > self._values_left:
            return False
        self._values_left -= count
        return True


class BatchDecoder:
    """Turns payloads into batches."""

    def __init__(self, max_bytes: int = MAX_PAYLOAD_BYTES) -> None:
        self._max_bytes = max_bytes
        self._max_events = max_bytes // MIN_EVENT_BYTES
        self._max_values = max(max_bytes // BYTES_PER_VALUE, SMALL_BYTES)
        self._maps = True

    @property
    def encoding(self) -> Encoding:
        """How the last batch that held events was encoded, by its first one; ``"map"`` before the first."""
        return "map" if self._maps else "array"

    def begin(self, payload: bytes) -> KVEventBatch | Decoding:
        """Return the batch in ``payload``, or the work that is left where that may take long.

        A payload that is no batch raises CodecError; a single bad event becomes an ``UnknownEvent`` with the reason.
        """
        if len(payload) > self._max_bytes:
            raise CodecError(
                f"a payload of {len(payload)} bytes, at most {self._max_bytes} are taken: max_payload_bytes"
            )
        if len(payload) <= SMALL_BYTES:
            for maps in (self._maps, not self._maps):
                batch = _decode_small(payload, maps)
                if batch is not None:
                    if batch.events:
                        self._maps = maps
                    return batch
        decoding = Decoding(payload, self._max_events, self._max_values)
        if decoding.maps is not None:
            self._maps = decoding.maps
        return decoding

    def decode(self, payload: bytes) -> KVEventBatch:
        """Return the batch in ``payload``, however long it takes; raises the errors of ``begin``."""
        found = self.begin(payload)
        while isinstance(found, Decoding):
            found = found.work(math.inf) or found
        return found


def _decode_small(payload: bytes, maps: bool) -> KVEventBatch | None:
    """Decode a batch in one call; None where its events are of the other encoding, or one is not understood."""
    try:
        batch = _small_batch[maps][_is_map(payload)].decode(payload)
    except _BAD_BYTES:
        return None
    events: list[KVEvent] = [_public[type(event)](*astuple(event)) for event in batch.events]
    return KVEventBatch(batch.ts, events, batch.data_parallel_rank)


def _copied(raw: msgspec.Raw) -> msgspec.Raw:
    """Return a copy, which does not keep the payload."""
    return msgspec.Raw(bytes(memoryview(raw)))


def _is_map(value: bytes | msgspec.Raw) -> bool:
    view = memoryview(value)
    return len(view) > 0 and view[0] in _MAPS


def _length(array: memoryview) -> int | None:
    """Return how many items a well-formed array has; None if it is none."""
    kind = array[0]
    if kind & 0xF0 == 0x90:
        return kind & 0x0F
    if kind in _ARRAYS:
        return int.from_bytes(array[1 : 3 if kind == 0xDC else 5], "big")
    return None
