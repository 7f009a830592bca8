"""Putting an end together out of its parts."""

from __future__ import annotations

from typing import Any

from aioshm.codec import Codec, get_codec, typed_codec
from aioshm.config import Options, SlowReader, check_int, check_slow
from aioshm.errors import HandleError
from aioshm.lifeline.address import check_ip
from aioshm.process.limits import naming_limits
from aioshm.queue.ends.gate import Gate
from aioshm.queue.ends.reading import ReadingEnd
from aioshm.queue.ends.source import Source
from aioshm.queue.ends.writing import WritingEnd
from aioshm.queue.handle import Handle, as_handle
from aioshm.queue.local.audience import RingAudience
from aioshm.queue.local.source import RingSource
from aioshm.queue.remote.wire import MAX_RANK


def writing_end(
    ranks: tuple[tuple[int, ...], tuple[int, ...]],
    sizes: tuple[int, int, int | None],
    connect_ip: str | None,
    codec: str | Codec,
    options: Options | None,
    message: Any = None,
) -> WritingEnd:
    """Make a writer's end.

    Args:
        ranks: The local readers' and the remote ones', from `checked_ranks`.
        sizes: The bytes of a chunk, how many chunks, and how many slots, None taking the default.
        connect_ip: As `aioshm.MessageQueue`.
        codec: As there.
        options: As there.
        message: The type of the messages, as there.
    """
    local, remote = ranks
    ip, own_codec = check_ip(connect_ip), typed_codec(codec, message)
    options = Options.from_env() if options is None else options
    if not isinstance(options, Options):
        raise TypeError(f"options must be an Options, not {options!r}")
    n_reader = len(local) + len(remote)
    gate = Gate("writer", options, networked=bool(remote))
    if not remote:
        return WritingEnd(gate, n_reader, RingAudience(local, sizes, options), None, own_codec, ip)
    with naming_limits("a writer"):  # which reading the files may reach; and who has local readers only needs no ZeroMQ
        from aioshm.queue.remote.audience import NetworkAudience
        from aioshm.queue.remote.safety import check_safety
    ring = RingAudience(local, sizes, options)
    try:
        check_safety(own_codec, options.secure, options)
        network = NetworkAudience(ring.queue_id, ring.token, remote, ip, options)
    except BaseException:
        ring.close()
        raise
    return WritingEnd(gate, n_reader, ring, network, own_codec, ip)


def reading_end(
    handle: Handle | str | bytes,
    rank: int,
    codec: str | Codec | None = None,
    options: Options | None = None,
    slow: SlowReader | None = None,
    message: Any = None,
) -> ReadingEnd:
    """Make a reader's end; the arguments are those of `aioshm.MessageQueue.create_from_handle`."""
    handle = as_handle(handle)
    if options is not None and not isinstance(options, Options):
        raise TypeError(f"options must be an Options or None, not {options!r}")
    handle.check_version()
    slow = handle.options.slow_reader if slow is None else check_slow("slow", slow, handle.options.overflow)
    check_int("rank", rank, minimum=0, maximum=MAX_RANK)
    remote = handle.remote
    far = remote is not None and rank in remote.ranks
    options = handle.options if options is None else options
    gate = Gate("remote reader" if far else "local reader", options, networked=far)
    gate.name = handle.queue_id.hex()[:8]
    source: Source
    if remote is not None and far:
        with naming_limits("a reader"):  # as above
            from aioshm.queue.remote.source import NetworkSource

        own_codec = _codec_for(handle, codec, message)
        source = NetworkSource(gate, handle, remote, rank, own_codec, slow)
    else:
        handle.check_local()
        check_rank(handle, rank)
        own_codec = _codec_for(handle, codec, message)
        source = RingSource(gate, handle, rank, own_codec, slow)
    return ReadingEnd(gate, source, handle, rank, own_codec)


def check_rank(handle: Handle, rank: int) -> None:
    """Refuse a rank that no reader has.

    Raises:
        ValueError: It is one.
    """
    if rank in handle.local_reader_ranks:
        return
    if not handle.n_reader:
        raise ValueError(f"rank must be a reader's, and the queue has none; not {rank}")
    elsewhere = () if handle.remote is None else handle.remote.ranks
    raise ValueError(f"rank must be one of {tuple(sorted((*handle.local_reader_ranks, *elsewhere)))}, not {rank}")


def _codec_for(handle: Handle, codec: str | Codec | None, message: Any) -> Codec:
    """Return the reader's codec: the one that the handle names, or the caller's own instance of it."""
    try:
        own = get_codec(handle.codec if codec is None else codec)
    except ValueError as error:
        if codec is None:
            raise HandleError(f"the handle's {error}") from None
        raise
    if own.name != handle.codec:
        raise ValueError(f"codec must be {handle.codec!r}, as the handle says, not {own.name!r}")
    return typed_codec(own, message)
