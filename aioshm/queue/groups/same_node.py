"""Finding out which ranks of a process group share memory, by sharing some."""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import secrets
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, NamedTuple, Self

from aioshm.config import Options
from aioshm.errors import HandleError, LimitReached
from aioshm.lifeline.address import new_address
from aioshm.lifeline.dialer import attach, dial
from aioshm.lifeline.listener import LifelineListener
from aioshm.lifeline.peer import Peer
from aioshm.lifeline.protocol import Hello, Welcome
from aioshm.process.background import run_apart
from aioshm.process.limits import check_descriptors, naming_limits
from aioshm.process.threads import start_thread
from aioshm.queue.groups.process_group import ObjectGroup, as_group, check_rank, gather, tell
from aioshm.ring.layout import VERSION
from aioshm.ring.segment import Segment

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

logger: logging.Logger = logging.getLogger("aioshm.queue")

PROBE_TIMEOUT_S = 20.0
"""How long a rank waits for the segment: only a machine that is overloaded takes more than an instant."""

_LOOP_DESCRIPTORS = 3  # one that is made in part only is not given back
_SECRET_BYTES = 32
_MARK_BYTES = 16


def in_the_same_node_as(
    pg: ProcessGroup | ObjectGroup, source_rank: int = 0, *, options: Options | None = None
) -> list[bool]:
    """Return, by rank, which processes share memory with one of them.

    A collective that blocks: every rank calls it and gets the same list. Where a process runs, and what its host is
    called, is not asked: rank ``source_rank`` makes a small segment as a queue would, the others fetch it as a queue's
    readers would and each write something into it, and the source looks whether that has arrived.

    Args:
        pg: A ``torch.distributed.ProcessGroup`` with a backend for the CPU such as gloo, a `StatelessProcessGroup`, or
            an object with ``rank``, ``world_size``, ``broadcast_obj`` and ``all_gather_obj``.
        source_rank: Whose memory it is about, by its rank in the group.
        options: Of the queue that is to be made; only the source's count. None takes its environment.

    Raises:
        SharedMemoryError: The source cannot make a segment or a socket.
        OutOfDescriptors, OutOfThreads: This process cannot take part.
        HandleError: The same, at the other ranks.
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
        # Entered at the source only, and left there whatever becomes of the collectives.
        doors: list[_Door] = []

        def open_door() -> _Invitation:
            door = _Door(Options.from_env() if options is None else options, group.world_size)
            doors.append(stack.enter_context(door))
            return door.invitation

        invitation = tell(group, source, open_door)
        marks: list[bytes | None] = gather(group, lambda: None if doors else _leave_mark(invitation, group.rank))
        return tell(
            group, source, lambda: [rank == source or doors[0].has(rank, mark) for rank, mark in enumerate(marks)]
        )


class _Invitation(NamedTuple):
    """The source's message to the other ranks."""

    address: str
    queue_id: bytes
    token: bytes  # lets in any process that knows it
    secret: bytes  # what is found in the memory, if it is the same
    segment: str | None
    size: int


class _Door:
    """The source's segment with a secret, and its listener, on a loop in a thread."""

    def __init__(self, options: Options, world_size: int) -> None:
        queue_id, token, secret = secrets.token_bytes(16), secrets.token_bytes(32), secrets.token_bytes(_SECRET_BYTES)
        self._world_size = world_size
        what = "finding out who shares memory"
        with naming_limits(what), ExitStack() as undo:
            self._segment = Segment.create(_SECRET_BYTES + world_size * _MARK_BYTES, options.backing)
            undo.callback(self._segment.close)
            self._segment.view[:_SECRET_BYTES] = secret
            address = new_address(options, queue_id, "probe")
            self._listener = LifelineListener(address, queue_id, token, backlog=max(64, world_size))
            undo.callback(self._listener.close)
            check_descriptors(what, _LOOP_DESCRIPTORS)
            self._loop = asyncio.SelectorEventLoop()
            undo.callback(self._loop.close)
            self._listener.start(self._loop, self)
            self._thread = start_thread(self._loop.run_forever, name="aioshm-probe", what=what)
            undo.pop_all()
        self.invitation = _Invitation(address, queue_id, token, secret, self._segment.name, self._segment.size)

    def has(self, rank: int, mark: bytes | None) -> bool:
        """Return whether a rank has left this mark in the memory, as it says."""
        return mark is not None and hmac.compare_digest(self._segment.view[_place_of(rank)], mark)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._listener.close()
        self._loop.close()
        self._segment.close()

    # What the listener asks and tells (see `aioshm.lifeline.peer.Host`)

    def admit(self, hello: Hello) -> tuple[Welcome, list[int]]:
        if not 0 <= hello.rank < self._world_size:
            raise HandleError(f"there is no rank {hello.rank} in this group")
        by_descriptor = self._segment.name is None
        welcome = Welcome(os.getpid(), b"", by_descriptor, bells=False)
        return welcome, [self._segment.fd] if by_descriptor else []

    def awaits_end(self, hello: Hello) -> bool:
        """Return False: nobody waits for a rank."""
        return False

    def missed(self, hello: Hello, said_goodbye: bool) -> None:
        pass

    def attached(self, peer: Peer) -> None:
        pass

    def announce(self) -> None:
        pass

    def withdrawn(self, welcome: Welcome) -> None:
        pass

    def proven(self, peer: Peer) -> None:
        pass

    def gone(self, peer: Peer, said_goodbye: bool) -> None:
        pass

    def woken(self) -> None:
        pass


def _leave_mark(invitation: _Invitation, rank: int) -> bytes | None:
    """Return the mark that this rank left in the source's memory, or None if out of reach."""
    try:
        # In a thread, because this one may have an event loop that runs.
        silence = TimeoutError(f"nothing came from {invitation.address}")
        with naming_limits("finding out who shares memory"):
            fd = run_apart(lambda: _fetch(invitation, rank), 2 * PROBE_TIMEOUT_S, silence)
        size = invitation.size
        if fd is not None:
            segment = Segment(fd, size, None)
        elif invitation.segment is not None:
            segment = Segment.open(invitation.segment, size)
        else:
            return None
        with closing(segment):
            if not hmac.compare_digest(segment.view[:_SECRET_BYTES], invitation.secret):
                return None
            mark = secrets.token_bytes(_MARK_BYTES)
            segment.view[_place_of(rank)] = mark
            return mark
    except LimitReached:  # a queue over the network would need more
        raise
    except Exception as error:  # whatever it is, a queue would not get through either
        logger.debug("rank %d shares no memory with %s: %s", rank, invitation.address, error)
        return None


def _fetch(invitation: _Invitation, rank: int) -> int | None:
    """Attach as a queue's reader would; return the received descriptor, if any."""
    hello = Hello(VERSION, invitation.queue_id, invitation.token, rank, os.getpid())

    async def call() -> int | None:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            lifeline = await attach(invitation.address, hello, dial(invitation.address, hello))
        with closing(lifeline):
            return lifeline.take_segment() if lifeline.welcome.segment else None

    check_descriptors("finding out who shares memory", _LOOP_DESCRIPTORS)
    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        return runner.run(call())


def _place_of(rank: int) -> slice:
    start = _SECRET_BYTES + rank * _MARK_BYTES
    return slice(start, start + _MARK_BYTES)
