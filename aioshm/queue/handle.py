"""What a reader needs in order to attach to a queue: picklable, and JSON."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import msgspec

from aioshm.config import Options
from aioshm.errors import HandleError
from aioshm.ring.layout import VERSION, Layout


def host_id() -> str:
    """Return what is the same for all processes that can share memory: the running kernel's boot id."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()


class Handle(msgspec.Struct, frozen=True, kw_only=True, tag="aioshm"):
    """Names a queue, and lets in whoever holds it: treat it like a password.

    Attributes:
        version: Of the segment's layout.
        queue_id: 16 random bytes.
        token: What a reader must know to be admitted.
        host: Where the ring is.
        uid: Whose it is.
        n_reader: All readers.
        local_reader_ranks: The ranks that read the ring, in the order of its flags.
        max_chunk_bytes: Room for one message in the ring, in bytes.
        max_chunks: Slots.
        lifeline: Where the writer listens: ``@name`` for an abstract Unix socket, else a path.
        segment: Name of the POSIX segment, or None where its descriptor comes over the lifeline.
        codec: How messages are encoded.
        connect_ip: The address that remote readers connect to, as the writer was told.
        options: The writer's, which hold for its readers too.
    """

    version: int
    queue_id: bytes
    token: bytes
    host: str
    uid: int
    n_reader: int
    local_reader_ranks: tuple[int, ...]
    max_chunk_bytes: int
    max_chunks: int
    lifeline: str
    segment: str | None
    codec: str
    connect_ip: str | None
    options: Options

    @property
    def layout(self) -> Layout:
        """The ring's layout."""
        return Layout(len(self.local_reader_ranks), self.max_chunk_bytes, self.max_chunks)

    def to_json(self) -> str:
        """Return this handle as JSON text."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> Handle:
        """Return the handle that `to_json` wrote.

        Raises:
            HandleError: The text is no handle.
        """
        try:
            return msgspec.json.decode(text, type=cls)
        except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
            raise HandleError(f"not a handle: {error}") from None

    def check(self) -> None:
        """Refuse a handle that cannot work here.

        Raises:
            HandleError: Another version, host or user.
        """
        if self.version != VERSION:
            raise HandleError(f"the handle has layout version {self.version}, this aioshm reads {VERSION}")
        if self.host != host_id():
            raise HandleError(f"the handle was made on another host ({self.host}); its local readers must run there")
        if self.uid != os.geteuid():
            raise HandleError(f"the handle belongs to uid {self.uid}, this process runs as uid {os.geteuid()}")

    def __repr__(self) -> str:
        return (
            f"<Handle of queue {self.queue_id.hex()[:8]}, {self.n_reader} readers, "
            f"{self.max_chunks} x {self.max_chunk_bytes} bytes, token hidden>"
        )
