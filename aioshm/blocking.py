"""The queue for plain threads: ``from aioshm.blocking import MessageQueue``."""

from aioshm.queue.blocking import MessageQueue

__all__ = ["MessageQueue"]
