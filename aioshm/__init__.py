"""aioshm: messages between the processes of one asyncio service."""

from aioshm.codec import Codec, MsgpackCodec, register_codec
from aioshm.config import Options
from aioshm.errors import (
    AioshmError,
    CodecError,
    CorruptSlot,
    EngineDead,
    EngineStartupError,
    EventsLost,
    HandleError,
    HandshakeError,
    MessagesLost,
    MessageTooLarge,
    PeerDied,
    QueueCancelled,
    QueueClosed,
    QueueEmpty,
    QueueFull,
    RoleError,
    SharedMemoryError,
    UnsafePayload,
)
from aioshm.queue import Handle, MessageQueue, QueueStats
from aioshm.ring import ShmRingBuffer, memory_fence
from aioshm.ring.atomics import native_core

__version__ = "0.1.0"

__all__ = [
    "AioshmError",
    "Codec",
    "CodecError",
    "CorruptSlot",
    "EngineDead",
    "EngineStartupError",
    "EventsLost",
    "Handle",
    "HandleError",
    "HandshakeError",
    "MessageQueue",
    "MessageTooLarge",
    "MessagesLost",
    "MsgpackCodec",
    "Options",
    "PeerDied",
    "QueueCancelled",
    "QueueClosed",
    "QueueEmpty",
    "QueueFull",
    "QueueStats",
    "RoleError",
    "SharedMemoryError",
    "ShmRingBuffer",
    "UnsafePayload",
    "memory_fence",
    "native_core",
    "register_codec",
]
