"""Batches to bytes, in either of the two encodings that consumers of vLLM's events read, and back.

``"array"``: an event is ``[tag, field, field, ...]``. Fields of the first vLLM releases are always written, later
fields up to the last one that is set, and the newest fields never. ``"map"``: an event is
``{"type": tag, name: field, ...}`` without unset fields.

The native encoder, if it was built, encodes usual batches of maps twice as fast as msgspec. msgspec encodes all
further batches, and reports errors.

A batch of one encoding is decoded in one call. A batch of mixed encodings, or one with an unknown or malformed event,
is decoded event by event: a bad event spoils only itself.

The size of the payload bounds the memory of decoding. Numbers, text, bytes and tokens take at most 25 bytes of memory
for each byte of the payload, lists and maps up to 112.
"""

from __future__ import annotations

from contextlib import suppress
from types import GenericAlias
from typing import TYPE_CHECKING, Any, TypeAlias, Union

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
    KVEvent,
    KVEventBatch,
    UnknownEvent,
)
from aioshm.events.protocol.wire import Encoding

if TYPE_CHECKING:
    from aioshm.events.protocol._encoder import EventEncoder


# How many fields of an event are written even if they are None.
_Counts: TypeAlias = dict[type[KnownEvent], int]
_ALWAYS_IN_ARRAYS: _Counts = {BlockStored: 6, BlockRemoved: 2, AllBlocksCleared: 0}
_ALWAYS_IN_MAPS: _Counts = {BlockStored: 7, BlockRemoved: 2, AllBlocksCleared: 0}


NativeEncoder: type[EventEncoder] | None = None
"""The native encoder, or None if it is not available."""
if native_wanted():
    with suppress(ImportError):  # not built: no compiler, or not for this interpreter
        from aioshm.events.protocol._encoder import EventEncoder

        NativeEncoder = EventEncoder


def _native_encoder() -> EventEncoder | None:
    if NativeEncoder is None:
        return None
    pack = msgspec.msgpack.encode
    kinds = []
    for kind, always in _ALWAYS_IN_MAPS.items():
        fields = kind.__struct_fields__
        head = pack("type") + pack(kind.__name__)
        kinds.append((kind, head, fields, tuple(map(pack, fields)), always))
    try:
        return NativeEncoder(tuple(kinds))
    except TypeError:  # this version of msgspec has another memory layout of structs
        return None


class BatchEncoder:
    """Encodes batches; not thread-safe."""

    def __init__(self, encoding: Encoding = "map", *, native: bool = True) -> None:
        self._native: EventEncoder | None = None
        if native and encoding == "map":
            self._native = _native_encoder()
        self._encode = msgspec.msgpack.Encoder().encode
        self._arrays = encoding == "array"

    def encode(self, batch: EventBatch, rank: int | None) -> bytes:
        """Encode ``batch``, or raise CodecError; ``rank`` is used if the batch names no rank."""
        try:
            own = batch.data_parallel_rank
            if own is not None:
                rank = own
            kind = type(batch)
            if self._native is not None and (kind is EventBatch or kind is KVEventBatch):
                payload = self._native.encode(batch.ts, batch.events, rank)
                if payload is not None:
                    return payload
            events = batch.events
            if self._arrays:
                events = list(map(_to_array, events))
            elif UnknownEvent in map(type, events):
                events = list(map(_without_wrapper, events))
            return self._encode([batch.ts, events, rank, *astuple(batch)[3:]])
        except Exception as error:  # events are of any type, and so are the errors of encoding
            raise CodecError(f"cannot encode this event batch: {error}") from error


def _without_wrapper(event: Any) -> Any:
    return event.data if type(event) is UnknownEvent else event


def _to_array(event: Any) -> Any:
    kind = type(event)
    if not isinstance(event, KVCacheEvent):
        return _without_wrapper(event)  # msgspec encodes any further type, or raises
    fields = astuple(event)[: ARRAY_FIELDS.get(kind)]
    always = _ALWAYS_IN_ARRAYS.get(kind, len(fields))
    end = len(fields)
    while end > always and fields[end - 1] is None:
        end -= 1
    return (event.__struct_config__.tag, *fields[:end])


# Decoding

# Default bound of a payload that a subscriber accepts.
MAX_PAYLOAD_BYTES = 1 << 24
# Bytes of the shortest meaningful event, ["BlockRemoved", []]: bounds the number of events in a payload.
MIN_EVENT_BYTES = 15

# https://github.com/msgpack/msgpack/blob/master/spec.md
_ARRAYS = frozenset([*range(0x90, 0xA0), 0xDC, 0xDD])
_MAPS = frozenset([*range(0x80, 0x90), 0xDE, 0xDF])

_Decoder: TypeAlias = msgspec.msgpack.Decoder[Any]

# msgspec raises these for malformed bytes; the last four for strings, nesting and map keys.
_BAD_BYTES = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TypeError, ValueError, OverflowError)

# How many fields an event must have; the first releases of vLLM, and other engines, omit further fields.
_REQUIRED: _Counts = {BlockStored: 4, BlockRemoved: 1, AllBlocksCleared: 0}
_TAGS = frozenset(kind.__name__ for kind in _REQUIRED)

_public: dict[type, type[KnownEvent]] = {}
"""The public event class for each struct class that is only used while decoding."""


def _struct_of(kind: type[KnownEvent], *, maps: bool) -> Any:
    """Create the struct class that decodes an event in one encoding: its optional fields default to None."""
    last = None if maps else ARRAY_FIELDS[kind]
    fields: list[Any] = []
    for position, field in enumerate(msgspec.structs.fields(kind)[:last]):
        if position < _REQUIRED[kind]:
            fields.append((field.name, field.type))
        else:
            fields.append((field.name, field.type, None))
    struct = msgspec.defstruct(kind.__name__, fields, tag=kind.__name__, array_like=not maps, gc=False)
    _public[struct] = kind
    return struct


def _batch_decoder(events: Any, *, maps: bool) -> _Decoder:
    """Return the decoder of batches that are arrays, or of batches that are maps, as some releases write them."""
    fields: list[Any] = [("ts", float), ("events", events), ("data_parallel_rank", int | None, None)]
    return msgspec.msgpack.Decoder(msgspec.defstruct("EventBatch", fields, array_like=not maps, gc=False))


class _Decoders:
    """The decoders for events of one encoding."""

    def __init__(self, *, maps: bool) -> None:
        union: Any = Union[tuple(_struct_of(kind, maps=maps) for kind in _REQUIRED)]  # noqa: UP007
        self.event: _Decoder = msgspec.msgpack.Decoder(union)
        self.tag: _Decoder = msgspec.msgpack.Decoder(msgspec.defstruct("Tag", [("type", str)], array_like=not maps))
        events = GenericAlias(list, (union,))
        self.batch: list[_Decoder] = [_batch_decoder(events, maps=False), _batch_decoder(events, maps=True)]


_of_arrays = _Decoders(maps=False)
_of_maps = _Decoders(maps=True)
_any_batch = [_batch_decoder(list[msgspec.Raw], maps=False), _batch_decoder(list[msgspec.Raw], maps=True)]


class BatchDecoder:
    """Decodes payloads."""

    def __init__(self, max_bytes: int = MAX_PAYLOAD_BYTES) -> None:
        self.unknown_events: int = 0  # unknown events so far
        self._max_bytes = max_bytes
        self._maps = True

    @property
    def encoding(self) -> Encoding:
        """Encoding of the first event of the last batch that had events; ``"map"`` before the first batch."""
        return "map" if self._maps else "array"

    def decode(self, payload: bytes) -> KVEventBatch:
        """Return the batch, or raise CodecError; a bad event becomes an ``UnknownEvent``."""
        if len(payload) > self._max_bytes:
            raise CodecError(
                f"a payload of {len(payload)} bytes, at most {self._max_bytes} are taken: max_payload_bytes"
            )
        for maps in (self._maps, not self._maps):
            try:
                batch = (_of_maps if maps else _of_arrays).batch[_is_map(payload)].decode(payload)
            except _BAD_BYTES:
                continue
            if batch.events:
                self._maps = maps
            return KVEventBatch(batch.ts, list(map(_as_public, batch.events)), batch.data_parallel_rank)
        return self._decode_by_event(payload)

    def _decode_by_event(self, payload: bytes) -> KVEventBatch:
        """Decode a batch of mixed encodings, or with bad events."""
        try:
            batch = _any_batch[_is_map(payload)].decode(payload)
        except _BAD_BYTES as error:
            raise CodecError(f"not an event batch: {error}") from None
        count = len(batch.events)
        most = self._max_bytes // MIN_EVENT_BYTES
        if count > most:
            raise CodecError(f"a batch of {count} events, at most {most} are taken: max_payload_bytes")
        if count:
            self._maps = _is_map(batch.events[0])
        events = list(map(_decode_event, batch.events))
        self.unknown_events += sum(isinstance(event, UnknownEvent) for event in events)
        return KVEventBatch(batch.ts, events, batch.data_parallel_rank)


def _decode_event(raw: msgspec.Raw) -> KVEvent:
    """Decode one event, known or not."""
    first = memoryview(raw)[0]
    if first in _MAPS:
        decoders = _of_maps
    elif first in _ARRAYS:
        decoders = _of_arrays
    else:
        return _unknown(None, raw, "no type")
    try:
        return _as_public(decoders.event.decode(raw))
    except _BAD_BYTES as error:
        reason = f"malformed: {error}"
    try:
        tag = decoders.tag.decode(raw).type
    except _BAD_BYTES:
        return _unknown(None, raw, "no type")
    if tag not in _TAGS:
        reason = "unknown type"
    return _unknown(tag, raw, reason)


def _unknown(tag: str | None, raw: msgspec.Raw, reason: str) -> UnknownEvent:
    try:
        data = msgspec.msgpack.decode(raw)
    except _BAD_BYTES as error:
        data = msgspec.Raw(bytes(memoryview(raw)))  # a copy, which does not keep the payload alive
        reason = f"unreadable: {error}"
    return UnknownEvent(tag, data, reason)


def _as_public(event: Any) -> KnownEvent:
    return _public[type(event)](*astuple(event))


def _is_map(value: bytes | msgspec.Raw) -> bool:
    view = memoryview(value)
    return len(view) > 0 and view[0] in _MAPS
