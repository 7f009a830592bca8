"""The common part of both APIs of a queue: constructors, and calls that do not wait."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, Generic, NoReturn, Self, TypeAlias, TypedDict, TypeVar

from aioshm.codec import Codec, T
from aioshm.config import Options, SlowReader
from aioshm.errors import RoleError
from aioshm.queue.ends.factory import ReaderArguments, checked_ranks, create_named_reader, create_reader, create_writer
from aioshm.queue.ends.reader import Reader
from aioshm.queue.ends.writer import Writer
from aioshm.queue.handle import Handle, refuse_to_pickle
from aioshm.queue.stats import QueueStats
from aioshm.queue.tracing import TraceContext

Q = TypeVar("Q", bound="QueueBase[Any]")

MAX_CHUNK_BYTES = 24 * 1024 * 1024
MAX_CHUNKS = 10

ATTACH_TIMEOUT_S = 30.0
"""How long a reader waits for a writer of a name by default."""


AnyHandle: TypeAlias = Handle | str | bytes


class Reading(TypedDict, total=False):
    """For type checkers: arguments of `QueueBase.create_from_handle`."""

    options: Options | None
    slow_reader: SlowReader | None
    reconnect: bool
    history: int


class CodedReading(Reading, total=False):
    """`Reading` with a codec whose type of message is not known."""

    codec: str | Codec | None


class Naming(Reading, total=False):
    """For type checkers: arguments of `QueueBase.attach`."""

    timeout: float | None


class CodedNaming(Naming, total=False):
    """`Naming` with a codec whose type of message is not known."""

    codec: str | Codec | None


class QueueBase(Generic[T]):
    """The common part of the awaited and the blocking API.

    Attributes:
        end: The end that does the work; for this package.
    """

    def __init__(
        self,
        n_reader: int,
        n_local_reader: int | None = None,
        local_reader_ranks: Sequence[int] | None = None,
        max_chunk_bytes: int = MAX_CHUNK_BYTES,
        max_chunks: int = MAX_CHUNKS,
        connect_ip: str | None = None,
        *,
        codec: str | Codec = "pickle",
        options: Options | None = None,
        remote_reader_ranks: Sequence[int] | None = None,
        slots: int | None = None,
        type: type[T] | None = None,  # noqa: A002  # the name that msgspec gives it
        name: str | None = None,
        identity: str | os.PathLike[str] | None = None,
    ) -> None:
        """Create the writer.

        Args:
            n_reader: Number of readers; each receives every message. 0: messages are sent to nobody.
            n_local_reader: Readers on this host, which read the ring; all others connect over TCP. None: all of them.
            local_reader_ranks: Ranks of the local readers. None: 0 to n_local_reader - 1.
            max_chunk_bytes: Room for one message in the ring, in bytes; larger messages lie in memory beside it.
            max_chunks: Number of messages of that size in the ring before the writer waits for the slowest reader. The
                ring holds more messages if they are smaller, up to ``slots``.
            connect_ip: The address of this host that remote readers connect to. None: the address that packets to other
                hosts have. ``"*"``, ``"0.0.0.0"`` or ``"::"``: listen on all, with that address in the handle.
            codec: Encodes objects: ``"pickle"``, ``"msgpack"``, ``"raw"``, the name of a codec that was registered with
                `register_codec`, or a codec such as ``MsgpackCodec(type=Step)``.
            options: All other options. None: the defaults and the environment.
            remote_reader_ranks: Ranks of the remote readers. None: the lowest that are not local.
            slots: Messages of any size that the ring holds before the writer waits. None: thousands.
            type: The type of the messages, for type checkers: with ``type=Step``, as with ``MessageQueue[Step](...)``,
                this is a ``MessageQueue[Step]``. The codec must be able to decode it. Only readers that pass ``type``,
                too, check messages.
            name: The name by which readers of the same user on this host find the queue, with `attach`: letters, digits
                and ``._:+@-``. The name is free for the next writer when this writer is closed or dies. It is a file in
                ``options.runtime_dir``, which readers must share.
            identity: Path of a file with ports, keys and token, created with mode 0600. The next writer with the same
                file has the same address, so remote readers with ``reconnect=True`` find it, and handles stay valid.
                Keep the file as secret as a handle. If a port is in use, this blocks for up to half a second.

        Raises:
            ValueError, TypeError: An argument is out of range; the text names it.
            NameTaken: Another writer has the name, or the identity.
            IdentityError: The identity's file is damaged, another user's, or readable by others.
            UnsafePayload: There are remote readers, and ``options.secure=False`` goes with pickle.
            SharedMemoryError: There is not enough memory, no socket can be bound, or a file cannot be written.
        """
        ranks = checked_ranks(n_reader, n_local_reader, local_reader_ranks, remote_reader_ranks)
        end = create_writer(
            ranks, (max_chunk_bytes, max_chunks, slots), connect_ip, codec, options, type, name=name, identity=identity
        )
        self._hold(end)
        end.register()

    @classmethod
    def create_from_handle(
        cls,
        handle: AnyHandle,
        rank: int | None = None,
        *,
        codec: str | Codec | None = None,
        options: Options | None = None,
        slow_reader: SlowReader | None = None,
        type: Any = None,  # noqa: A002
        reconnect: bool = False,
        history: int = 0,
    ) -> Any:
        """Create a reader of the queue that a handle names.

        A rank in ``handle.local_reader_ranks`` makes a local reader, any other rank a remote one; a rank that both
        kinds may have (`Options.max_readers`) is local on the writer's host. Readers that attach before the queue is
        ready begin with the first message. A reader that attaches later takes a vacant rank and begins with the next
        message. If ``on_reader_death="hold"`` has held the rank of a dead reader, its replacement begins with the first
        message that the dead reader had not finished with (remote: not acknowledged).

        Args:
            handle: The writer's handle, or its JSON text.
            rank: Which reader this is. None: the lowest vacant rank, of the local ones on the writer's host if there
                are any, else of the remote ones. ``stats().rank`` has the rank once this reader is attached.
            codec: This reader's own instance of the writer's codec, such as ``MsgpackCodec(type=Step)``. None creates
                one.
            options: Options of this reader. None: the writer's.
            slow_reader: ``"block"``, ``"evict"`` or ``"skip"``, as `Options.slow_reader`. None: as the writer's options
                say.
            type: The type of the messages: with ``type=Step`` this is a ``MessageQueue[Step]``. ``"msgpack"``, and
                registered codecs with ``of_type``, check the type of each message and raise `CodecError`. With
                ``"pickle"`` only type checkers use the type.
            reconnect: For a remote reader of a writer with an identity: if the writer is gone, or has given this reader
                up, wait for the next writer, raise `QueueRestarted` once, and continue; see `attach`.
            history: Number of earlier messages to receive first: the latest ones, in order and without a gap, but fewer
                if the writer no longer has them. The ring has messages that were not overwritten, and only the last few
                of messages that did not fit a slot. A remote reader gets what another reader has not acknowledged, and
                `Options.remote_history`. A replacement at a held rank gets no history.

        Raises:
            HandleError: The text is no handle, or the handle is of another version, host or user, its queue is gone, or
                its codec is not registered here.
            ValueError: No reader has this rank, or ``codec`` is not the writer's, or is of another type.
            TypeError: An argument is of the wrong type, or the codec cannot decode ``type``.
        """
        reader = ReaderArguments(rank, codec, options, slow_reader, type, history)
        return cls.around(create_reader(handle, reader, reconnect=reconnect))

    @classmethod
    def attach(
        cls,
        name: str,
        rank: int | None = None,
        *,
        timeout: float | None = ATTACH_TIMEOUT_S,
        reconnect: bool = False,
        codec: str | Codec | None = None,
        options: Options | None = None,
        slow_reader: SlowReader | None = None,
        type: Any = None,  # noqa: A002
        history: int = 0,
    ) -> Any:
        """Create a reader that finds its writer by name: a writer of the same user on this host.

        The search begins with the first call that needs the writer, or with ``async with``, which does not wait for the
        writer. `wait_until_ready`, or the first call that receives, waits. The writer may start later.

        With ``reconnect=True``, a reader whose writer was killed or closed first receives every message that this
        writer had sent. Then it waits for the next writer of the name and for that writer's readers. The waiting call,
        or the next one, raises `QueueRestarted` once; later calls receive from the new writer. The new queue may differ
        in everything except the codec, and must have this rank. Iteration ends only when this reader is closed.

        Args:
            name: The ``name`` of the writer.
            rank: Which reader this is; None: see `create_from_handle`.
            timeout: Seconds to wait for a writer, the first or the next, in calls without a timeout of their own; then
                the call raises ``TimeoutError``, and later calls wait again. None waits for ever.
            reconnect: Whether to continue with the next writer when one is gone.
            codec: See `create_from_handle`, also for ``slow_reader``, ``type`` and ``history``. If they, or ``rank``,
                do not suit the writer that was found, calls raise `HandleError`: the reader has failed, or, with
                ``reconnect=True``, the next call tries again.
            options: Options of this reader. None: the writer's, with ``runtime_dir``, where names are kept, from the
                environment.
            slow_reader: As for `create_from_handle`.
            type: As for `create_from_handle`.
            history: As for `create_from_handle`.

        Raises:
            ValueError, TypeError: An argument is out of range; the text names it.
            SharedMemoryError: The runtime directory belongs to another user, or is open to others.
        """
        reader = ReaderArguments(rank, codec, options, slow_reader, type, history)
        return cls.around(create_named_reader(name, reader, timeout=timeout, reconnect=reconnect))

    @classmethod
    def around(cls, end: Writer | Reader) -> Self:
        """Create the queue of an unused end; for this package."""
        queue = cls.__new__(cls)
        queue._hold(end)
        return queue

    def _hold(self, end: Writer | Reader) -> None:
        """Become the queue of this end."""
        self.end = end
        self._writer: Writer | None = None
        self._reader: Reader | None = None
        if isinstance(end, Writer):
            self._writer = end
        else:
            self._reader = end

    def _writer_of(self, call: str) -> Writer:
        return self._writer or self._wrong_end(call, "writer")

    def _reader_of(self, call: str) -> Reader:
        return self._reader or self._wrong_end(call, "reader")

    def _wrong_end(self, call: str, end: str) -> NoReturn:
        side = "writer"
        if self._writer is None:
            side = "reader"
        advice = "a queue has one direction, and answers need a second queue"
        raise RoleError(f"{call}() belongs to the queue's {end}; this is a {side}: {self.end!r}; {advice}")

    def export_handle(self) -> Handle:
        """Return the handle with which readers attach. It can be pickled; ``to_json`` returns JSON text."""
        return self._writer_of("export_handle").export_handle()

    def stats(self) -> QueueStats:
        """Return the statistics of this end. May be called at any time, also after closing."""
        return self.end.state.stats()

    @property
    def last_trace_context(self) -> TraceContext | None:
        """The trace context of the message that this reader received last, or has leased.

        None if no span was current when the message was sent, the context was damaged (`stats` counts these), or no
        message was received. Needs a writer with ``Options(trace_context=True)``. Read this right after `dequeue`, in a
        loop's body, or in a lease's block, before another task receives from this end. For messages from ``merge()``,
        read this on the queue that the message came from.
        """
        for context in self.trace_contexts(1):
            return context
        return None

    def trace_contexts(self, count: int) -> list[TraceContext | None]:
        """Return the trace contexts of the last messages that this end's calls have returned, in their order.

        Args:
            count: Number of messages, such as the length of a batch of `dequeue_many`. At most 1024 are kept.
        """
        return self._reader_of("trace_contexts").trace_contexts(count)

    def __reduce__(self) -> NoReturn:
        refuse_to_pickle(self, writes=self._writer is not None)


def documented_as(awaited: type[QueueBase]) -> Callable[[type[Q]], type[Q]]:
    """Return a class decorator that copies missing docstrings from the awaited calls of the same name."""

    def document(blocking: type[Q]) -> type[Q]:
        for name, call in vars(blocking).items():
            if not name.startswith("_") and call.__doc__ is None:
                target = call.__func__ if isinstance(call, classmethod) else call
                target.__doc__ = getattr(awaited, name).__doc__
        return blocking

    return document


for _call in vars(QueueBase).values():  # errors about arguments name the class that users know
    _function = getattr(_call, "__func__", _call)
    if isinstance(_function, FunctionType):
        _function.__qualname__ = f"MessageQueue.{_function.__name__}"
