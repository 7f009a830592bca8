"""The handle that vLLM's processes pass to each other, with the names that its code reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NoReturn

from aioshm.errors import HandleError
from aioshm.queue.handle import Handle as QueueHandle


@dataclass
class Handle:
    """Names a queue, and lets in any holder; pickles as vLLM's does, through pipes, arguments and collectives.

    Attributes:
        queue: What `aioshm.MessageQueue.create_from_handle` takes.
        local_reader_ranks: The ranks that read the ring.
        remote_subscribe_addr: Where remote readers connect; None where there are none.
        remote_addr_ipv6: Whether that is an IPv6 address.
    """

    queue: QueueHandle = field(repr=False)
    local_reader_ranks: list[int]
    remote_subscribe_addr: str | None
    remote_addr_ipv6: bool = False

    @classmethod
    def of(cls, queue: QueueHandle) -> Handle:
        """Return the handle of a queue in vLLM's form."""
        address = None if queue.remote is None else queue.remote.data
        return cls(queue, list(queue.local_reader_ranks), address, address is not None and "[" in address)

    def rank_of(self, rank: int) -> int:
        """Return a reader's rank in the queue.

        vLLM lets remote readers have any rank (the only reader of a worker's answers says -1); here each has a place of
        its own, so that is told apart only where there is one of them.

        Raises:
            ValueError: No reader has this rank.
        """
        remote = () if self.queue.remote is None else self.queue.remote.ranks
        if rank in self.local_reader_ranks or rank in remote:
            return rank
        if len(remote) == 1:
            return remote[0]
        ranks = sorted((*self.local_reader_ranks, *remote))
        raise ValueError(f"rank must be one of {ranks}, not {rank}: each reader of this queue has a place of its own")

    # What else vLLM's own queue would read, in a process where it has not been replaced.

    @property
    def buffer_handle(self) -> NoReturn:
        """Refuse: the ring is not one that vLLM's own queue could map."""
        raise _not_vllms()

    local_subscribe_addr = local_notify_addr = tensor_arena_handle = buffer_handle


def as_queue_handle(handle: Any) -> Handle:
    """Return what was passed as a handle."""
    if isinstance(handle, Handle):
        return handle
    if isinstance(handle, QueueHandle):
        return Handle.of(handle)
    if hasattr(handle, "local_reader_ranks") and hasattr(handle, "buffer_handle"):
        raise HandleError(
            "this handle is of vLLM's own message queue: set AIOSHM_VLLM=1, with aioshm installed, in the process that "
            "made it too"
        )
    raise TypeError(f"handle must be what export_handle() returned, not {handle!r}")


def _not_vllms() -> HandleError:
    return HandleError(
        "this handle is of an aioshm queue, but this process uses vLLM's own: set AIOSHM_VLLM=1, with aioshm "
        "installed, in every process of this vLLM, those on other hosts too"
    )
