"""The message queue: one writer, many readers."""

from aioshm.queue.api import MessageQueue
from aioshm.queue.groups.same_node import in_the_same_node_as
from aioshm.queue.groups.stateless import StatelessProcessGroup
from aioshm.queue.handle import Handle
from aioshm.queue.membership import ChangesLost, ReaderDied, ReaderInfo, ReaderJoined, ReaderLeft
from aioshm.queue.merge import Merged, merge
from aioshm.queue.stats import QueueStats
from aioshm.queue.tracing import TraceContext

__all__ = [
    "ChangesLost",
    "Handle",
    "Merged",
    "MessageQueue",
    "QueueStats",
    "ReaderDied",
    "ReaderInfo",
    "ReaderJoined",
    "ReaderLeft",
    "StatelessProcessGroup",
    "TraceContext",
    "in_the_same_node_as",
    "merge",
]
