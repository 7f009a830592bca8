"""One end of a queue in a process that tests kill; it prints each step: ``python child.py ROLE ARGUMENTS...``."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import mmap
import os
import signal
import sys
import threading
import time
from typing import Any

from aioshm import AioshmError, MessageQueue, blocking
from aioshm.queue.remote import source
from aioshm.ring.layout import CHUNK_HEADER_BYTES, SLOT_HEADER_BYTES
from aioshm.ring.mapping import address_of


def say(text: object) -> None:
    print(text, flush=True)


async def _reader(handle: str, rank: str) -> MessageQueue:
    reader = MessageQueue.create_from_handle(handle, int(rank))
    await reader.wait_until_ready(20)
    say("ready")
    return reader


async def hold(handle: str, rank: str) -> None:
    """Take a slot and keep it."""
    reader = await _reader(handle, rank)
    async with reader.acquire_read():
        say("holding")
        await asyncio.sleep(1000)


async def lease(handle: str, rank: str) -> None:
    """Lease a message and never end it."""
    reader = await _reader(handle, rank)
    async with reader.lease():
        say("leasing")
        await asyncio.sleep(1000)


async def idle(handle: str, rank: str) -> None:
    """Attach and read nothing."""
    reader = await _reader(handle, rank)
    await asyncio.sleep(1000)
    await reader.aclose()


def _fork() -> None:
    """Have a child that lives on."""
    pid = os.fork()
    if not pid:
        for fd in (0, 1, 2):
            os.close(fd)
        while True:
            signal.pause()
    say(f"child {pid}")


async def fork(handle: str, rank: str) -> None:
    """Attach, and have a child."""
    reader = await _reader(handle, rank)
    _fork()
    await asyncio.sleep(1000)
    await reader.aclose()


async def wait_and_fork() -> None:
    """Wait for a reader, and have a child."""
    writer = MessageQueue(1, 1)
    say(writer.export_handle().to_json())
    await writer.wait_until_ready(20)
    _fork()
    await asyncio.sleep(1000)
    await writer.aclose()


async def sleep_before_attaching(handle: str, rank: str) -> None:
    """Dial, but never let the loop attach."""
    reader = MessageQueue.create_from_handle(handle, int(rank))
    say("dialled")
    time.sleep(1000)
    await reader.aclose()


async def attach_without_data(handle: str, rank: str) -> None:
    """Attach to a queue of another host, but never say that data comes through: the queue does not get ready."""
    source.NetworkSource.receive_data = lambda *_: None  # type: ignore[method-assign]
    await _reader(handle, rank)


async def tell(handle: str, rank: str) -> None:
    """Say each message."""
    async with await _reader(handle, rank) as reader:
        async for message in reader:
            say(message)


async def collect(handle: str, rank: str) -> None:
    """Read to the end and say how it ended."""
    async with await _reader(handle, rank) as reader:
        received = 0
        try:
            async for number, payload in reader:
                assert number == received, f"{number} came instead of {received}"
                assert payload == bytes([number % 256]) * len(payload)
                received += 1
        except AioshmError as error:
            say(f"{received} then {type(error).__name__} {error}")
        else:
            say(f"{received} then closed")


async def scribble(handle: str, rank: str, where: str) -> None:
    """Write to the memory of the first message as it is mapped here, behind Python's back."""
    reader: Any = await _reader(handle, rank)
    async with reader.acquire_read():
        if where == "slot":
            target = reader.end.source.buffer._segment._map
            offset = reader.end.source.ring.layout.slot(0) + SLOT_HEADER_BYTES
        elif where == "chunk":
            target = reader.end.source.buffer._segment._map
            offset = reader.end.source.ring.layout.pools[0].start + CHUNK_HEADER_BYTES
        else:
            target, offset = reader.end.source.overflow.segments[0].mapping, 0
        say("scribbling")
        ctypes.memset(address_of(target) + offset, 0xFF, 100)
        say("scribbled")


async def remap(handle: str, rank: str) -> None:
    """Say through which descriptors and mappings of the queue's memory this process could write to it."""
    reader: Any = await _reader(handle, rank)
    async with reader.lease():
        ring = reader.end.source.buffer
        found = []
        for fd in os.listdir("/proc/self/fd"):
            try:
                if "aioshm" in os.readlink(f"/proc/self/fd/{fd}"):
                    found.append(int(fd))
            except FileNotFoundError:  # the one that lists the directory
                continue
        writable = []
        for fd in found:
            try:
                mmap.mmap(fd, 4096)
            except PermissionError:
                continue
            writable.append(fd)
        base, sizes = address_of(ring._segment._map), ring.layout
        slots = ctypes.c_void_p(base + sizes.header_bytes)
        length = ctypes.c_size_t(sizes.metadata_offset - sizes.header_bytes)
        refused = ctypes.CDLL(None).mprotect(slots, length, mmap.PROT_READ | mmap.PROT_WRITE) != 0
        say(f"{len(found)} descriptors, writable {writable}, mprotect {'refused' if refused else 'allowed'}")


async def write(count: str, size: str, chunks: str = "10") -> None:
    """Write messages as soon as told that readers attach, then stay."""
    writer = MessageQueue(1, 1, max_chunk_bytes=4096, max_chunks=int(chunks), slots=int(chunks))
    say(writer.export_handle().to_json())
    await writer.wait_until_ready(20)
    for number in range(int(count)):
        await writer.enqueue((number, bytes([number % 256]) * int(size)))
    say("written")
    await asyncio.sleep(1000)


async def lend(size: str) -> None:
    """Lend an array and send it; lend another one, and stay inside of its block."""
    writer = MessageQueue(1, 1, max_chunk_bytes=1 << 20, max_chunks=2)
    say(writer.export_handle().to_json())
    await writer.wait_until_ready(20)
    for number in range(2):
        async with writer.loan(int(size), "uint8") as array:
            array[:] = number + 1
            if number:
                say("lending")
                await asyncio.sleep(1000)


# Ends that nobody closes


async def _talking_ends() -> list[MessageQueue]:
    writer = MessageQueue(1, 0, connect_ip="127.0.0.1")
    reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
    await asyncio.gather(writer.wait_until_ready(10), reader.wait_until_ready(10))
    await writer.enqueue(bytearray(1_000_000))
    assert len(await reader.dequeue(10)) == 1_000_000
    return [writer, reader]


def leave_open() -> None:
    """Let the module keep ends of closed loops, one that was never awaited, and blocking ones."""
    global kept
    writer = blocking.MessageQueue(1, 0, connect_ip="127.0.0.1")
    reader = blocking.MessageQueue.create_from_handle(writer.export_handle(), 0)
    thread = threading.Thread(target=reader.dequeue, args=(10,))
    thread.start()
    writer.enqueue("text", 10)
    thread.join()
    kept = [asyncio.run(_talking_ends()), MessageQueue(1, 0, connect_ip="127.0.0.1"), writer, reader]


async def end_amid() -> None:
    """End the program where the ends are in use."""
    ends = await _talking_ends()
    raise SystemExit(len(ends) - 2)


# Ends of the blocking API


def _blocking_reader(handle: str) -> blocking.MessageQueue:
    reader = blocking.MessageQueue.create_from_handle(handle, 0)
    reader.wait_until_ready(20)
    say("ready")
    return reader


def collect_blocking(handle: str) -> None:
    """Read to the end and say how it ended."""
    with _blocking_reader(handle) as reader:
        received = 0
        try:
            for number, payload in reader:
                assert (number, payload) == (received, bytes([number % 256]) * len(payload))
                received += 1
        except AioshmError as error:
            say(f"{received} then {type(error).__name__} {error}")
        else:
            say(f"{received} then closed")


def write_blocking(count: str, size: str) -> None:
    """Write messages, then stay."""
    with blocking.MessageQueue(1, 1, max_chunk_bytes=4096, max_chunks=10, slots=10) as writer:
        say(writer.export_handle().to_json())
        writer.wait_until_ready(20)
        for number in range(int(count)):
            writer.enqueue((number, bytes([number % 256]) * int(size)))
        say("written")
        time.sleep(1000)


def idle_blocking(handle: str) -> None:
    """Wait for a message and say how much CPU that took."""
    with _blocking_reader(handle) as reader:
        reader.dequeue()
        before = time.process_time()
        say("waiting")
        reader.dequeue()
        say(time.process_time() - before)


def uncaught_blocking(handle: str) -> None:
    """Wait, and catch nothing."""
    with _blocking_reader(handle) as reader:
        reader.dequeue()


if __name__ == "__main__":
    logging.disable()  # what is on standard error counts as a complaint
    work = globals()[sys.argv[1]](*sys.argv[2:])
    if work is not None:
        asyncio.run(work)
