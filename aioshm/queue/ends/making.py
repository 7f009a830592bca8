"""Putting an end together out of its parts."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from aioshm.codec import Codec, get_codec, typed_codec
from aioshm.codec.pickle5 import PickleCodec
from aioshm.config import Options, SlowReader, check_bool, check_int, check_slow, check_timeout
from aioshm.errors import AioshmError, HandleError, UnsafePayload
from aioshm.lifeline.protocol import ANY_RANK
from aioshm.process.limits import naming_limits
from aioshm.queue.ends.reading import ReadingEnd
from aioshm.queue.ends.reconnect import Following, SameWriter
from aioshm.queue.ends.writing import WritingEnd
from aioshm.queue.handle import Handle, as_handle
from aioshm.queue.local.readers import LocalReaders
from aioshm.queue.local.source import RingSource
from aioshm.queue.names.registry import NamedWriters, check_name
from aioshm.queue.ranks import extra_ranks
from aioshm.queue.remote.wire import MAX_RANK
from aioshm.queue.source import Source
from aioshm.queue.state import EndState
from aioshm.queue.tracing import current_trace
from aioshm.zeromq.hosts import check_ip

MAX_HISTORY = (1 << 63) - 1  # what the ring's core takes


def writing_end(
    ranks: tuple[tuple[int, ...], tuple[int, ...]],
    sizes: tuple[int, int, int | None],
    connect_ip: str | None,
    codec: str | Codec,
    options: Options | None,
    message: Any = None,
    *,
    name: str | None = None,
    identity: str | os.PathLike[str] | None = None,
    own_rank: int = -1,
) -> WritingEnd:
    """Make a writer's end; reserve ``own_rank``, the writer's rank in a process group."""
    local, remote = ranks
    ip, own_codec = check_ip(connect_ip), typed_codec(codec, message)
    options = Options.from_env() if options is None else options
    if not isinstance(options, Options):
        raise TypeError(f"options must be an Options, not {options!r}")
    if options.trace_context:
        current_trace()  # raises where it cannot, before anything is made
    if name is not None:
        check_name(name)
    n_reader = len(local) + len(remote)
    extra = extra_ranks((*local, *remote), options.max_readers, own_rank)
    places = (*local, *extra), frozenset(extra)
    far = (*remote, *extra) if remote or (extra and connect_ip is not None) else ()
    state = EndState("writer", options)
    if not far:
        if identity is not None:
            raise ValueError("identity is for remote readers, and there are none: leave it out, or say name=")
        local_readers = LocalReaders(places[0], sizes, options, extra=places[1])
        return WritingEnd(state, n_reader, local_readers, None, own_codec, ip, name)
    with naming_limits("a writer"):  # which reading the files may reach; and who has local readers only needs no ZeroMQ
        from aioshm.queue.names.identity import Identity
        from aioshm.queue.remote.readers import RemoteReaders
    lasting = None if identity is None else Identity.of_file(identity, options)
    ring: LocalReaders | None = None
    try:
        ring = LocalReaders(places[0], sizes, options, None if lasting is None else lasting.token, places[1])
        _check_safety(own_codec, options.secure, options)
        network = RemoteReaders(ring.registry, ring.queue_id, ring.token, far, ip, options, lasting, places[1])
        return WritingEnd(state, n_reader, ring, network, own_codec, ip, name)
    except BaseException:
        if ring is not None:
            ring.close()
        if lasting is not None:
            lasting.release()
        raise


@dataclass(frozen=True, slots=True)
class ReaderArguments:
    """The arguments of a reader; see `aioshm.MessageQueue.create_from_handle`."""

    rank: int | None
    # None: a new instance of the writer's codec.
    codec: str | Codec | None
    options: Options | None
    # None: as the writer's options say.
    slow_reader: SlowReader | None
    message: Any
    history: int = 0

    @property
    def number(self) -> int:
        """The rank, or `ANY_RANK`."""
        return ANY_RANK if self.rank is None else self.rank

    def check(self) -> None:
        """Check the arguments that need no writer."""
        if self.options is not None and not isinstance(self.options, Options):
            raise TypeError(f"options must be an Options or None, not {self.options!r}")
        if self.rank is not None:
            check_int("rank", self.rank, minimum=0, maximum=MAX_RANK)
        check_int("history", self.history, minimum=0, maximum=MAX_HISTORY)
        if self.slow_reader is not None:
            check_slow("slow_reader", self.slow_reader, "segments")
        if self.codec is not None:
            typed_codec(get_codec(self.codec), self.message)

    def is_remote(self, handle: Handle) -> bool:
        """Return whether the rank is a remote one, or either kind's with the writer elsewhere."""
        here = handle.local_reader_ranks
        if handle.remote is None or not (self.rank is None or self.rank in handle.remote.ranks):
            return False
        return not (handle.is_here() and (bool(here) if self.rank is None else self.rank in here))

    def connect(
        self,
        state: EndState,
        handle: Handle,
        failed: Callable[[AioshmError], None] | None = None,
        *,
        patient: bool = False,
    ) -> tuple[Source, Codec]:
        """Return the source for a writer's handle, and the codec."""
        handle.check_version()
        if self.slow_reader is None:
            slow = handle.options.slow_reader
        else:
            slow = check_slow("slow_reader", self.slow_reader, handle.options.overflow)
        state.options = handle.options if self.options is None else self.options
        remote = handle.remote
        if remote is not None and self.is_remote(handle):
            with naming_limits("a reader"):  # as above
                from aioshm.queue.remote.source import NetworkSource

            own_codec = _codec_for(handle, self.codec, self.message)
            source: Source = NetworkSource(
                state, handle, remote, self.number, own_codec, slow, self.history, patient=patient
            )
            _check_safety(own_codec, remote.keys is not None, state.options)
            return source, own_codec
        handle.check_local()
        if self.rank is not None or not handle.local_reader_ranks:
            check_rank(handle, self.number)
        own_codec = _codec_for(handle, self.codec, self.message)
        return RingSource(state, handle, self.number, own_codec, slow, self.history, failed), own_codec


def reading_end(handle: Handle | str | bytes, reader: ReaderArguments, *, reconnect: bool = False) -> ReadingEnd:
    """Make the end of a reader that has a handle; see `aioshm.MessageQueue.create_from_handle`."""
    handle = as_handle(handle)
    reader.check()
    handle.check_version()
    far = reader.is_remote(handle)
    if check_bool("reconnect", reconnect):
        _check_may_reconnect(handle, far)
    state = EndState("remote reader" if far else "local reader", handle.options)
    state.name = handle.label
    source, own_codec = reader.connect(state, handle, patient=reconnect)
    following = None
    if reconnect:
        connect = functools.partial(reader.connect, state, patient=True)
        following = Following(state, reader.number, SameWriter(handle), connect, reconnect=True)
    return ReadingEnd(state, source, handle, reader.number, own_codec, following)


def _check_may_reconnect(handle: Handle, far: bool) -> None:
    if not far:
        raise ValueError(
            "reconnect=True is for remote readers; for local ones there is MessageQueue.attach(name, rank)"
        )
    if handle.remote is None or not handle.remote.lasting:
        raise ValueError("reconnect=True needs a writer that has an identity: MessageQueue(..., identity=path)")


def named_end(name: str, reader: ReaderArguments, *, timeout: float | None, reconnect: bool) -> ReadingEnd:
    """Make the end of a reader that looks for a writer of a name; see `aioshm.MessageQueue.attach`."""
    name = check_name(name)
    reader.check()
    patience = check_timeout("timeout", timeout)
    check_bool("reconnect", reconnect)
    options = Options.from_env() if reader.options is None else reader.options
    state = EndState("reader", options)
    state.name = name
    connect = functools.partial(reader.connect, state)
    writers = NamedWriters(name, options.runtime_dir)
    following = Following(state, reader.number, writers, connect, reconnect=reconnect, patience_s=patience)
    return ReadingEnd(state, None, None, reader.number, None, following)


def check_rank(handle: Handle, rank: int) -> None:
    """Raise `ValueError` unless the rank is a local reader's."""
    if rank in handle.local_reader_ranks:
        return
    if not handle.n_reader:
        raise ValueError(f"rank must be a reader's, and the queue has none; not {rank}")
    elsewhere = () if handle.remote is None else handle.remote.ranks
    raise ValueError(f"rank must be one of {tuple(sorted((*handle.local_reader_ranks, *elsewhere)))}, not {rank}")


def _codec_for(handle: Handle, codec: str | Codec | None, message: Any) -> Codec:
    """Return the codec that the handle names, or the caller's own instance of it."""
    try:
        own = get_codec(handle.codec if codec is None else codec)
    except ValueError as error:
        if codec is None:
            raise HandleError(f"the handle's {error}") from None
        raise
    if own.name != handle.codec:
        raise ValueError(f"codec must be {handle.codec!r}, as the handle says, not {own.name!r}")
    return own if message is None else typed_codec(own, message)


def _check_safety(codec: Codec, encrypted: bool, options: Options) -> None:
    """Refuse to pickle over connections that strangers can write to."""
    if isinstance(codec, PickleCodec) and not encrypted and not options.allow_insecure_pickle:
        raise UnsafePayload(
            "options.secure is False, so any process that reaches the port could run code by what they send: "
            "use codec='msgpack' or 'raw', or options.allow_insecure_pickle=True where nobody else does"
        )
