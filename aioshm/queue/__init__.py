"""The message queue: one writer, many readers."""

from aioshm.queue.base import MessageQueue
from aioshm.queue.handle import Handle
from aioshm.queue.stats import QueueStats

__all__ = ["Handle", "MessageQueue", "QueueStats"]
