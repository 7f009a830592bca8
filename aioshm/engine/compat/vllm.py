"""vLLM 0.33's ``MessageQueue``, on this library's queue: the same names, arguments and results, for blocking callers.

With ``AIOSHM_VLLM=1`` it replaces vLLM's own in all of its processes; see `register`. Differences:

* Readers sleep between messages instead of spinning for a second after each; a timer wakes them for steady steps.
* When a process dies, or closes its end, waiting calls of its peers raise an error that names the process (`PeerDied`,
  `QueueClosed`); with vLLM's own queue they wait on.
* Remote readers are encrypted, and their messages acknowledged and retransmitted.
* ``enable_shm_tensor_arena`` changes nothing: tensors of any size travel through shared memory beside the pickle, with
  one copy into it and one out of it, and are the receiver's own.
* After `shutdown`, all calls raise ``RuntimeError("cancelled")``, `enqueue` included.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import logging
import os
import sys
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NoReturn

from aioshm.config import vllm_options, vllm_wanted
from aioshm.errors import AioshmError, HandleError, QueueCancelled, QueueClosed, RoleError
from aioshm.process.limits import start_thread
from aioshm.queue import blocking
from aioshm.queue.ends.reader import Reader
from aioshm.queue.handle import Handle as QueueHandle

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from aioshm.queue.groups.process_group import ObjectGroup

__all__ = ["Handle", "MessageQueue", "register"]

logger: logging.Logger = logging.getLogger("aioshm.engine")

_Queue = blocking.MessageQueue  # a parameter of vLLM's is named blocking

MAX_CHUNK_BYTES = 24 * 1024 * 1024
MAX_CHUNKS = 10
MAX_SPIN_CPU = 0.04
"""A worker's share of a core for meeting steady steps; with the steps themselves, it stays at 6% or below at 20 ms."""


@dataclass
class Handle:
    """Names a queue, and admits any holder; pickles as vLLM's does, through pipes, arguments and collectives.

    Attributes:
        queue: The handle for `aioshm.MessageQueue.create_from_handle`.
        local_reader_ranks: The ranks that read the ring.
        remote_subscribe_addr: Where remote readers connect; None without remote readers.
        remote_addr_ipv6: Whether ``remote_subscribe_addr`` is an IPv6 address.
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
        """Return a reader's rank in the queue; raise ValueError if no reader has this rank.

        vLLM lets remote readers have any rank (the only reader of a worker's answers says -1). Here each has a rank of
        its own, so any rank is accepted only for a single remote reader.
        """
        remote = () if self.queue.remote is None else self.queue.remote.ranks
        if rank in self.local_reader_ranks or rank in remote:
            return rank
        if len(remote) == 1:
            return remote[0]
        ranks = sorted((*self.local_reader_ranks, *remote))
        raise ValueError(f"rank must be one of {ranks}, not {rank}: each reader of this queue has a rank of its own")

    @property
    def buffer_handle(self) -> NoReturn:
        """Refuse a process where vLLM's own queue has not been replaced: it cannot map this ring."""
        raise HandleError(
            "this handle is of an aioshm queue, but this process uses vLLM's own: set AIOSHM_VLLM=1, with aioshm "
            "installed, in every process of this vLLM, also on other hosts"
        )

    local_subscribe_addr = buffer_handle
    local_notify_addr = buffer_handle
    tensor_arena_handle = buffer_handle


def as_queue_handle(handle: Any) -> Handle:
    """Return the handle; raise `HandleError` for a handle of vLLM's own queue."""
    if isinstance(handle, Handle):
        return handle
    if isinstance(handle, QueueHandle):
        return Handle.of(handle)
    if hasattr(handle, "local_reader_ranks") and hasattr(handle, "buffer_handle"):
        raise HandleError(
            "this handle is of vLLM's own message queue: set AIOSHM_VLLM=1, with aioshm installed, also in the process "
            "that created it"
        )
    raise TypeError(f"handle must be from export_handle(), not {handle!r}")


class MessageQueue:
    """A queue from one writer to many readers, with vLLM's interface; vLLM's documentation has the arguments.

    Any threads may use an end, one at a time, and `shutdown` it. An end that is dropped closes itself.

    Attributes:
        n_local_reader, n_remote_reader: The numbers of readers; readers know them, too.
        local_reader_rank: A local reader's index among local readers; -1 elsewhere.
        shutting_down: Whether `shutdown` was called.
        tensor_arena: None.
    """

    def __init__(
        self,
        n_reader: int,
        n_local_reader: int,
        local_reader_ranks: list[int] | None = None,
        max_chunk_bytes: int = MAX_CHUNK_BYTES,
        max_chunks: int = MAX_CHUNKS,
        connect_ip: str | None = None,
        enable_shm_tensor_arena: bool = False,
    ) -> None:
        queue = _Queue(
            n_reader,
            n_local_reader,
            local_reader_ranks,
            max_chunk_bytes,
            max_chunks,
            connect_ip or None,
            options=vllm_options(MAX_SPIN_CPU),
        )
        self._own(queue)

    @staticmethod
    def create_from_handle(handle: Handle, rank: int) -> MessageQueue:
        """Create a reader; the only remote reader may have the rank -1.

        Raises:
            HandleError: The handle is of vLLM's own queue, or of another host or user, or its queue is gone.
            TypeError, ValueError: The handle is none, or no reader has this rank.
        """
        handle = as_queue_handle(handle)
        rank = handle.rank_of(rank)
        self = MessageQueue.__new__(MessageQueue)
        self._own(_Queue.create_from_handle(handle.queue, rank), handle, rank)
        return self

    @staticmethod
    def create_from_process_group(
        pg: ProcessGroup | ObjectGroup,
        max_chunk_bytes: int,
        max_chunks: int,
        writer_rank: int = 0,
        external_writer_handle: Handle | None = None,
        blocking: bool = True,
    ) -> MessageQueue:
        """Create a queue from one rank of a process group to all other ranks; every rank calls this."""
        external = None if external_writer_handle is None else as_queue_handle(external_writer_handle).queue
        queue = _Queue.create_from_process_group(
            pg, max_chunk_bytes, max_chunks, writer_rank, external, False, options=vllm_options(MAX_SPIN_CPU)
        )
        return _around(queue, blocking)

    @staticmethod
    def create_from_process_group_single_reader(
        pg: ProcessGroup,
        max_chunk_bytes: int,
        max_chunks: int,
        reader_rank: int = 0,
        blocking: bool = False,
    ) -> tuple[MessageQueue, list[Handle]]:
        """Create a queue from every rank of a process group to one rank; every rank calls this.

        Returns:
            This rank's writer; and at ``reader_rank`` the handles of all ranks' queues, else an empty list.
        """
        if not hasattr(pg, "broadcast_obj"):
            import torch.distributed as dist

            reader_rank = dist.get_group_rank(pg, reader_rank)
        queue, handles = _Queue.create_from_process_group_single_reader(
            pg, max_chunk_bytes, max_chunks, reader_rank, False, options=vllm_options(MAX_SPIN_CPU)
        )
        return _around(queue, blocking), [Handle.of(handle) for handle in handles]

    def export_handle(self) -> Handle:
        """Return the handle for readers."""
        return self.handle

    def wait_until_ready(self) -> None:
        """Wait until every reader is attached; every end calls this."""
        with self._translated():
            self._queue.wait_until_ready()

    # Messages

    def enqueue(self, obj: Any, timeout: float | None = None) -> None:
        """Send an object to every reader.

        Raises:
            TimeoutError: No slot became free in time.
            RuntimeError: "cancelled": this end was shut down.
            PeerDied: A reader died.
            QueueClosed: Every reader has left.
        """
        try:
            self._queue.enqueue(obj, timeout and max(timeout, 0))
        except AioshmError as error:
            self._translate(error)

    def dequeue(
        self, timeout: float | None = None, indefinite: bool = False, *, cancel: threading.Event | None = None
    ) -> Any:
        """Receive the next message; ``indefinite``: warn never; ``cancel``, of earlier versions of vLLM, ends the wait.

        Raises:
            TimeoutError: Nothing arrived in time.
            RuntimeError: "cancelled": this end was shut down, or ``cancel`` is set.
            PeerDied, QueueClosed: The writer died, or has closed the queue, and all of its messages have been received.
        """
        try:
            return self._queue.dequeue(timeout and max(timeout, 0), cancel, indefinite)
        except AioshmError as error:
            self._translate(error)

    @contextlib.contextmanager
    def acquire_write(self, timeout: float | None = None) -> Iterator[memoryview]:
        """Give the block a free slot's chunk to fill; the end of the block publishes it."""
        with self._translated(), self._queue.acquire_write(timeout) as chunk:
            yield chunk

    @contextlib.contextmanager
    def acquire_read(self, timeout: float | None = None, indefinite: bool = False) -> Iterator[memoryview]:
        """Give the block the next message's bytes, undecoded."""
        with self._translated(), self._queue.acquire_read(timeout, None, indefinite) as chunk:
            yield chunk

    def broadcast_object(self, obj: Any = None) -> Any:
        """Send ``obj`` and return it (writer), or receive the writer's next message (reader)."""
        if self._is_writer:
            self.enqueue(obj)
            return obj
        return self.dequeue()

    # Closing

    def shutdown(self) -> None:
        """Close this end, from any thread: calls that wait raise ``RuntimeError("cancelled")``. Idempotent."""
        self.shutting_down: bool = True
        self._close()

    def _translate(self, error: AioshmError) -> None:
        """Raise the error that vLLM's callers expect."""
        if isinstance(error, QueueCancelled) or (isinstance(error, QueueClosed) and self.shutting_down):
            raise RuntimeError("cancelled") from None
        raise error

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except AioshmError as error:
            self._translate(error)

    # Creation

    def _own(self, queue: _Queue, handle: Handle | None = None, rank: int = -1) -> None:
        """Take this end of a queue; ``handle`` and ``rank`` are a reader's."""
        self._queue = queue
        self._is_writer = handle is None
        self.handle: Handle = handle or Handle.of(queue.export_handle())
        local = self.handle.local_reader_ranks
        self._is_local_reader = not self._is_writer and rank in local
        self._is_remote_reader = not self._is_writer and rank not in local
        self.local_reader_rank: int = -1
        if self._is_local_reader:
            self.local_reader_rank = local.index(rank)
        self.n_local_reader: int = len(local)
        self.n_remote_reader: int = self.handle.queue.n_reader - self.n_local_reader
        self.shutting_down = False
        self.tensor_arena: None = None
        self._close = weakref.finalize(self, _close, queue, os.getpid())


def _close(queue: _Queue, pid: int) -> None:
    """Close an end, in any thread: in one with an event loop, and in the garbage collector's."""
    if os.getpid() != pid:  # a forked child's copy, from which the queue itself has detached
        return
    try:
        queue.close()
    except RoleError:  # this thread runs an event loop of foreign code, which waits as long as any caller would
        start_thread(queue.close, name="aioshm-shutdown", what="closing a queue apart from the event loop").join()


def _around(queue: _Queue, wait: bool) -> MessageQueue:
    """Return a queue with vLLM's interface; with ``wait``, once it is ready."""
    self = MessageQueue.__new__(MessageQueue)
    if isinstance(queue.end, Reader):
        assert queue.end.handle is not None
        self._own(queue, Handle.of(queue.end.handle), queue.end.rank)
    else:
        self._own(queue)
    if wait:
        self.wait_until_ready()
    return self


# The plugin: vLLM calls `register` in each of its processes before it creates its queues (the entry points' group
# ``vllm.general_plugins``). vLLM's modules may have imported the class before: it is replaced in each of them.

QUEUE_MODULE: Final = "vllm.distributed.device_communicators.shm_broadcast"


def register() -> None:
    """Replace vLLM's ``MessageQueue`` wherever this process has imported it, if ``AIOSHM_VLLM=1``. Idempotent.

    A vLLM whose queue has another interface than that of 0.33 keeps its own.
    """
    if not vllm_wanted():
        return
    own: Any = importlib.import_module(QUEUE_MODULE).MessageQueue
    if own is MessageQueue:
        return
    found = differences(own, MessageQueue)
    if found:
        logger.error(
            "AIOSHM_VLLM=1 has no effect: this vLLM's message queue is not that of 0.33 (%s); install an aioshm "
            "made for it, or unset the variable",
            "; ".join(found),
        )
        return
    replaced = []
    for name, module in list(sys.modules.items()):
        # By its dictionary: packages that import lazily would import whatever has the name.
        if getattr(module, "__dict__", {}).get("MessageQueue") is own:
            module.MessageQueue = MessageQueue  # type: ignore[attr-defined]
            replaced.append(name)
    logger.info("vLLM's message queue is aioshm's, in %s", ", ".join(sorted(replaced)))


def differences(found: type, expected: type) -> list[str]:
    """Return how the public methods of a class differ from the expected ones."""
    different = []
    for name, parameters in signatures(expected).items():
        other = signatures(found).get(name, "missing")
        if other != parameters:
            different.append(f"{name}: {other} instead of {parameters}")
    return different


def signatures(queue: type) -> dict[str, str]:
    """Return the parameters of a class's public methods, without annotations and keyword-only ones."""
    found = {}
    for name in dir(queue):
        method = getattr(queue, name)
        if name == "__init__" or (not name.startswith("_") and inspect.isfunction(method)):
            shown = []
            for parameter in inspect.signature(method).parameters.values():
                text = parameter.name
                if parameter.default is not parameter.empty:
                    text += f"={parameter.default!r}"
                if parameter.kind is not parameter.KEYWORD_ONLY:
                    shown.append(text)
            found[name] = f"({', '.join(shown)})"
    return found
