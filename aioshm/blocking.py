"""The queue for plain threads: ``from aioshm.blocking import MessageQueue``."""

from aioshm.queue.blocking import MessageQueue
from aioshm.queue.merge.blocking import Merged, merge

__all__ = ["Merged", "MessageQueue", "merge"]
