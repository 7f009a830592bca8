"""Batches to bytes, in either of the two encodings that consumers of vLLM's events read, and back.

``"array"``: an event is ``[tag, field, field, ...]``. Fields of the first vLLM releases are always written, later
fields up to the last one that is set, and the newest fields never. ``"map"``: an event is
``{"type": tag, name: field, ...}`` without unset fields.

The native encoder, if it was built, encodes usual batches of maps twice as fast as msgspec. msgspec encodes all
further batches, and reports errors.

A small batch of one encoding is decoded in one call. A large batch, a batch of mixed encodings, or one with an
unknown or malformed event is decoded event by event: a bad event spoils only itself.

The size of the payload bounds the memory of decoding. Numbers, text, bytes and tokens take at most 25 bytes of memory
for each byte of the payload. Lists and maps take up to 112, so in a large batch the decoder counts the values of fields
and events that may contain lists and maps before it decodes them.
"""

from __future__ import annotations

from types import GenericAlias
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
from msgspec.structs import astuple

from aioshm.codec.msgpack import count_values
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
    derived,
)
from aioshm.events.protocol.wire import ENCODINGS, Encoding

if TYPE_CHECKING:
    from aioshm.events.protocol._encoder import EventEncoder


# How many fields of an event are written even if they are None.
_Counts: TypeAlias = dict[type[KnownEvent], int]
_ALWAYS_IN_ARRAYS: _Counts = {BlockStored: 6, BlockRemoved: 2, AllBlocksCleared: 0}
_ALWAYS_IN_MAPS: _Counts = {BlockStored: 7, BlockRemoved: 2, AllBlocksCleared: 0}


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
        if encoding not in ENCODINGS:
            raise ValueError(f"encoding must be one of {ENCODINGS}, not {encoding!r}")
        self._native: EventEncoder | None = None
        if native and encoding == "map":
            self._native = _native_encoder()
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
# Accepted payload bytes per value in fields and events that may contain lists and maps.
BYTES_PER_VALUE = 16
# A batch of this size is decoded in one call, whatever it contains: at most 7 MB, 25 ms.
SMALL_BYTES = 1 << 16

# https://github.com/msgpack/msgpack/blob/master/spec.md
_NIL = 0xC0
_ARRAYS = frozenset([*range(0x90, 0xA0), 0xDC, 0xDD])
_MAPS = frozenset([*range(0x80, 0x90), 0xDE, 0xDF])

_Decoder: TypeAlias = msgspec.msgpack.Decoder[Any]

# msgspec raises these for malformed bytes; the last four for strings, nesting and map keys.
_BAD_BYTES = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TypeError, ValueError, OverflowError)

# How many fields an event must have; the first releases of vLLM, and other engines, omit further fields.
_REQUIRED: dict[type[KnownEvent], int] = {BlockStored: 4, BlockRemoved: 1, AllBlocksCleared: 0}
_TAGS = frozenset(kind.__name__ for kind in _REQUIRED)
# Fields that may contain lists and maps of any size: in a large batch their values are counted first.
_OPEN_FIELDS = ("extra_keys", "lookahead_token_ids", "mm_keys")
_NONE = msgspec.Raw(bytes([_NIL]))
_RAW_FIELDS: dict[str, tuple[Any, Any]] = dict.fromkeys(_OPEN_FIELDS, (msgspec.Raw, _NONE))

_public: dict[type, type[KnownEvent]] = {}
"""The public event class for each struct class that is only used while decoding."""


def _decoder(kind: Any) -> _Decoder:
    return msgspec.msgpack.Decoder(kind)


def _union(maps: bool, replaced: dict[str, tuple[Any, Any]]) -> Any:
    """Return the union of the struct classes of the known events in one encoding."""
    union: Any = None
    for kind, required in _REQUIRED.items():
        last = ARRAY_FIELDS[kind] if not maps else None
        struct = derived(kind, required, replaced, last=last, array_like=not maps)
        _public[struct] = kind
        if union is None:
            union = struct
        else:
            union |= struct
    return union


def _batch_decoders(events: Any) -> list[_Decoder]:
    """Return the decoders of batches that are arrays, and of batches that are maps, as some releases write them."""
    fields = {"events": (events, None)}
    return [_decoder(derived(EventBatch, 2, fields, tag=None, array_like=not maps)) for maps in (False, True)]


class _EventDecoders:
    """The decoders for events of one encoding."""

    def __init__(self, *, maps: bool) -> None:
        self.small_batch = _batch_decoders(GenericAlias(list, (_union(maps, {}),)))
        self.event = _decoder(_union(maps, _RAW_FIELDS))
        self.tag = _decoder(msgspec.defstruct("Tag", [("type", str)], array_like=not maps))
        self.open_fields: list[tuple[int, str, _Decoder]] = []  # position, name and decoder, of `BlockStored`
        for position, field in enumerate(msgspec.structs.fields(BlockStored)):
            if field.name in _OPEN_FIELDS and (maps or position < ARRAY_FIELDS[BlockStored]):
                self.open_fields.append((position, field.name, _decoder(field.type)))


_of_arrays = _EventDecoders(maps=False)
_of_maps = _EventDecoders(maps=True)
_any_batch = _batch_decoders(msgspec.Raw)
_raw_events: msgspec.msgpack.Decoder[list[msgspec.Raw]] = _decoder(list[msgspec.Raw])


class _EventDecoder:
    """Decodes the events of one batch one by one."""

    def __init__(self, max_values: int) -> None:
        self._values_left = max_values

    def decode(self, raw: msgspec.Raw) -> KVEvent:
        """Decode one event, known or not."""
        first = memoryview(raw)[0]
        if first in _MAPS:
            decoders = _of_maps
        elif first in _ARRAYS:
            decoders = _of_arrays
        else:
            return self._unknown(None, raw, "no type")
        try:
            found = decoders.event.decode(raw)
            kind = _public[type(found)]
            fields = [*astuple(found)]
            if kind is BlockStored:
                self._decode_open_fields(fields, decoders)
            return kind(*fields)
        except CodecError as error:
            return UnknownEvent(kind.__name__, _copied(raw), str(error))
        except _BAD_BYTES as error:
            reason = f"malformed: {error}"
        try:
            tag = decoders.tag.decode(raw).type
        except _BAD_BYTES:
            return self._unknown(None, raw, "no type")
        if tag not in _TAGS:
            reason = "unknown type"
        return self._unknown(tag, raw, reason)

    def _decode_open_fields(self, fields: list[Any], decoders: _EventDecoders) -> None:
        for position, name, decoder in decoders.open_fields:
            raw = fields[position]
            if raw is _NONE:
                fields[position] = None
                continue
            if not self._can_afford(raw):
                raise CodecError(f"{name} has too many values")
            try:
                fields[position] = decoder.decode(raw)
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
        """Charge the values in ``raw`` to this batch; False if the batch has fewer left."""
        count = count_values(memoryview(raw), self._values_left)
        if count > self._values_left:
            return False
        self._values_left -= count
        return True


class BatchDecoder:
    """Decodes payloads."""

    def __init__(self, max_bytes: int = MAX_PAYLOAD_BYTES) -> None:
        self.unknown_events: int = 0  # unknown events so far
        self._max_bytes = max_bytes
        self._max_events = max_bytes // MIN_EVENT_BYTES
        self._max_values = max(max_bytes // BYTES_PER_VALUE, SMALL_BYTES)
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
        if len(payload) <= SMALL_BYTES:
            for maps in (self._maps, not self._maps):
                batch = _decode_small(payload, maps)
                if batch is not None:
                    if batch.events:
                        self._maps = maps
                    return batch
        try:
            batch = _any_batch[_is_map(payload)].decode(payload)
        except _BAD_BYTES as error:
            raise CodecError(f"not an event batch: {error}") from None
        count = _length(memoryview(batch.events))
        if count is None:
            raise CodecError("not an event batch: no array of events")
        if count > self._max_events:
            most = self._max_events
            raise CodecError(f"a batch of {count} events, at most {most} are taken: max_payload_bytes")
        raws = _raw_events.decode(batch.events)
        if raws:
            self._maps = _is_map(raws[0])
        events = list(map(_EventDecoder(self._max_values).decode, raws))
        self.unknown_events += sum(isinstance(event, UnknownEvent) for event in events)
        return KVEventBatch(batch.ts, events, batch.data_parallel_rank)


def _decode_small(payload: bytes, maps: bool) -> KVEventBatch | None:
    """Decode a batch in one call; None if an event is malformed, unknown, or of the other encoding."""
    decoders = _of_maps if maps else _of_arrays
    try:
        batch = decoders.small_batch[_is_map(payload)].decode(payload)
    except _BAD_BYTES:
        return None
    events: list[KVEvent] = [_public[type(event)](*astuple(event)) for event in batch.events]
    return KVEventBatch(batch.ts, events, batch.data_parallel_rank)


def _copied(raw: msgspec.Raw) -> msgspec.Raw:
    """Return a copy, which does not keep the payload alive."""
    return msgspec.Raw(bytes(memoryview(raw)))


def _is_map(value: bytes | msgspec.Raw) -> bool:
    view = memoryview(value)
    return len(view) > 0 and view[0] in _MAPS


def _length(array: memoryview) -> int | None:
    """Return the item count in the head of an array; None if this is no array."""
    kind = array[0]
    if kind & 0xF0 == 0x90:
        return kind & 0x0F
    if kind == 0xDC:
        return int.from_bytes(array[1:3], "big")
    if kind == 0xDD:
        return int.from_bytes(array[1:5], "big")
    return None
