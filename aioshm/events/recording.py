"""Recorded events: a file of messages as they were on the wire, with when and from where they came.

The file begins with a line of its own, then holds one msgpack array after the other, each behind its length
in 4 bytes: ``[received_at, endpoint, topic, seq, payload]``. A file that was cut off can be read up to there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

import msgspec

from aioshm.errors import CodecError

MAGIC = b"aioshm events 1\n"
_LENGTH_BYTES = 4
_MAX_RECORD_BYTES = 2**30


class Record(msgspec.Struct, array_like=True, frozen=True):
    """One recorded batch.

    Attributes:
        received_at: When it was received, in seconds since the epoch.
        endpoint: Where it came from.
        topic: The first frame; empty where the replay port did not say.
        seq: Its number.
        payload: The batch as it was on the wire.
    """

    received_at: float
    endpoint: str
    topic: bytes
    seq: int
    payload: bytes


class Recorder:
    """Writes records to a binary file."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._encode = msgspec.msgpack.Encoder().encode
        file.write(MAGIC)

    def write(self, record: Record) -> None:
        """Append one record; it is in the file, whatever ends this process."""
        data = self._encode(record)
        self._file.write(len(data).to_bytes(_LENGTH_BYTES, "big") + data)
        self._file.flush()


def read_records(file: BinaryIO) -> Iterator[Record]:
    """Iterate over the records of a file.

    Raises:
        CodecError: Not such a file, or damaged; the text says at which record. What came before was yielded.
    """
    if file.read(len(MAGIC)) != MAGIC:
        raise CodecError("not a recording of events: the first line is missing")
    decode = msgspec.msgpack.Decoder(Record).decode
    number = 0
    while header := file.read(_LENGTH_BYTES):
        size = int.from_bytes(header, "big")
        data = file.read(size) if len(header) == _LENGTH_BYTES and size <= _MAX_RECORD_BYTES else b""
        if len(data) != size or not size:
            raise CodecError(f"record {number} is cut off or damaged")
        try:
            yield decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise CodecError(f"record {number} is damaged: {error}") from None
        number += 1
