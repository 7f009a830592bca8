"""What is published: batches of KV-cache events, as vLLM writes them.

The classes keep vLLM's names, order and defaults, because the order *is* the wire format of the array encoding.
msgspec encodes them as the maps of vLLM 0.24 and newer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec
from msgspec.structs import astuple

BlockHash: TypeAlias = int | bytes
TokenId: TypeAlias = int | str | tuple[int, int]

MEDIUM_GPU = "GPU"
MEDIUM_CPU = "CPU"
MEDIUM_STORAGE = "STORAGE"


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Events that one scheduler step produced; always an array on the wire.

    Attributes:
        ts: When the batch was made, in seconds since the epoch, by the publisher's clock.
        events: The events, in the order in which they happened.
        data_parallel_rank: Which rank published it; the publisher fills it in when it is None.
    """

    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class KVCacheEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """The base of every KV-cache event; hashable, and a map on the wire, tagged with the name of its class."""

    def __hash__(self) -> int:
        return hash((type(self).__name__, *map(hashable, astuple(self))))


class BlockStored(KVCacheEvent):
    """Blocks are now held by the publisher's cache, one after the other on the same path.

    Attributes:
        block_hashes: The blocks, first to last; each a 64-bit number, signed or unsigned, or bytes.
        parent_block_hash: The block before the first one, or None at the start of a prompt.
        token_ids: The tokens of all the blocks, ``block_size`` a block. TensorRT-LLM writes text for tokens of
            images, SGLang pairs of tokens while it speculates with EAGLE.
        block_size: Tokens in a block.
        lora_id: Superseded by ``lora_name``.
        medium: Where the blocks lie: ``"GPU"``, ``"CPU"``, ``"STORAGE"``; None from publishers that do not
            say.
        lora_name: The adapter that the blocks belong to.
        extra_keys: What else went into each block's hash (images, salt), one entry a block.
        group_idx: The cache group of a hybrid model.
        kv_cache_spec_kind: What kind of attention the group serves.
        kv_cache_spec_sliding_window: The group's window, in tokens.
        locality: ``"LOCAL"`` or ``"REMOTE"``, as the publisher sees it.
        ownership: Which offloading tier holds the blocks.
        session_id: The session whose request stored or reused them.
        lookahead_token_ids: Tokens beyond each block that went into its hash, one list a block.
        mm_keys: TensorRT-LLM's keys of images and other media, one list of maps a block. Only maps carry them.
    """

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: Sequence[TokenId]
    block_size: int
    lora_id: int | None
    medium: str | None
    # Never left out, as a default that is no factory is: the consumers that read maps require the key.
    lora_name: str | None = msgspec.field(default_factory=type(None))
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: list[list[int]] | None = None
    mm_keys: list[Any] | None = None


class BlockRemoved(KVCacheEvent):
    """Blocks are no longer held in ``medium`` by the cache group ``group_idx``.

    Attributes:
        block_hashes: The blocks.
        medium: Where they lay.
        group_idx: The cache group of a hybrid model.
        locality: ``"LOCAL"`` or ``"REMOTE"``, as the publisher sees it.
        ownership: Which offloading tier held the blocks.
        remaining_copy_counts: How many copies of each block are left. Only maps carry it.
    """

    block_hashes: list[BlockHash]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None
    remaining_copy_counts: list[int] | None = None


class AllBlocksCleared(KVCacheEvent):
    """The publisher's cache is empty."""


@dataclass(frozen=True, slots=True)
class UnknownEvent:
    """An event of a type that this version does not know, or one of a known type that is malformed.

    Published again, it goes out as it came in.

    Attributes:
        type: Its tag, or None where even that is unreadable.
        data: The event as it was on the wire: a list or a dict, tag included; a ``msgspec.Raw`` where decoding
            would make too many objects.
        reason: Why it is not one of the known events.
    """

    type: str | None
    data: Any
    reason: str = "unknown type"

    def __hash__(self) -> int:
        return hash((self.type, hashable(self.data)))


KnownEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared
KVEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared | UnknownEvent

# In an array the place says which field a value is. No engine writes newer fields in arrays: maps alone carry them.
ARRAY_FIELDS: dict[type[KnownEvent], int] = {BlockStored: 15, BlockRemoved: 5, AllBlocksCleared: 0}


class KVEventBatch(EventBatch):
    """A batch whose events are KV-cache events; what a subscriber yields."""

    events: list[KVEvent]


def hashable(value: Any) -> Any:
    """Return a hashable stand-in for ``value``; equal values have equal ones."""
    if isinstance(value, (list, tuple)):
        return tuple(map(hashable, value))
    if isinstance(value, dict):
        return frozenset((key, hashable(item)) for key, item in value.items())
    if isinstance(value, (bytearray, msgspec.Raw)):
        return bytes(value)
    return value


def derived(
    kind: type[msgspec.Struct],
    required: int,
    replaced: Mapping[str, tuple[Any, Any]] = {},  # never changed
    *,
    last: int | None = None,
    **options: Any,
) -> Any:
    """Return a struct class with the fields of an event, or of a batch, in another form on the wire.

    Args:
        kind: The class.
        required: How many fields a message must have; the others are None by default.
        replaced: Other types, and defaults, of fields by their names.
        last: How many fields there are; None: all.
        options: Of `msgspec.defstruct`.
    """
    fields: list[Any] = []
    for field in msgspec.structs.fields(kind)[:last]:
        wanted, default = replaced.get(field.name, (field.type, None))
        fields.append((field.name, wanted) if len(fields) < required else (field.name, wanted, default))
    return msgspec.defstruct(kind.__name__, fields, **{"tag": kind.__name__, "gc": False, **options})
