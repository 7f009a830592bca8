"""Recordings of events: a file of messages as received, with time and endpoint.

The file begins with the line `MAGIC`. Records follow: the length in 4 bytes, then a msgpack array
``[received_at, endpoint, topic, seq, payload]``. A truncated file can be read up to its last complete record.
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
        received_at: Time of arrival, in seconds since the epoch.
        endpoint: The publisher's endpoint.
        topic: The first frame; empty if the replay port sent no topic.
        seq: The number.
        payload: The encoded batch as received.
    """

    received_at: float
    endpoint: str
    topic: bytes
    seq: int
    payload: bytes


def write_record(file: BinaryIO, record: Record) -> None:
    """Append one record to a file that begins with `MAGIC`, and flush: the record survives a crash of this process."""
    data = msgspec.msgpack.encode(record)
    file.write(len(data).to_bytes(_LENGTH_BYTES, "big") + data)
    file.flush()


def read_records(file: BinaryIO) -> Iterator[Record]:
    """Iterate over the records of a file.

    Raises:
        CodecError: Not a recording, or damaged; the text names the record. Records before it have been yielded.
    """
    if file.read(len(MAGIC)) != MAGIC:
        raise CodecError("not a recording of events: the first line is missing")
    decode = msgspec.msgpack.Decoder(Record).decode
    number = 0
    while header := file.read(_LENGTH_BYTES):
        size = int.from_bytes(header, "big")
        data = b""
        if len(header) == _LENGTH_BYTES and size <= _MAX_RECORD_BYTES:
            data = file.read(size)
        if len(data) != size or not size:
            raise CodecError(f"record {number} is cut off or damaged")
        try:
            yield decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise CodecError(f"record {number} is damaged: {error}") from None
        number += 1
