"""pyzmq over ipc: PUSH/PULL to one reader, XPUB/SUB to several; plain calls, or awaited through ``zmq.asyncio``.

Arrays travel as frames of their own, sent and received with ``copy=False``: the quickest way there is, although the
sender must then leave its buffers alone until they have gone.
"""

from __future__ import annotations

import functools
import secrets
import sys
import tempfile
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from benchmarks.contestants.codecs import decoder, encoder, from_frames, to_frames
from benchmarks.contestants.contestant import Contestant, Port, hand, handed
from benchmarks.framework.workload import Codec, Workload

NO_BOUND = 0
"""For XPUB, which drops messages at its high-water mark."""


def open_writer(awaited: bool, links: Sequence[Connection], workload: Workload) -> Port:
    """Bind, and wait until every reader is there."""
    several = len(links) > 1
    # Both kinds of socket take the same steps; only calls differ, so opening uses the plain one.
    plain: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.XPUB if several else zmq.PUSH)
    plain.sndhwm = NO_BOUND if several else workload.slots
    plain.linger = 0
    if several:
        plain.setsockopt(zmq.XPUB_VERBOSE, True)
    plain.bind(ipc_address())
    n_reader = len(links)
    hand(links, (plain.last_endpoint, several))
    for _ in range(n_reader if several else 0):
        plain.recv()  # a subscription
    socket, close = _socket(awaited, plain)
    return Port(_sender(workload.codec, socket), close)


def open_reader(awaited: bool, link: Connection, workload: Workload, _rank: int) -> Port:
    """Connect, and subscribe if there are several."""
    address, several = handed(link)
    plain: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB if several else zmq.PULL)
    plain.rcvhwm = NO_BOUND if several else workload.slots
    plain.linger = 0
    if several:
        plain.setsockopt(zmq.SUBSCRIBE, b"")
    plain.connect(address)
    socket, close = _socket(awaited, plain)
    return Port(_receiver(workload.codec, awaited, socket), close)


def ipc_address() -> str:
    """Return an address for a socket that leaves no file behind (on Linux), however the processes end."""
    name = f"aioshm-benchmark-{secrets.token_hex(8)}"
    return f"ipc://@{name}" if sys.platform == "linux" else f"ipc://{Path(tempfile.gettempdir()) / name}"


def _socket(awaited: bool, plain: Any) -> tuple[Any, Callable[[], None]]:
    """Return the socket whose calls are used, and a function that closes it."""
    socket = zmq.asyncio.Socket.shadow(plain.underlying) if awaited else plain

    def close() -> None:
        if socket is not plain:
            socket.close(linger=0)
        plain.close(linger=0)

    return socket, close


def _sender(codec: Codec, socket: Any) -> Callable[..., Any]:
    if codec in {"array", "tensor"}:
        send_frames = socket.send_multipart
        return lambda message: send_frames(to_frames(message), copy=False)  # an awaitable, if awaited
    if codec == "raw":
        return socket.send  # type: ignore[no-any-return]
    encode, send = encoder(codec), socket.send
    return lambda message: send(encode(message))


def _receiver(codec: Codec, awaited: bool, socket: Any) -> Callable[..., Any]:
    decode, receive, receive_frames = decoder(codec), socket.recv, socket.recv_multipart

    async def decoded_awaited() -> Any:
        return decode(await receive())

    async def frames_awaited() -> Any:
        return from_frames(codec, [frame.buffer for frame in await receive_frames(copy=False)])

    if codec == "raw":
        return receive  # type: ignore[no-any-return]
    if codec in {"array", "tensor"}:
        if awaited:
            return frames_awaited
        return lambda: from_frames(codec, [frame.buffer for frame in receive_frames(copy=False)])
    return decoded_awaited if awaited else lambda: decode(receive())


def _contestant(name: str, awaited: bool) -> Contestant:
    ends = functools.partial(open_writer, awaited), functools.partial(open_reader, awaited)
    return Contestant(name, *ends, awaited, bounded=(True, False))


CONTESTANTS = [_contestant("zmq.asyncio", True), _contestant("pyzmq", False)]
