"""Which ranks the readers of a queue have, and which of them are on the writer's host."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count, islice

from aioshm.config import MAX_READERS, check_int, shown
from aioshm.queue.remote.wire import MAX_RANK


def checked_ranks(
    n_reader: int, n_local_reader: int | None, local: Sequence[int] | None, remote: Sequence[int] | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ranks of the local and of the remote readers; None: the lowest free ranks."""
    check_int("n_reader", n_reader, minimum=0, maximum=MAX_READERS)
    if n_local_reader is None:
        n_local_reader = n_reader
    if check_int("n_local_reader", n_local_reader, minimum=0) > n_reader:
        raise ValueError(f"n_local_reader must be at most n_reader ({n_reader}), not {shown(n_local_reader)}")
    here = _checked("local_reader_ranks", range(n_local_reader) if local is None else local, n_local_reader)
    n_remote = n_reader - n_local_reader
    others = islice((rank for rank in count() if rank not in here), n_remote)
    there = _checked("remote_reader_ranks", list(others) if remote is None else remote, n_remote)
    if set(here) & set(there):
        raise ValueError(f"remote_reader_ranks must be others than local_reader_ranks, not {shown(remote)}")
    return here, there


def extra_ranks(ranks: Sequence[int], max_readers: int | None, not_to_be_had: int = -1) -> tuple[int, ...]:
    """Return the lowest free ranks for places beyond ``ranks``, up to ``max_readers`` places."""
    if max_readers is None:
        return ()
    if not len(ranks) <= max_readers <= MAX_READERS:
        raise ValueError(f"max_readers must be {len(ranks)} (n_reader) to {MAX_READERS}, not {shown(max_readers)}")
    taken = {*ranks, not_to_be_had}
    return tuple(islice((rank for rank in count(len(ranks)) if rank not in taken), max_readers - len(ranks)))


def _checked(name: str, ranks: Sequence[int], number: int) -> tuple[int, ...]:
    try:
        checked = tuple(ranks)
    except TypeError:
        raise TypeError(f"{name} must be a sequence of ranks or None, not {shown(ranks)}") from None
    for rank in checked:
        check_int(f"a rank in {name}", rank, minimum=0, maximum=MAX_RANK)
    if len(checked) != number or len(set(checked)) != number:
        raise ValueError(f"{name} must be {number} different ranks, not {shown(ranks)}")
    return checked
