"""The message queue: one writer, many readers."""

from aioshm.queue.base import MessageQueue
from aioshm.queue.handle import Handle
from aioshm.queue.merge import Merged, merge
from aioshm.queue.same_node import in_the_same_node_as
from aioshm.queue.stateless_group import StatelessProcessGroup
from aioshm.queue.stats import QueueStats

__all__ = [
    "Handle",
    "Merged",
    "MessageQueue",
    "QueueStats",
    "StatelessProcessGroup",
    "in_the_same_node_as",
    "merge",
]
