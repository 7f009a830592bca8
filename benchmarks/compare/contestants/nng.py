"""pynng over ipc: a Push0/Pull0 pair for each reader, carrying what an encoder made once for all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.compare.codecs import decoder, encoder
from benchmarks.compare.contestant import SMALL_CODECS, Codec, Contestant, End, Job, Line, Port

MAX_BUFFER = 128
"""Messages on either side; NNG takes 8192 at most."""


@dataclass(frozen=True)
class WriterEnd(End):
    """Listens at one address for each reader."""

    addresses: tuple[str, ...]
    codec: Codec

    def open(self) -> Port:
        import pynng

        sockets = [
            pynng.Push0(listen=address, send_buffer_size=MAX_BUFFER, block_on_dial=True) for address in self.addresses
        ]
        encode, sends = encoder(self.codec), [socket.send for socket in sockets]

        def send(message: Any) -> None:
            data = encode(message)
            for send in sends:
                send(data)

        def close() -> None:
            for socket in sockets:
                socket.close()

        return Port(send, close)


@dataclass(frozen=True)
class ReaderEnd(End):
    """Dials its address."""

    address: str
    codec: Codec

    def open(self) -> Port:
        import pynng

        # Without blocking it goes on dialling until the writer listens.
        socket = pynng.Pull0(dial=self.address, recv_buffer_size=MAX_BUFFER, block_on_dial=False)
        decode, receive = decoder(self.codec), socket.recv
        return Port(receive if self.codec == "raw" else lambda: decode(receive()), socket.close)


def _line(job: Job) -> Line:
    from benchmarks.compare.contestant import ipc_address

    addresses = tuple(ipc_address().replace("ipc://@", "abstract://") for _ in range(job.n_reader))
    return Line(WriterEnd(addresses, job.codec), [ReaderEnd(address, job.codec) for address in addresses])


CONTESTANTS = [Contestant("pynng", _line, False, "pynng", "pynng", SMALL_CODECS)]
