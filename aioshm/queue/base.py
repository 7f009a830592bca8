"""Makes both APIs of a queue from a writer's arguments, or a writer's handle."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, Self

from aioshm.codec import Codec, T
from aioshm.config import Options, SlowReader
from aioshm.queue.ends.making import ReaderArguments, named_end, reading_end, writing_end
from aioshm.queue.ends.reading import ReadingEnd
from aioshm.queue.ends.writing import WritingEnd
from aioshm.queue.handle import Handle
from aioshm.queue.ranks import checked_ranks

MAX_CHUNK_BYTES = 24 * 1024 * 1024
MAX_CHUNKS = 10

ATTACH_TIMEOUT_S = 30.0
"""How long a reader waits for a writer of a name where nothing else is said."""


class QueueBase(ABC, Generic[T]):
    """How both faces are made; each holds the end in its own way."""

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
        """Make the writer's end.

        Args:
            n_reader: Readers in all; each receives every message. With none, as in a group of one, everything is sent
                at once, to nobody.
            n_local_reader: Readers on this host, which read the ring; the others connect over TCP. None: all of them.
            local_reader_ranks: Their ranks; None means 0 to n_local_reader - 1.
            max_chunk_bytes: Room for one message in the ring, in bytes; larger ones lie in memory beside it.
            max_chunks: How many messages of that size the ring has room for before the writer has to wait for the
                slowest reader. Of smaller ones it holds more, and of small ones as many as it has slots.
            connect_ip: The address of this host that remote readers connect to; None: the one that its packets to other
                hosts have. ``"*"``, ``"0.0.0.0"`` or ``"::"``: all of them, with that one in the handle.
            codec: How objects become bytes: ``"pickle"``, ``"msgpack"``, ``"raw"``, the name of a codec that was
                registered with `register_codec`, or a codec of one's own making, such as ``MsgpackCodec(type=Step)``.
            options: Everything else; None takes the defaults and the environment.
            remote_reader_ranks: The ranks of the remote readers; None means the lowest that are not local.
            slots: Messages that the ring holds, of whatever size, before the writer has to wait; None: thousands.
            type: What the messages are, for type checkers: with ``type=Step``, as with ``MessageQueue[Step](...)``,
                this is a ``MessageQueue[Step]``. The codec must be able to decode it. What is sent is not checked here,
                but by readers that are told the type, too.
            name: What readers of this user on this host find the queue by, with `attach`: letters, digits and
                ``._:+@-``. It is this writer's until it is closed or dies, and then the next one's. It is written to
                ``options.runtime_dir``, which has to be the readers', too.
            identity: The path of a file, made with mode 0600 if there is none, that keeps ports, keys and token: remote
                readers with ``reconnect=True`` find the next writer that is started with it, on the same address. As
                good as the handles, which stay valid, so keep it as secret. Where a port is in use, this tries for half
                a second, blocking, to have it.

        Raises:
            ValueError, TypeError: An argument is out of range; the text names it.
            NameTaken: A writer that lives has the name, or the identity.
            IdentityError: The file of the identity is damaged, or another user's, or others may read it.
            UnsafePayload: There are remote readers, and ``options.secure=False`` goes with pickle.
            SharedMemoryError: There is not enough memory, or no socket can be bound, or the name or the identity cannot
                be written: no room, or a directory that is read-only, another user's, or open to others.
        """
        ranks = checked_ranks(n_reader, n_local_reader, local_reader_ranks, remote_reader_ranks)
        end = writing_end(
            ranks, (max_chunk_bytes, max_chunks, slots), connect_ip, codec, options, type, name=name, identity=identity
        )
        self._hold(end)
        end.register()

    @classmethod
    def create_from_handle(
        cls,
        handle: Handle | str | bytes,
        rank: int | None = None,
        *,
        codec: str | Codec | None = None,
        options: Options | None = None,
        slow: SlowReader | None = None,
        type: Any = None,  # noqa: A002
        reconnect: bool = False,
        history: int = 0,
    ) -> Any:
        """Make a reader's end: a local one if the rank is one of ``handle.local_reader_ranks``, else a remote one.

        While the queue waits for its readers, each begins with the first message. Later a place that is vacant, because
        nobody ever took it or its reader has left or died, can be had by a newcomer, which begins with the message that
        is sent next; or, where ``on_reader_death="hold"`` has kept the place of one that died, with the first that this
        one had not finished with (a remote one: not acknowledged). A rank that both kinds of readers may have
        (`Options.max_readers`) is a local reader's on the writer's host, and a remote one's elsewhere.

        Args:
            handle: The writer's handle, or its JSON text.
            rank: Which reader this is. None: the lowest place that has no reader, on the writer's host of those for
                local ones, if there are any, elsewhere of those for remote ones; ``stats().rank`` says which, once it
                is attached.
            codec: This end's own instance of the writer's codec, such as ``MsgpackCodec(type=Step)``; None makes one.
            options: For this end; None takes the writer's.
            slow: What becomes of this reader when it is too slow; None: what the writer's ``options.slow_reader`` says.
            type: What the messages are: with ``type=Step`` this is a ``MessageQueue[Step]``, whose ``dequeue()`` is a
                ``Step``. ``"msgpack"``, and a codec of one's own that has ``of_type``, decodes messages as that, and
                what is not of it is a `CodecError`: the same as ``codec=MsgpackCodec(type=Step)``. With ``"pickle"`` it
                is a promise to type checkers: what was sent arrives.
            reconnect: For a remote reader of a writer with an identity: when that is gone, or has given this reader up,
                wait for the next one, or for this one, raise `QueueRestarted` once, and go on; see `attach`.
            history: How many of the latest messages a newcomer gets first: fewer, if some are not kept any more, but
                never with a hole. The ring has those that were not overwritten, of messages that did not fit a slot
                only the last few where readers keep up; for remote readers there are those that another one has not
                acknowledged, and `Options.remote_history`. Nothing more at a place that was held.

        Raises:
            HandleError: Not a handle, or of another version, host or user, or its queue is gone, or it needs a codec
                that is not registered here.
            ValueError: No reader has this rank, or ``codec`` is another one than the writer's, or of another type.
            TypeError: An argument is of the wrong type, or the codec cannot decode ``type``.
        """
        reader = ReaderArguments(rank, codec, options, slow, type, history)
        return cls.around(reading_end(handle, reader, reconnect=reconnect))

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
        slow: SlowReader | None = None,
        type: Any = None,  # noqa: A002
    ) -> Any:
        """Make the end of a reader that finds its writer by name: one of this user's, on this host.

        Nothing is looked for yet: the first call that needs it does, or ``async with``. The writer may come later.

        With ``reconnect``, a reader whose writer is gone, killed or closed, first receives everything that this had
        sent; then it waits for the next writer of the name, and for that one's readers; then the call, or the first
        one after that, raises `QueueRestarted`, once; and from there on it receives what the new writer sends. The new
        queue may differ in all but its codec and that it has this rank. Iterating ends only when this end is closed.

        Args:
            name: What the writer was made with.
            rank: Which reader this is; None: see `create_from_handle`.
            timeout: For how many seconds a call that has no timeout itself waits for there to be a writer, the first
                or the next, before it raises ``TimeoutError``; later calls go on waiting. None: for ever.
            reconnect: Whether to go on with the next writer when one is gone.
            codec: As for `create_from_handle`, as are ``slow`` and ``type``. What is wrong with them, or with ``rank``,
                for the writer that is found, calls raise as `HandleError`. That is the end of it without ``reconnect``;
                with it the next call tries again, for a rank may be free by then.
            options: For this end; None takes the writer's, and the environment's ``runtime_dir``, where the name is.
            slow: What becomes of this reader when it is too slow.
            type: What the messages are.

        Raises:
            ValueError, TypeError: An argument is out of range; the text names it.
            SharedMemoryError: The runtime directory cannot be used: it is another user's, or open to others.
        """
        reader = ReaderArguments(rank, codec, options, slow, type)
        return cls.around(named_end(name, reader, timeout=timeout, reconnect=reconnect))

    @classmethod
    def around(cls, end: WritingEnd | ReadingEnd) -> Self:
        """Make the queue of an end that no loop has used; for this package."""
        queue = cls.__new__(cls)
        queue._hold(end)
        return queue

    @abstractmethod
    def _hold(self, end: WritingEnd | ReadingEnd) -> None:
        """Become the queue of this end."""
