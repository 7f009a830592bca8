"""The same queue for plain threads: every call blocks instead of being awaited."""

from aioshm.queue.blocking.queue import MessageQueue

__all__ = ["MessageQueue"]
