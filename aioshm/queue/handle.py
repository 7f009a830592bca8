"""The handle with which a reader attaches to a queue: picklable, and JSON."""

from __future__ import annotations

import functools
import os
import platform
from typing import TYPE_CHECKING, Literal, NoReturn, TypeAlias

import msgspec

from aioshm.config import Options
from aioshm.errors import HandleError
from aioshm.process.limits import is_out_of_descriptors, out_of_descriptors
from aioshm.ring.layout import VERSION, Layout

if TYPE_CHECKING:
    from aioshm.zeromq.endpoint import CurveKeys


Answers: TypeAlias = Literal["always", "by a thread"]
"""When a writer answers inquiries: while its loop runs, or by a thread even if the program hangs."""


@functools.cache
def host_id() -> str:
    """Return the running kernel's boot id, which processes share if they can share memory."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError as error:
        if is_out_of_descriptors(error):
            raise out_of_descriptors("the host's boot id", error.errno) from None
        return platform.node()


class RemoteAddress(msgspec.Struct, frozen=True, kw_only=True):
    """The endpoints of remote readers, and their credentials."""

    # The endpoint of the writer's XPUB socket.
    data: str
    # The endpoint of the writer's ROUTER socket.
    control: str
    # These may include local ranks: the first reader gets the rank.
    ranks: tuple[int, ...]
    # None: connections are not encrypted.
    server_key: bytes | None
    # All readers share one key pair.
    client_public: bytes | None
    client_secret: bytes | None
    # Whether the writer's replacement has the same endpoints and credentials.
    lasting: bool = False

    @property
    def keys(self) -> CurveKeys | None:
        """A reader's keys, if the connections are encrypted."""
        from aioshm.zeromq.endpoint import CurveKeys  # here, because a queue with local readers only needs no ZeroMQ

        if self.server_key is None or self.client_public is None or self.client_secret is None:
            return None
        return CurveKeys(public=self.client_public, secret=self.client_secret, server=self.server_key)

    def check(self, *, encrypted: bool) -> None:
        """Raise `HandleError` for damaged content, and without keys if ``encrypted``."""
        for key in (self.server_key, self.client_public, self.client_secret):
            if key is not None and len(key) != 40:
                raise HandleError("not a handle: its keys are damaged")
        for endpoint in (self.data, self.control):
            if not endpoint.startswith("tcp://"):
                raise HandleError(f"not a handle: {endpoint!r} is no TCP endpoint")
        if encrypted and self.keys is None:
            raise HandleError("the queue is not encrypted; this reader's options say secure=True")

    def __repr__(self) -> str:
        return f"<RemoteAddress {self.data}, {self.control}, ranks {self.ranks}, keys hidden>"


class Handle(msgspec.Struct, frozen=True, kw_only=True, tag="aioshm"):
    """Names a queue, and admits its holder: treat it like a password.

    Attributes:
        version: Version of the segment's layout.
        queue_id: 16 random bytes.
        token: Readers must present it to be admitted.
        host: The host of the ring.
        uid: The owner of the ring.
        n_reader: Number of readers.
        local_reader_ranks: The ranks that read the ring, in the order of its flags.
        max_chunk_bytes: Room for one message in the ring, in bytes.
        max_chunks: Chunks of that size.
        slots: Messages that the ring holds.
        inline_bytes: Room for a message in a slot, in bytes.
        lifeline: Where the writer listens: ``@name`` for an abstract Unix socket, else a path.
        segment: Name of the POSIX segment, or None where its descriptor comes over the lifeline.
        codec: Name of the codec.
        connect_ip: The writer's ``connect_ip``.
        remote: Addresses and credentials of remote readers; None: all readers are local.
        options: The writer's options, which hold for its readers, too.
        answers: When the writer answers inquiries whether its event loop runs.
        name: The queue's name, if it has one.
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
    slots: int
    inline_bytes: int
    lifeline: str
    segment: str | None
    codec: str
    connect_ip: str | None
    remote: RemoteAddress | None
    options: Options
    answers: Answers = "always"
    name: str | None = None

    @property
    def layout(self) -> Layout:
        """The ring's layout."""
        return Layout(
            len(self.local_reader_ranks),
            self.max_chunk_bytes,
            self.max_chunks,
            self.slots,
            self.inline_bytes,
            self.options.trace_context,
        )

    @property
    def label(self) -> str:
        """The queue's name, or the beginning of its id."""
        return self.name or self.queue_id.hex()[:8]

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
            return _decoder.decode(text)
        except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
            raise HandleError(f"not a handle: {error}; {_NEEDED}") from None

    def check_version(self) -> None:
        """Raise `HandleError` for a handle of another version."""
        if self.version != VERSION:
            raise HandleError(f"the handle has layout version {self.version}, this aioshm reads {VERSION}")

    def is_here(self) -> bool:
        """Return whether the ring can be mapped by this process."""
        return self.host == host_id() and self.uid == os.geteuid()

    def check_local(self) -> None:
        """Raise `HandleError` for a handle of another host or user."""
        if self.host != host_id():
            raise HandleError(f"the handle was made on another host ({self.host}); its local readers must run there")
        if self.uid != os.geteuid():
            raise HandleError(f"the handle belongs to uid {self.uid}, this process runs as uid {os.geteuid()}")

    def __repr__(self) -> str:
        return (
            f"<Handle of queue {self.label}, {self.n_reader} readers, "
            f"{self.slots} slots, {self.max_chunks} x {self.max_chunk_bytes} bytes, secrets hidden>"
        )


def refuse_to_pickle(queue: object, *, writes: bool) -> NoReturn:
    """Raise `TypeError` that names the handle as the thing to pass."""
    handle = "the handle that it was made from"
    if writes:
        handle = "its export_handle()"
    raise TypeError(
        f"{queue!r} belongs to this process and cannot be pickled or copied: "
        f"pass on {handle}, and call MessageQueue.create_from_handle(handle, rank) there"
    )


_NEEDED = "pass the writer's export_handle(), or its to_json(); for the name of a queue call MessageQueue.attach(name)"

# Created once: msgspec 0.22 has crashed when several threads created the first decoder of a type at the same time.
_decoder = msgspec.json.Decoder(Handle)


def as_handle(handle: Handle | str | bytes) -> Handle:
    """Return a handle, or decode its JSON text."""
    if isinstance(handle, (str, bytes)):
        return Handle.from_json(handle)
    if not isinstance(handle, Handle):
        raise HandleError(f"not a handle: {type(handle).__name__}; {_NEEDED}")
    return handle
