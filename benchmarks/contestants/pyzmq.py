"""pyzmq over ipc: PUSH/PULL to one reader, XPUB/SUB to several; plain calls, or awaited through ``zmq.asyncio``.

Arrays travel as frames of their own, sent and received with ``copy=False``: the quickest way there is, although the
sender must then leave its buffers alone until they have gone.

Over TCP it is a bare XPUB/SUB, which promises nothing: it forgets what a reader misses while its connection is down,
holds nobody back, and lets anybody in. It has no high-water mark here, so that every message of the measurement
arrives; with one, it would drop them silently. It takes part twice: as it comes, with one copy at either end, and with
``copy=False``, where what is received is a view of ZeroMQ's memory, as aioshm's leases are.
"""

from __future__ import annotations

import functools
import secrets
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from benchmarks.contestants.codecs import decoder, encoder, from_frames, to_frames
from benchmarks.contestants.contestant import ALL_CODECS, Contestant, Port, hand, handed
from benchmarks.framework.workload import Codec, Workload

NO_BOUND = 0
"""For XPUB, which drops messages at its high-water mark."""


@dataclass(frozen=True)
class Style:
    """A way to use it.

    Attributes:
        awaited: Whether its calls are awaited.
        tcp: Whether it goes over TCP, where it always is XPUB/SUB.
        copy: Whether ZeroMQ copies plain bytes.
    """

    awaited: bool = True
    tcp: bool = False
    copy: bool = True


def open_writer(style: Style, links: Sequence[Connection], workload: Workload) -> Port:
    """Bind, and wait until every reader is there."""
    several = style.tcp or len(links) > 1
    # Both kinds of socket take the same steps; only what is awaited differs, so opening uses the plain one.
    plain: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.XPUB if several else zmq.PUSH)
    plain.sndhwm = NO_BOUND if several else workload.slots
    plain.linger = 0
    if several:
        plain.setsockopt(zmq.XPUB_VERBOSE, True)
    plain.bind("tcp://127.0.0.1:*" if style.tcp else ipc_address())
    n_reader = len(links)
    hand(links, (plain.last_endpoint, several))
    for _ in range(n_reader if several else 0):
        plain.recv()  # a subscription
    return _port(style, plain, functools.partial(_sender, workload.codec))


def open_reader(style: Style, link: Connection, workload: Workload, _rank: int) -> Port:
    """Connect, and subscribe if there are several."""
    address, several = handed(link)
    plain: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB if several else zmq.PULL)
    plain.rcvhwm = NO_BOUND if several else workload.slots
    plain.linger = 0
    if several:
        plain.setsockopt(zmq.SUBSCRIBE, b"")
    plain.connect(address)
    return _port(style, plain, functools.partial(_receiver, workload.codec))


def ipc_address() -> str:
    """Return an address for a socket that leaves no file behind (on Linux), however the processes end."""
    name = f"aioshm-benchmark-{secrets.token_hex(8)}"
    return f"ipc://@{name}" if sys.platform == "linux" else f"ipc://{Path(tempfile.gettempdir()) / name}"


def _port(style: Style, plain: Any, call: Callable[[Style, Any], Callable[..., Any]]) -> Port:
    socket = zmq.asyncio.Socket.shadow(plain.underlying) if style.awaited else plain

    def close() -> None:
        if socket is not plain:
            socket.close(linger=0)
        plain.close(linger=0)

    return Port(call(style, socket), close)


def _sender(codec: Codec, style: Style, socket: Any) -> Callable[..., Any]:
    if codec in {"array", "tensor"}:
        send_frames = socket.send_multipart
        return lambda message: send_frames(to_frames(message), copy=False)  # an awaitable, if awaited
    if codec == "raw":
        return socket.send if style.copy else functools.partial(socket.send, copy=False)
    encode, send = encoder(codec), socket.send
    return lambda message: send(encode(message))


def _receiver(codec: Codec, style: Style, socket: Any) -> Callable[..., Any]:
    decode, receive, receive_frames = decoder(codec), socket.recv, socket.recv_multipart

    async def view_awaited() -> Any:
        return (await receive(copy=False)).buffer

    async def decoded_awaited() -> Any:
        return decode(await receive())

    async def frames_awaited() -> Any:
        return from_frames(codec, [frame.buffer for frame in await receive_frames(copy=False)])

    if codec == "raw":
        return receive if style.copy else view_awaited
    if codec in {"array", "tensor"}:
        if style.awaited:
            return frames_awaited
        return lambda: from_frames(codec, [frame.buffer for frame in receive_frames(copy=False)])
    return decoded_awaited if style.awaited else lambda: decode(receive())


def _contestant(name: str, style: Style) -> Contestant:
    ends = functools.partial(open_writer, style), functools.partial(open_reader, style)
    codecs: frozenset[Codec] = frozenset({"raw"}) if style.tcp else ALL_CODECS
    bounded = (not style.tcp, False)
    return Contestant(name, *ends, style.awaited, "zmq.asyncio", "pyzmq", codecs, bounded=bounded)


CONTESTANTS = [_contestant("zmq.asyncio", Style()), _contestant("pyzmq", Style(awaited=False))]
BARE = _contestant("bare zmq.asyncio", Style(tcp=True))
BARE_UNCOPIED = _contestant("bare zmq.asyncio, copy=False", Style(tcp=True, copy=False))
