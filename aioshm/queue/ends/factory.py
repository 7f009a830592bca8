"""Creates writers and readers: checks arguments, and chooses the transports and the codec."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import TYPE_CHECKING, Any, TypeAlias

from aioshm.arguments import check_bool, check_int, check_timeout, shown
from aioshm.codec import Codec, get_codec, typed_codec
from aioshm.codec.pickle5 import PickleCodec
from aioshm.config import MAX_READERS, Options, SlowReader, check_slow
from aioshm.errors import AioshmError, HandleError, UnsafePayload
from aioshm.lifeline.protocol import ANY_RANK
from aioshm.process.limits import naming_limits
from aioshm.queue.ends.reader import Reader
from aioshm.queue.ends.reconnect import Reconnect, SameWriter
from aioshm.queue.ends.writer import Writer
from aioshm.queue.handle import Handle, as_handle
from aioshm.queue.local.readers import LocalReaders
from aioshm.queue.local.source import RingSource
from aioshm.queue.names.registry import NamedWriters, check_name
from aioshm.queue.remote.wire import MAX_RANK
from aioshm.queue.source import Source
from aioshm.queue.state import EndState
from aioshm.queue.tracing import current_trace
from aioshm.zeromq.hosts import check_ip

if TYPE_CHECKING:
    from aioshm.queue.names.identity import Identity
    from aioshm.queue.remote.readers import RemoteReaders

MAX_HISTORY = (1 << 63) - 1  # of the ring's core

Ranks: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""The ranks of local readers, and of remote readers."""


def checked_ranks(
    n_reader: int, n_local_reader: int | None, local: Sequence[int] | None, remote: Sequence[int] | None
) -> Ranks:
    """Return the ranks of the local and of the remote readers; None: the lowest free ranks."""
    check_int("n_reader", n_reader, minimum=0, maximum=MAX_READERS)
    if n_local_reader is None:
        n_local_reader = n_reader
    if check_int("n_local_reader", n_local_reader, minimum=0) > n_reader:
        raise ValueError(f"n_local_reader must be at most n_reader ({n_reader}), not {shown(n_local_reader)}")
    if local is None:
        local = range(n_local_reader)
    local_ranks = _distinct_ranks("local_reader_ranks", local, n_local_reader)
    n_remote = n_reader - n_local_reader
    if remote is None:
        remote = _free_ranks(0, n_remote, local_ranks)
    remote_ranks = _distinct_ranks("remote_reader_ranks", remote, n_remote)
    if set(local_ranks) & set(remote_ranks):
        raise ValueError(f"remote_reader_ranks must be others than local_reader_ranks, not {shown(remote)}")
    return local_ranks, remote_ranks


def _extra_ranks(ranks: Sequence[int], max_readers: int | None, reserved: int) -> tuple[int, ...]:
    """Return the lowest free ranks, except ``reserved``, for readers beyond ``ranks``, up to ``max_readers``."""
    if max_readers is None:
        return ()
    if not len(ranks) <= max_readers <= MAX_READERS:
        raise ValueError(f"max_readers must be {len(ranks)} (n_reader) to {MAX_READERS}, not {shown(max_readers)}")
    return _free_ranks(len(ranks), max_readers - len(ranks), (*ranks, reserved))


def _free_ranks(first: int, number: int, taken: Sequence[int]) -> tuple[int, ...]:
    return tuple(islice((rank for rank in count(first) if rank not in taken), number))


def _distinct_ranks(name: str, ranks: Sequence[int], number: int) -> tuple[int, ...]:
    try:
        checked = tuple(ranks)
    except TypeError:
        raise TypeError(f"{name} must be a sequence of ranks or None, not {shown(ranks)}") from None
    for rank in checked:
        check_int(f"a rank in {name}", rank, minimum=0, maximum=MAX_RANK)
    if len(checked) != number or len(set(checked)) != number:
        raise ValueError(f"{name} must be {number} different ranks, not {shown(ranks)}")
    return checked


def create_writer(
    ranks: Ranks,
    sizes: tuple[int, int, int | None],
    connect_ip: str | None,
    codec: str | Codec,
    options: Options | None,
    message: Any = None,
    *,
    name: str | None = None,
    identity: str | os.PathLike[str] | None = None,
    own_rank: int = -1,
) -> Writer:
    """Create a writer; reserve ``own_rank``, the writer's rank in a process group."""
    local, remote = ranks
    ip = check_ip(connect_ip)
    own_codec = typed_codec(codec, message)
    if options is None:
        options = Options.from_env()
    if not isinstance(options, Options):
        raise TypeError(f"options must be an Options, not {options!r}")
    if options.trace_context:
        current_trace()  # raises without OpenTelemetry, before anything is created
    if name is not None:
        check_name(name)
    n_reader = len(local) + len(remote)
    extra = _extra_ranks((*local, *remote), options.max_readers, own_rank)
    local = (*local, *extra)
    if remote or (extra and connect_ip is not None):
        remote = (*remote, *extra)
    elif identity is not None:
        raise ValueError("identity is for remote readers, and there are none: leave it out, or say name=")
    state = EndState("writer", options)
    lasting: Identity | None = None
    token: bytes | None = None
    if remote:
        _check_safety(own_codec, options.secure, options)
        with naming_limits("a writer"):  # the import needs descriptors; a queue of local readers needs no ZeroMQ
            from aioshm.queue.names.identity import Identity
            from aioshm.queue.remote.readers import RemoteReaders
        if identity is not None:
            lasting = Identity.of_file(identity, options)
            token = lasting.token
    ring: LocalReaders | None = None
    network: RemoteReaders | None = None
    try:
        ring = LocalReaders(local, sizes, options, token, frozenset(extra))
        if remote:
            network = RemoteReaders(
                ring.registry, ring.queue_id, ring.token, remote, ip, options, lasting, frozenset(extra)
            )
        return Writer(state, n_reader, ring, network, own_codec, ip, name)
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
        if self.rank is None:
            return ANY_RANK
        return self.rank

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
        """Return whether to read over the network: the rank is remote only, or the writer is on another host."""
        local = handle.local_reader_ranks
        if handle.remote is None:
            return False
        if self.rank is None:
            return not (handle.is_here() and local)
        return self.rank in handle.remote.ranks and not (handle.is_here() and self.rank in local)

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
        slow = handle.options.slow_reader
        if self.slow_reader is not None:
            slow = check_slow("slow_reader", self.slow_reader, handle.options.overflow)
        state.options = handle.options
        if self.options is not None:
            state.options = self.options
        remote = handle.remote
        if remote is not None and self.is_remote(handle):
            with naming_limits("a reader"):  # the import needs descriptors
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


def create_reader(handle: Handle | str | bytes, reader: ReaderArguments, *, reconnect: bool = False) -> Reader:
    """Create the reader of a handle; see `aioshm.MessageQueue.create_from_handle`."""
    handle = as_handle(handle)
    reader.check()
    handle.check_version()
    kind = "local reader"
    if reader.is_remote(handle):
        kind = "remote reader"
    if check_bool("reconnect", reconnect):
        _check_may_reconnect(handle, kind)
    state = EndState(kind, handle.options)
    state.name = handle.label
    source, own_codec = reader.connect(state, handle, patient=reconnect)
    search = None
    if reconnect:
        connect = functools.partial(reader.connect, state, patient=True)
        search = Reconnect(state, reader.number, SameWriter(handle), connect, repeat=True)
    return Reader(state, source, handle, reader.number, own_codec, search)


def _check_may_reconnect(handle: Handle, kind: str) -> None:
    if kind != "remote reader":
        raise ValueError(
            "reconnect=True is for remote readers; for local ones there is MessageQueue.attach(name, rank)"
        )
    if handle.remote is None or not handle.remote.lasting:
        raise ValueError("reconnect=True needs a writer that has an identity: MessageQueue(..., identity=path)")


def create_named_reader(name: str, reader: ReaderArguments, *, timeout: float | None, reconnect: bool) -> Reader:
    """Create a reader that searches for a writer by name; see `aioshm.MessageQueue.attach`."""
    name = check_name(name)
    reader.check()
    patience = check_timeout("timeout", timeout)
    check_bool("reconnect", reconnect)
    options = reader.options
    if options is None:
        options = Options.from_env()
    state = EndState("reader", options)
    state.name = name
    connect = functools.partial(reader.connect, state)
    writers = NamedWriters(name, options.runtime_dir)
    search = Reconnect(state, reader.number, writers, connect, repeat=reconnect, patience_s=patience)
    return Reader(state, None, None, reader.number, None, search)


def check_rank(handle: Handle, rank: int) -> None:
    """Raise `ValueError` unless the rank is a local reader's."""
    if rank in handle.local_reader_ranks:
        return
    if not handle.n_reader:
        raise ValueError(f"rank must be a reader's, and the queue has none; not {rank}")
    ranks = set(handle.local_reader_ranks)
    if handle.remote is not None:
        ranks.update(handle.remote.ranks)
    raise ValueError(
        f"rank must be one of {tuple(sorted(ranks))}, not {rank}; the writer's n_reader and Options(max_readers=) "
        "say how many there are"
    )


def _codec_for(handle: Handle, codec: str | Codec | None, message: Any) -> Codec:
    """Return the codec that the handle names, or the caller's own instance of it."""
    if codec is None:
        try:
            own = get_codec(handle.codec)
        except ValueError as error:
            raise HandleError(f"the handle's {error}") from None
    else:
        own = get_codec(codec)
    if own.name != handle.codec:
        raise ValueError(f"codec must be {handle.codec!r}, as the handle says, not {own.name!r}")
    if message is None:
        return own
    return typed_codec(own, message)


def _check_safety(codec: Codec, encrypted: bool, options: Options) -> None:
    """Refuse to pickle over connections that strangers can write to."""
    if isinstance(codec, PickleCodec) and not encrypted and not options.allow_insecure_pickle:
        raise UnsafePayload(
            "options.secure is False, so any process that reaches the port could run code by what they send: "
            "use codec='msgpack' or 'raw', or options.allow_insecure_pickle=True where nobody else does"
        )
