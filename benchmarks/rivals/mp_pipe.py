"""``multiprocessing.Pipe``: one for each reader, ``send_bytes`` of what ``pickle.dumps`` returns.

That is quicker than ``Connection.send``, which makes a new pickler for each message.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.payloads import Payload
from benchmarks.rivals.base import Line, ReaderEnd, Receiver, Rival, Sender, WriterEnd


class PipeSender(Sender):
    """Pickles once, then writes to one pipe after the other."""

    def __init__(self, connections: list[Connection]) -> None:
        self._connections = connections

    async def send(self, message: Any) -> None:
        data = pickle.dumps(message, 5)
        for connection in self._connections:
            connection.send_bytes(data)

    async def aclose(self) -> None:
        for connection in self._connections:
            connection.close()


class PipeReceiver(Receiver):
    """Reads from its pipe."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def receive(self) -> Any:
        return pickle.loads(self._connection.recv_bytes())

    async def aclose(self) -> None:
        self._connection.close()


@dataclass(frozen=True)
class PipeWriterEnd(WriterEnd):
    """The pipes' writing ends."""

    connections: list[Connection]

    async def open(self) -> PipeSender:
        return PipeSender(self.connections)

    def leave(self) -> None:
        for connection in self.connections:
            connection.close()


@dataclass(frozen=True)
class PipeReaderEnd(ReaderEnd):
    """A pipe's reading end."""

    connection: Connection

    async def open(self) -> PipeReceiver:
        return PipeReceiver(self.connection)

    def leave(self) -> None:
        self.connection.close()


def _line(payload: Payload, n_reader: int) -> Line:
    pipes = [Pipe(duplex=False) for _ in range(n_reader)]
    return Line(PipeWriterEnd([sender for _, sender in pipes]), [PipeReaderEnd(receiver) for receiver, _ in pipes])


RIVAL = Rival("mp.Pipe", _line, blocks=True)
