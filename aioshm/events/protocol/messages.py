"""Event batches in vLLM's wire format, and the deliveries of a subscriber.

The event classes keep vLLM's names, field order and defaults: the order *is* the wire format of the array encoding.
msgspec encodes them as the maps of vLLM 0.24 and newer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec
from msgspec.structs import astuple

from aioshm.errors import EventsLost, PublisherDisconnected, PublisherRestarted

BlockHash: TypeAlias = int | bytes
TokenId: TypeAlias = int | str | tuple[int, int]

MEDIUM_GPU = "GPU"
MEDIUM_CPU = "CPU"
MEDIUM_STORAGE = "STORAGE"


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Events of one scheduler step; always an array on the wire.

    Attributes:
        ts: Creation time in seconds since the epoch, by the publisher's clock.
        events: The events in the order in which they happened.
        data_parallel_rank: Rank of the publisher. None: the publisher fills in its own rank.
    """

    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class KVCacheEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Base of every KV-cache event; hashable, and a map on the wire, tagged with the name of the class."""

    def __hash__(self) -> int:
        return hash((type(self).__name__, *map(hashable, astuple(self))))


class BlockStored(KVCacheEvent):
    """The publisher's cache now holds these blocks, which follow each other on one path.

    Attributes:
        block_hashes: The blocks, first to last. A hash is a 64-bit number, signed or unsigned, or bytes.
        parent_block_hash: The block before the first block; None at the start of a prompt.
        token_ids: The tokens of all blocks, ``block_size`` per block. TensorRT-LLM writes text for tokens of
            images, SGLang writes pairs of tokens while it speculates with EAGLE.
        block_size: Tokens per block.
        lora_id: Superseded by ``lora_name``.
        medium: Storage of the blocks: ``"GPU"``, ``"CPU"``, ``"STORAGE"``, or None if the publisher does not
            say.
        lora_name: The adapter that the blocks belong to.
        extra_keys: Further input of each block's hash (images, salt), one entry per block.
        group_idx: The cache group of a hybrid model.
        kv_cache_spec_kind: The kind of attention that the group serves.
        kv_cache_spec_sliding_window: The attention window of the group, in tokens.
        locality: ``"LOCAL"`` or ``"REMOTE"``, from the publisher's point of view.
        ownership: The offloading tier that holds the blocks.
        session_id: The session whose request stored or reused the blocks.
        lookahead_token_ids: Tokens beyond each block that are part of its hash, one list per block.
        mm_keys: TensorRT-LLM's keys of images and other media, one list of maps per block. Only the map
            encoding has this field.
    """

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: Sequence[TokenId]
    block_size: int
    lora_id: int | None
    medium: str | None
    # The default is a factory so that msgspec always writes the key: consumers of maps require this key.
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
    """The cache group ``group_idx`` no longer holds these blocks in ``medium``.

    Attributes:
        block_hashes: The blocks.
        medium: Former storage of the blocks.
        group_idx: The cache group of a hybrid model.
        locality: ``"LOCAL"`` or ``"REMOTE"``, from the publisher's point of view.
        ownership: The offloading tier that held the blocks.
        remaining_copy_counts: Copies left of each block. Only the map encoding has this field.
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
    """An event of a type that this version does not know, or a malformed event of a known type.

    Published again, the event is written as it was received.

    Attributes:
        type: The tag, or None if the tag is unreadable.
        data: The event as received: a list or a dict, tag included; a ``msgspec.Raw`` if it cannot be
            decoded.
        reason: Why the event is not a known event.
    """

    type: str | None
    data: Any
    reason: str = "unknown type"

    def __hash__(self) -> int:
        return hash((self.type, hashable(self.data)))


KnownEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared
KVEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared | UnknownEvent

# The array encoding identifies fields by position. No engine writes newer fields in arrays, so only maps carry them.
ARRAY_FIELDS: dict[type[KnownEvent], int] = {BlockStored: 15, BlockRemoved: 5, AllBlocksCleared: 0}


class KVEventBatch(EventBatch):
    """A batch of KV-cache events, as a subscriber returns it."""

    events: list[KVEvent]


def hashable(value: Any) -> Any:
    """Return a hashable stand-in for ``value``; equal values have equal stand-ins."""
    if isinstance(value, (list, tuple)):
        return tuple(map(hashable, value))
    if isinstance(value, dict):
        return frozenset((key, hashable(item)) for key, item in value.items())
    if isinstance(value, (bytearray, msgspec.Raw)):
        return bytes(value)
    if isinstance(value, msgspec.msgpack.Ext):
        return value.code, bytes(value.data)
    return value


# Deliveries


@dataclass(frozen=True, slots=True)
class Source:
    """One publisher, as a subscriber identifies it.

    Attributes:
        endpoint: The endpoint of its batches.
        topic: The first frame of its messages. None, permanently, if the first batch came from an old replay
            port, which sends no topic.
        rank: Its data-parallel rank, or None if its batches name no rank.
    """

    endpoint: str
    topic: bytes | None
    rank: int | None

    def __str__(self) -> str:
        topic = f" topic {self.topic.decode(errors='replace')}" if self.topic else ""
        return f"{self.endpoint}{topic} rank {self.rank}"


@dataclass(frozen=True, slots=True)
class Received:
    """A batch, in its publisher's order.

    Attributes:
        source: The publisher.
        seq: The batch's number.
        batch: The batch.
        payload: The encoded batch as received.
        replayed: True if the batch came from the replay port, False if it came live.
    """

    source: Source
    seq: int
    batch: KVEventBatch
    payload: bytes
    replayed: bool


@dataclass(frozen=True, slots=True)
class Lost:
    """The batches ``first`` to ``last`` of a publisher are lost.

    Attributes:
        source: The publisher.
        first: The first lost number.
        last: The last lost number.
        reason: Why they could not be replayed.
    """

    source: Source
    first: int
    last: int
    reason: str

    def error(self) -> EventsLost:
        """Return the error that ``async for`` raises for this delivery."""
        error = EventsLost(self.first, self.last)
        error.add_note(f"publisher {self.source}: {self.reason}")
        return error


@dataclass(frozen=True, slots=True)
class Restarted:
    """A publisher restarted, or may have restarted; its batches count from 0 again.

    A publisher's numbers go back when its process is replaced. If the connection broke and no replay confirms that
    the process is the same, the subscriber assumes a new process: the numbers before the next batch then follow as
    `Lost`.

    Attributes:
        source: The publisher.
        expected: The number that should have come next.
        reason: How the subscriber noticed.
    """

    source: Source
    expected: int
    reason: str = "its numbers went back"

    def error(self) -> PublisherRestarted:
        """Return the error that ``async for`` raises for this delivery."""
        error = PublisherRestarted(self.source, self.expected)
        error.add_note(self.reason)
        return error


@dataclass(frozen=True, slots=True)
class PublisherGone:
    """A publisher is gone: the subscriber forgets the publisher, and its consumer should, too.

    The publisher's connection ended, or its replay port answers without its batches, and no batch of the publisher
    arrived within the subscriber's ``gone_after_s``. A publisher that comes back is new: its batches are delivered from
    the subscriber's ``start`` on.

    Attributes:
        source: The publisher.
        expected: The number that should have come next.
        after_s: Seconds since the publisher was last heard.
    """

    source: Source
    expected: int
    after_s: float

    def error(self) -> PublisherDisconnected:
        """Return the error that ``async for`` raises for this delivery."""
        return PublisherDisconnected(self.source, self.after_s)


Delivery: TypeAlias = Received | Lost | Restarted | PublisherGone
