"""KV-cache events: published, subscribed to and replayed, in the wire format of vLLM."""

from aioshm.errors import PublisherClosed
from aioshm.events.aggregator import KVEventAggregator
from aioshm.events.base import EventPublisher, NullEventPublisher
from aioshm.events.config import KVEventsConfig
from aioshm.events.deliveries import Delivery, Lost, PublisherRestarted, Received, Restarted, Source
from aioshm.events.factory import EventPublisherFactory
from aioshm.events.index import BlockIndex, Shelf, follow
from aioshm.events.messages import (
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
    UnknownEvent,
)
from aioshm.events.publisher import ZmqEventPublisher
from aioshm.events.stats import PublisherStats, SubscriberStats
from aioshm.events.subscriber import EventSubscriber
from aioshm.events.threaded import ThreadedEventPublisher
from aioshm.events.wire import Encoding, ReplayFormat, Wire
from aioshm.zeromq import CurveKeys

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
    "PublisherRestarted",
    "PublisherStats",
    "Received",
    "ReplayFormat",
    "Restarted",
    "Shelf",
    "Source",
    "SubscriberStats",
    "ThreadedEventPublisher",
    "UnknownEvent",
    "Wire",
    "ZmqEventPublisher",
    "follow",
]
