"""The message queue: one writer, many readers."""

from aioshm.queue.api import MessageQueue
from aioshm.queue.groups.process_group import in_the_same_node_as
from aioshm.queue.groups.stateless import StatelessProcessGroup
from aioshm.queue.handle import Handle
from aioshm.queue.membership import ChangesLost, ReaderDied, ReaderInfo, ReaderJoined, ReaderLeft
from aioshm.queue.merge import Merged, merge
from aioshm.queue.stats import QueueStats, ReaderStats
from aioshm.queue.tracing import TraceContext
from aioshm.ring.header import Latency

__all__ = [
    "ChangesLost",
    "Handle",
    "Latency",
    "Merged",
    "MessageQueue",
    "QueueStats",
    "ReaderDied",
    "ReaderInfo",
    "ReaderJoined",
    "ReaderLeft",
    "ReaderStats",
    "StatelessProcessGroup",
    "TraceContext",
    "in_the_same_node_as",
    "merge",
]
