"""Shared memory: no event loop, no sockets, no logging."""

from aioshm.ring.buffer import RingReader, RingWriter, ShmRingBuffer, memory_fence
from aioshm.ring.layout import Layout

__all__ = ["Layout", "RingReader", "RingWriter", "ShmRingBuffer", "memory_fence"]
