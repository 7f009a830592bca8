"""pynng over ipc: a Push0/Pull0 pair for each reader, carrying what an encoder made once for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.contestants.codecs import decoding, encoder
from benchmarks.contestants.contestant import SMALL_CODECS, Contestant, Port, close_all, hand, handed
from benchmarks.contestants.pyzmq import ipc_address
from benchmarks.framework.workload import Workload

MAX_BUFFER = 128
"""Messages on either side; NNG takes 8192 at most."""


def open_writer(links: Sequence[Connection], workload: Workload) -> Port:
    """Listen at one address for each reader."""
    import pynng

    sockets = []
    for link in links:
        address = ipc_address().replace("ipc://@", "abstract://")
        sockets.append(pynng.Push0(listen=address, send_buffer_size=MAX_BUFFER, block_on_dial=True))
        hand([link], address)
    encode, sends = encoder(workload.codec), [socket.send for socket in sockets]

    def send(message: Any) -> None:
        data = encode(message)
        for send in sends:
            send(data)

    return Port(send, partial(close_all, sockets))


def open_reader(link: Connection, workload: Workload, _rank: int) -> Port:
    """Dial the writer's address."""
    import pynng

    socket = pynng.Pull0(dial=handed(link), recv_buffer_size=MAX_BUFFER, block_on_dial=True)
    return Port(decoding(workload.codec, socket.recv), socket.close)


CONTESTANTS = [Contestant("pynng", open_writer, open_reader, False, "pynng", "pynng", SMALL_CODECS)]
