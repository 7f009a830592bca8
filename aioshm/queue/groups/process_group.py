"""The collectives of a process group, steps whose errors reach all ranks, and the test which ranks share memory.

Ranks are the group's own, 0 to ``world_size`` - 1, not the global ranks of ``torch.distributed``.
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import socket
import sys
from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from aioshm.arguments import check_int, shown
from aioshm.config import Options
from aioshm.errors import GroupBroken, HandleError, LimitReached, SharedMemoryError
from aioshm.lifeline.sockets import new_address, peer_credentials, remove, sockaddr
from aioshm.process.limits import naming_limits
from aioshm.ring.segment import Segment

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

logger: logging.Logger = logging.getLogger("aioshm.queue")

T = TypeVar("T")

_WHAT = "the test for shared memory"
_SECRET_BYTES = 32


@runtime_checkable
class ObjectGroup(Protocol):
    """The interface of process groups: `StatelessProcessGroup`, or a class of the caller's own.

    Every rank makes the same calls in the same order. Queues make the blocking calls in a thread.

    Attributes:
        rank: This process' rank in the group.
        world_size: The number of ranks.
    """

    rank: int
    world_size: int

    def broadcast_obj(self, obj: Any, src: int) -> Any:
        """Return rank ``src``'s object at every rank, and ignore the objects of all other ranks."""

    def all_gather_obj(self, obj: Any) -> list[Any]:
        """Return the objects of all ranks, by rank, at every rank."""


class _TorchGroup:
    """The collectives of a ``torch.distributed.ProcessGroup``."""

    def __init__(self, pg: ProcessGroup) -> None:
        import torch.distributed as dist

        self.rank = dist.get_rank(pg)  # first: raises ValueError for a destroyed group
        if self.rank < 0:
            raise _not_a_member()
        backends = dist.get_backend_config(pg)
        if "cpu" not in {backend.partition(":")[0] for backend in str(backends).split(",")}:
            raise ValueError(
                f"pg must have a backend for the CPU, this group has only {backends!r}: "
                "pass one made with torch.distributed.new_group(ranks, backend='gloo')"
            )
        self._pg = pg
        self.world_size = dist.get_world_size(pg)

    def broadcast_obj(self, obj: Any, src: int) -> Any:
        import torch
        import torch.distributed as dist

        objects = [obj]
        source = dist.get_global_rank(self._pg, src)  # torch takes global ranks, also in a subgroup
        self._collective(
            lambda: dist.broadcast_object_list(objects, source, group=self._pg, device=torch.device("cpu"))
        )
        return objects[0]

    def all_gather_obj(self, obj: Any) -> list[Any]:
        import torch.distributed as dist

        objects: list[Any] = [None] * self.world_size
        self._collective(lambda: dist.all_gather_object(objects, obj, group=self._pg))
        return objects

    def _collective(self, call: Callable[[], object]) -> None:
        try:
            call()
        except RuntimeError as error:  # from gloo
            text = str(error)
            if "timed out" in text.lower() or "timeout" in text.lower():
                raise TimeoutError(f"a collective of the process group timed out: {text}") from error
            raise GroupBroken(f"a collective of the process group failed: {text}") from error


def as_group(pg: ProcessGroup | ObjectGroup) -> ObjectGroup:
    """Return the collectives of a process group, or raise."""
    # A process that has a group of torch has imported torch. Do not import it here.
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available():
        if isinstance(pg, dist.ProcessGroup):
            return _TorchGroup(pg)
        outside = dist.GroupMember.NON_GROUP_MEMBER
        if type(pg) is type(outside) and pg == outside:
            raise _not_a_member()  # an int, which new_group() returns at ranks outside of the group
    if not isinstance(pg, ObjectGroup):
        raise TypeError(
            "pg must be a torch.distributed.ProcessGroup, a StatelessProcessGroup or an object with rank, world_size, "
            f"broadcast_obj(obj, src) and all_gather_obj(obj), not {pg!r}"
        )
    if check_int("pg.rank", pg.rank, minimum=0) >= check_int("pg.world_size", pg.world_size, minimum=1):
        raise ValueError(f"pg.rank must be below pg.world_size ({pg.world_size}), not {pg.rank}")
    return pg


def check_rank(name: str, rank: object, world_size: int) -> int:
    """Check a rank of the group; errors name the argument and the value."""
    checked = check_int(name, rank, minimum=0)
    if checked >= world_size:
        raise ValueError(f"{name} must be below the group's world size ({world_size}), not {shown(rank)}")
    return checked


def gather(group: ObjectGroup, step: Callable[[], T]) -> list[T]:
    """Run a step at every rank; return the results by rank, or raise at all ranks if any fails."""
    mine, error = _attempt(step)
    everybody: list[tuple[Any, str | None]] = group.all_gather_obj((mine, _text(error)))
    if error is not None:
        raise error
    for rank, (_, failure) in enumerate(everybody):
        if failure is not None:
            raise HandleError(f"no queue was made, because rank {rank} could not take part: {failure}")
    return [value for value, _ in everybody]


def broadcast(group: ObjectGroup, source: int, step: Callable[[], T]) -> T:
    """Run a step at the source rank; return its result at every rank, or raise at every rank if the step raises."""
    if group.rank != source:
        value, failure = group.broadcast_obj(None, source)
        if failure is not None:
            raise HandleError(f"rank {source} could not make the queue: {failure}")
        return value  # type: ignore[no-any-return]
    mine, error = _attempt(step)
    group.broadcast_obj((mine, _text(error)), source)
    if error is not None:
        raise error
    assert mine is not None
    return mine


def _attempt(step: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return step(), None
    except Exception as error:
        return None, error


def _text(error: Exception | None) -> str | None:
    if error is None:
        return None
    return f"{type(error).__name__}: {error}"


def _not_a_member() -> ValueError:
    return ValueError("pg is a process group that this process is no member of")


# Which ranks share memory


def in_the_same_node_as(
    pg: ProcessGroup | ObjectGroup, source_rank: int = 0, *, options: Options | None = None
) -> list[bool]:
    """Return, by rank, which processes share memory with the process of one rank.

    A collective that blocks: every rank calls it and gets the same list. Host names do not matter: rank ``source_rank``
    listens where a queue's writer would, with a small segment if segments have names, and all other ranks connect and
    map the segment like a queue's readers.

    Args:
        pg: A ``torch.distributed.ProcessGroup`` with a backend for the CPU such as gloo, a `StatelessProcessGroup`, or
            an object with ``rank``, ``world_size``, ``broadcast_obj`` and ``all_gather_obj``.
        source_rank: The rank in the group of the process to compare with.
        options: The options of the future queue; only the source's count. None: from the source's environment.

    Raises:
        SharedMemoryError: The source cannot make a segment or a socket.
        OutOfDescriptors: A limit of this process is reached.
        HandleError: The same, at all other ranks.
        ValueError, TypeError: An argument is out of range, or ``pg`` is no process group of this process.
    """
    group = as_group(pg)
    check_rank("source_rank", source_rank, group.world_size)
    if options is not None and not isinstance(options, Options):
        raise TypeError(f"options must be an Options or None, not {options!r}")
    return probe(group, source_rank, options)


def probe(group: ObjectGroup, source: int, options: Options | None) -> list[bool]:
    """Run `in_the_same_node_as` with checked arguments."""
    with ExitStack() as stack:
        address, secret, segment = broadcast(
            group, source, lambda: _open_probe(stack, options or Options.from_env(), group.world_size)
        )
        return gather(group, lambda: group.rank == source or _reaches(address, secret, segment))


def _open_probe(stack: ExitStack, options: Options, world_size: int) -> tuple[str, bytes, str | None]:
    """Listen until the stack ends; return the address, and content and name of a segment if segments have names."""
    secret = secrets.token_bytes(_SECRET_BYTES)
    name = None
    with naming_limits(_WHAT):
        if options.backing == "named":
            segment = stack.enter_context(closing(Segment.create(_SECRET_BYTES, options.backing)))
            segment.view[:_SECRET_BYTES] = secret
            name = segment.name
        address = new_address(options, secrets.token_bytes(16), "probe")
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        try:
            listener.bind(sockaddr(address))
            stack.callback(remove, address)
            listener.listen(max(64, world_size))  # the kernel connects; nobody accepts
        except OSError as error:
            raise SharedMemoryError(error.errno, f"cannot listen on {address}: {error.strerror}") from None
    return address, secret, name


def _reaches(address: str, secret: bytes, segment: str | None) -> bool:
    """Connect to the source's socket, which could pass descriptors, and open its segment, as a queue's reader would."""
    try:
        with naming_limits(_WHAT), socket.socket(socket.AF_UNIX) as sock:
            sock.setblocking(False)
            sock.connect(sockaddr(address))
            if peer_credentials(sock)[1] != os.geteuid():
                return False
            if segment is None:
                return True
            with closing(Segment.open(segment, _SECRET_BYTES)) as opened:
                return hmac.compare_digest(opened.view[:_SECRET_BYTES], secret)
    except LimitReached:  # a queue over the network needs even more
        raise
    except Exception as error:  # a queue's reader would fail, too
        logger.debug("no memory is shared with %s: %s", address, error)
        return False
