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
    GroupBroken,
    HandleError,
    HandshakeError,
    MessagesLost,
    MessageTooLarge,
    PeerDied,
    ProcessDied,
    QueueCancelled,
    QueueClosed,
    QueueEmpty,
    QueueFull,
    RoleError,
    SharedMemoryError,
    UnsafePayload,
)
from aioshm.queue import (
    Handle,
    Merged,
    MessageQueue,
    QueueStats,
    StatelessProcessGroup,
    in_the_same_node_as,
    merge,
)
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
    "GroupBroken",
    "Handle",
    "HandleError",
    "HandshakeError",
    "Merged",
    "MessageQueue",
    "MessageTooLarge",
    "MessagesLost",
    "MsgpackCodec",
    "Options",
    "PeerDied",
    "ProcessDied",
    "QueueCancelled",
    "QueueClosed",
    "QueueEmpty",
    "QueueFull",
    "QueueStats",
    "RoleError",
    "SharedMemoryError",
    "ShmRingBuffer",
    "StatelessProcessGroup",
    "UnsafePayload",
    "in_the_same_node_as",
    "memory_fence",
    "merge",
    "native_core",
    "register_codec",
]
