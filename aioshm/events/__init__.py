"""KV-cache events in the wire format of vLLM: publishers, subscribers, replay."""

from aioshm.errors import PublisherClosed, PublisherDisconnected, PublisherRestarted
from aioshm.events.config import KVEventsConfig, PublisherOptions, SubscriberOptions
from aioshm.events.protocol.index import BlockIndex, KVEventAggregator, Shelf, follow
from aioshm.events.protocol.messages import (
    MEDIUM_CPU,
    MEDIUM_GPU,
    MEDIUM_STORAGE,
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    Delivery,
    EventBatch,
    KVCacheEvent,
    KVEvent,
    KVEventBatch,
    Lost,
    PublisherGone,
    Received,
    Restarted,
    Source,
    TokenId,
    UnknownEvent,
)
from aioshm.events.protocol.outbox import PublisherStats
from aioshm.events.protocol.tracker import SubscriberStats
from aioshm.events.protocol.wire import Wire
from aioshm.events.publish.publisher import EventPublisher, NullEventPublisher, ZmqEventPublisher
from aioshm.events.publish.threaded import EventPublisherFactory, ThreadedEventPublisher
from aioshm.events.subscribe.subscriber import EventSubscriber
from aioshm.zeromq.endpoint import CurveKeys

__all__ = [
    "MEDIUM_CPU", "MEDIUM_GPU", "MEDIUM_STORAGE", "AllBlocksCleared", "BlockHash", "BlockIndex",
    "BlockRemoved", "BlockStored", "CurveKeys", "Delivery", "EventBatch",
    "EventPublisher", "EventPublisherFactory", "EventSubscriber", "KVCacheEvent", "KVEvent",
    "KVEventAggregator", "KVEventBatch", "KVEventsConfig", "Lost", "NullEventPublisher",
    "PublisherClosed", "PublisherDisconnected", "PublisherGone", "PublisherOptions",
    "PublisherRestarted", "PublisherStats", "Received", "Restarted", "Shelf",
    "Source", "SubscriberOptions", "SubscriberStats", "ThreadedEventPublisher", "TokenId",
    "UnknownEvent", "Wire", "ZmqEventPublisher", "follow",
]  # fmt: skip
