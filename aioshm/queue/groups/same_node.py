"""Finding out which ranks of a process group share memory, by sharing some."""

from __future__ import annotations

import errno
import hmac
import logging
import os
import secrets
import select
import socket
import struct
import time
from contextlib import ExitStack, closing, suppress
from typing import TYPE_CHECKING, NamedTuple, Self

from aioshm.config import Options
from aioshm.errors import LimitReached, SharedMemoryError
from aioshm.lifeline.sockets import new_address, peer_credentials, receive, remove, sockaddr
from aioshm.process.limits import check_descriptors, naming_limits, out_of_descriptors, start_thread
from aioshm.queue.groups.process_group import ObjectGroup, as_group, check_rank, gather, tell
from aioshm.ring.segment import Segment

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

logger: logging.Logger = logging.getLogger("aioshm.queue")

PROBE_TIMEOUT_S = 20.0
"""How long a rank waits for the segment: only a machine that is overloaded takes more than an instant."""

_WHAT = "finding out who shares memory"
_PAUSE_S = 0.01  # after a failed accept
_SECRET_BYTES = 32
_MARK_BYTES = 16
_HERE = b"+"  # comes with the descriptor, if there is one


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
    secret: bytes  # what is found in the memory, if it is the same
    segment: str | None
    size: int


class _Door:
    """The source's segment with a secret, and a thread that hands its descriptor to this user's processes."""

    def __init__(self, options: Options, world_size: int) -> None:
        secret = secrets.token_bytes(_SECRET_BYTES)
        with naming_limits(_WHAT), ExitStack() as undo:
            self._segment = Segment.create(_SECRET_BYTES + world_size * _MARK_BYTES, options.backing)
            undo.callback(self._segment.close)
            self._segment.view[:_SECRET_BYTES] = secret
            self._address = new_address(options, secrets.token_bytes(16), "probe")
            self._sock = undo.enter_context(socket.socket(socket.AF_UNIX))
            try:
                self._sock.bind(sockaddr(self._address))
                undo.callback(remove, self._address)
                self._sock.listen(max(64, world_size))
            except OSError as error:
                raise SharedMemoryError(error.errno, f"cannot listen on {self._address}: {error.strerror}") from None
            self._sock.setblocking(False)
            stop, stopped = socket.socketpair()
            self._stop = undo.enter_context(stop)
            self._stopped = undo.enter_context(stopped)
            check_descriptors(_WHAT, 1)  # a connection's
            self._thread = start_thread(self._serve, name="aioshm-probe", what=_WHAT)
            self._undo = undo.pop_all()
        self.invitation = _Invitation(self._address, secret, self._segment.name, self._segment.size)

    def has(self, rank: int, mark: bytes | None) -> bool:
        """Return whether a rank has left this mark in the memory, as it says."""
        return mark is not None and hmac.compare_digest(self._segment.view[_place_of(rank)], mark)

    def _serve(self) -> None:
        fds = [self._segment.fd] if self._segment.name is None else []
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        poll.register(self._stopped, select.POLLIN)
        while self._stopped.fileno() not in [fd for fd, _ in poll.poll()]:
            try:
                sock, _ = self._sock.accept()
            except OSError:  # it has gone again, or there are no descriptors just now
                time.sleep(_PAUSE_S)
                continue
            with sock, suppress(OSError):  # nothing is read, so nobody can keep this waiting
                if peer_credentials(sock)[1] == os.geteuid():
                    socket.send_fds(sock, [_HERE], fds)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.close()
        self._thread.join()
        self._undo.close()


def _leave_mark(invitation: _Invitation, rank: int) -> bytes | None:
    """Return the mark that this rank left in the source's memory, or None if out of reach."""
    try:
        with naming_limits(_WHAT):
            fd = _fetch(invitation.address)
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


def _fetch(address: str) -> int | None:
    """Connect as a queue's reader would; return the received descriptor, if any."""
    with socket.socket(socket.AF_UNIX) as sock:
        limit = struct.pack("@ll", int(PROBE_TIMEOUT_S), int(PROBE_TIMEOUT_S % 1 * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)  # connecting waits while the backlog is full
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        sock.connect(sockaddr(address))
        if peer_credentials(sock)[1] != os.geteuid():
            raise OSError(errno.EACCES, f"{address} is another user's")
        data, fds, cut = receive(sock)
    if cut:
        raise out_of_descriptors(_WHAT)
    if data != _HERE:
        raise OSError(errno.ECONNRESET, f"{address} was closed")
    return fds[0] if fds else None


def _place_of(rank: int) -> slice:
    start = _SECRET_BYTES + rank * _MARK_BYTES
    return slice(start, start + _MARK_BYTES)
