"""KV-cache events: published, subscribed to and replayed, in the wire format of vLLM."""

from aioshm.errors import PublisherClosed, PublisherDisconnected, PublisherRestarted
from aioshm.events.config import KVEventsConfig
from aioshm.events.protocol.deliveries import Delivery, Lost, PublisherGone, Received, Restarted, Source
from aioshm.events.protocol.index import BlockIndex, KVEventAggregator, Shelf, follow
from aioshm.events.protocol.messages import (
    MEDIUM_CPU,
    MEDIUM_GPU,
    MEDIUM_STORAGE,
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    EventBatch,
    KVCacheEvent,
    KVEvent,
    KVEventBatch,
    TokenId,
    UnknownEvent,
)
from aioshm.events.protocol.wire import Encoding, ReplayFormat, Wire
from aioshm.events.publish.base import EventPublisher, NullEventPublisher
from aioshm.events.publish.factory import EventPublisherFactory
from aioshm.events.publish.publisher import ZmqEventPublisher
from aioshm.events.publish.threaded import ThreadedEventPublisher
from aioshm.events.stats import PublisherStats, SubscriberStats
from aioshm.events.subscribe.subscriber import EventSubscriber
from aioshm.zeromq.endpoint import CurveKeys

__all__ = [
    "MEDIUM_CPU",
    "MEDIUM_GPU",
    "MEDIUM_STORAGE",
    "AllBlocksCleared",
    "BlockHash",
    "BlockIndex",
    "BlockRemoved",
    "BlockStored",
    "CurveKeys",
    "Delivery",
    "Encoding",
    "EventBatch",
    "EventPublisher",
    "EventPublisherFactory",
    "EventSubscriber",
    "KVCacheEvent",
    "KVEvent",
    "KVEventAggregator",
    "KVEventBatch",
    "KVEventsConfig",
    "Lost",
    "NullEventPublisher",
    "PublisherClosed",
    "PublisherDisconnected",
    "PublisherGone",
    "PublisherRestarted",
    "PublisherStats",
    "Received",
    "ReplayFormat",
    "Restarted",
    "Shelf",
    "Source",
    "SubscriberStats",
    "ThreadedEventPublisher",
    "TokenId",
    "UnknownEvent",
    "Wire",
    "ZmqEventPublisher",
    "follow",
]
