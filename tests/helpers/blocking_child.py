"""One blocking end in a process of its own: ``python blocking_child.py ROLE ARGUMENTS...``; it says what it does."""

from __future__ import annotations

import resource
import sys
import time

from aioshm import AioshmError
from aioshm.blocking import MessageQueue


def say(text: object) -> None:
    print(text, flush=True)


def _reader(handle: str) -> MessageQueue:
    reader = MessageQueue.create_from_handle(handle, 0)
    reader.wait_until_ready(20)
    say("ready")
    return reader


def _writer(chunks: int) -> MessageQueue:
    writer = MessageQueue(1, 1, max_chunk_bytes=4096, max_chunks=chunks, slots=chunks)
    say(writer.export_handle().to_json())
    writer.wait_until_ready(20)
    return writer


def collect(handle: str) -> None:
    """Read to the end and say how it ended."""
    with _reader(handle) as reader:
        received = 0
        try:
            for number, payload in reader:
                assert number == received, f"{number} came instead of {received}"
                assert payload == bytes([number % 256]) * len(payload)
                received += 1
        except AioshmError as error:
            say(f"{received} then {type(error).__name__} {error}")
        else:
            say(f"{received} then closed")


def write(count: str, size: str) -> None:
    """Write messages, then stay."""
    writer = _writer(10)
    for number in range(int(count)):
        writer.enqueue((number, bytes([number % 256]) * int(size)))
    say("written")
    time.sleep(1000)
    writer.close()


def idle(handle: str) -> None:
    """Wait for a message and say how much CPU that took."""
    with _reader(handle) as reader:
        reader.dequeue()
        before = resource.getrusage(resource.RUSAGE_SELF)
        say("waiting")
        reader.dequeue()
        after = resource.getrusage(resource.RUSAGE_SELF)
        say(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def uncaught(handle: str) -> None:
    """Wait, and catch nothing."""
    with _reader(handle) as reader:
        reader.dequeue()


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
