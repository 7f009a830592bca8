"""One stream out of many queues."""

from aioshm.queue.merge.stream import Merged, merge

__all__ = ["Merged", "merge"]
