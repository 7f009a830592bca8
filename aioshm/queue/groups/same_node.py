"""The test which ranks of a process group share memory."""

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
from aioshm.queue.groups.process_group import ObjectGroup, as_group, broadcast, check_rank, gather
from aioshm.ring.segment import Segment

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

logger: logging.Logger = logging.getLogger("aioshm.queue")

PROBE_TIMEOUT_S = 20.0
"""How long a rank waits for the segment, which takes an instant unless the machine is overloaded."""

_WHAT = "the test for shared memory"
_PAUSE_S = 0.01  # after a failed accept
_SECRET_BYTES = 32
_HERE = b"+"  # with the descriptor, if the segment has no name


def in_the_same_node_as(
    pg: ProcessGroup | ObjectGroup, source_rank: int = 0, *, options: Options | None = None
) -> list[bool]:
    """Return, by rank, which processes share memory with the process of one rank.

    A collective that blocks: every rank calls it and gets the same list. Host names do not matter: rank ``source_rank``
    creates a small segment with a secret like a queue's, and all other ranks map it like a queue's readers.

    Args:
        pg: A ``torch.distributed.ProcessGroup`` with a backend for the CPU such as gloo, a `StatelessProcessGroup`, or
            an object with ``rank``, ``world_size``, ``broadcast_obj`` and ``all_gather_obj``.
        source_rank: The rank in the group of the process to compare with.
        options: The options of the future queue; only the source's count. None: from the source's environment.

    Raises:
        SharedMemoryError: The source cannot make a segment or a socket.
        OutOfDescriptors, OutOfThreads: A limit of this process is reached.
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
        probes: list[_Probe] = []  # at the source only

        def open_probe() -> _Invitation:
            probe = _Probe(Options.from_env() if options is None else options, group.world_size)
            probes.append(stack.enter_context(probe))
            return probe.invitation

        invitation = broadcast(group, source, open_probe)
        return gather(group, lambda: bool(probes) or _reaches_segment(invitation, group.rank))


class _Invitation(NamedTuple):
    """The source's message to all other ranks."""

    address: str
    secret: bytes  # the content of the segment
    segment: str | None


class _Probe:
    """The source's segment with a secret, and a thread that passes its descriptor to processes of this user."""

    def __init__(self, options: Options, world_size: int) -> None:
        secret = secrets.token_bytes(_SECRET_BYTES)
        with naming_limits(_WHAT), ExitStack() as undo:
            self._segment = Segment.create(_SECRET_BYTES, options.backing)
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
        self.invitation = _Invitation(self._address, secret, self._segment.name)

    def _serve(self) -> None:
        fds = []
        if self._segment.name is None:
            fds.append(self._segment.fd)
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        poll.register(self._stopped, select.POLLIN)
        while self._stopped.fileno() not in [fd for fd, _ in poll.poll()]:
            try:
                sock, _ = self._sock.accept()
            except OSError:  # the peer has closed the connection, or no descriptor is free
                time.sleep(_PAUSE_S)
                continue
            with sock, suppress(OSError):  # never reads, so no peer can block this
                if peer_credentials(sock)[1] == os.geteuid():
                    socket.send_fds(sock, [_HERE], fds)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.close()
        self._thread.join()
        self._undo.close()


def _reaches_segment(invitation: _Invitation, rank: int) -> bool:
    """Map the source's segment as a queue's reader would; return whether it has the secret."""
    try:
        with naming_limits(_WHAT):
            fd = _fetch(invitation.address)
        if fd is not None:
            segment = Segment(fd, _SECRET_BYTES, None)
        elif invitation.segment is not None:
            segment = Segment.open(invitation.segment, _SECRET_BYTES)
        else:
            return False
        with closing(segment):
            return hmac.compare_digest(segment.view[:_SECRET_BYTES], invitation.secret)
    except LimitReached:  # a queue over the network needs even more
        raise
    except Exception as error:  # a queue's reader would fail, too
        logger.debug("rank %d shares no memory with %s: %s", rank, invitation.address, error)
        return False


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
