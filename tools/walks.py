"""How many calls, and moves between files, each thing that a user does takes: found with ``sys.setprofile``.

A call is a Python function or coroutine of the package that is entered; one that goes on after an await does not count
again. A move is a call that lies in another file than the call before it: what a reader of the code, or a debugger that
steps into everything, has to follow. Both ends of a queue are in this process and on one loop, except where a row says
that only one of them is meant.

It needs nothing but the public interface, so any version of the package can be walked through:

    python tools/walks.py [--json] [--steps NAME]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import opcode
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import aioshm
import aioshm.blocking
from aioshm import MessageQueue, Options
from aioshm.engine import (
    CoreEngine,
    EngineHandshakeMetadata,
    EngineStartupCoordinator,
    EngineZmqAddresses,
    get_engine_client_zmq_addr,
    shake_hands,
)

PACKAGE = str(Path(aioshm.__file__).parent)
REPEATS = 11
WARM_UP = 50
TIMEOUT_S = 30.0
MESSAGE = {"step": 1, "tokens": [1, 2, 3]}
RESUME = opcode.opmap["RESUME"]


@dataclass
class Walk:
    """What was called, in order.

    Attributes:
        steps: ``file:function`` of each call.
    """

    steps: list[str] = field(default_factory=list)

    def __enter__(self) -> Walk:
        """Note the calls of this thread from here on."""
        sys.setprofile(self._note)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _arg: object) -> None:
        if event == "call":
            code = frame.f_code
            if code.co_filename.startswith(PACKAGE) and _is_entry(code, frame.f_lasti):
                self.steps.append(f"{code.co_filename[len(PACKAGE) + 1 :]}:{code.co_qualname}")

    def figures(self) -> dict[str, int]:
        """Count: calls, moves, how many of those go back to a file that had been left, and files."""
        files = [step.partition(":")[0] for step in self.steps]
        moves = [now for before, now in pairwise(files) if now != before]
        return {
            "calls": len(files),
            "moves": len(moves),
            "moves back": len(files[:1] + moves) - len(set(files)),
            "files": len(set(files)),
        }


def _is_entry(code: CodeType, at: int) -> bool:
    """Tell the beginning of a function from a coroutine that goes on: the lowest two bits that RESUME has say which."""
    return code.co_code[at] != RESUME or code.co_code[at + 1] & 3 == 0


@asynccontextmanager
async def _queue(n_local: int, **options: Any) -> AsyncIterator[tuple[MessageQueue, MessageQueue]]:
    """Give both ends of a queue with one reader, attached, after some messages."""
    writer = MessageQueue(1, n_local, connect_ip="127.0.0.1", options=Options(**options))
    async with writer, MessageQueue.create_from_handle(writer.export_handle(), 0) as reader:
        await asyncio.gather(writer.wait_until_ready(TIMEOUT_S), reader.wait_until_ready(TIMEOUT_S))
        for _ in range(WARM_UP):
            await writer.enqueue(MESSAGE)
            await reader.dequeue(TIMEOUT_S)
        yield writer, reader


async def hot_enqueue() -> Walk:
    """Send while there is room."""
    async with _queue(1) as (writer, reader):
        with Walk() as walk:
            await writer.enqueue(MESSAGE)
        await reader.dequeue(TIMEOUT_S)
    return walk


async def hot_dequeue() -> Walk:
    """Receive what is there."""
    async with _queue(1) as (writer, reader):
        await writer.enqueue(MESSAGE)
        with Walk() as walk:
            await reader.dequeue()
    return walk


async def parking_dequeue() -> Walk:
    """Receive what another thread sends after the reader has gone to sleep (the reader's side)."""
    writer = aioshm.blocking.MessageQueue(1, 1, options=Options(wait="park"))
    send, failed = threading.Semaphore(0), threading.Event()

    def write() -> None:
        try:
            with writer:
                writer.wait_until_ready(TIMEOUT_S)
                for _ in range(WARM_UP + 1):
                    if not send.acquire(timeout=TIMEOUT_S):
                        return
                    writer.enqueue(MESSAGE)
        except BaseException:
            failed.set()
            raise

    thread = threading.Thread(target=write)
    async with MessageQueue.create_from_handle(writer.export_handle(), 0) as reader:
        thread.start()
        try:
            await reader.wait_until_ready(TIMEOUT_S)
            for _ in range(WARM_UP):
                send.release()
                await reader.dequeue(TIMEOUT_S)
            parks = reader.stats().parks
            sender = threading.Thread(target=_release_once_parked, args=(reader, parks, send))
            sender.start()
            with Walk() as walk:
                await reader.dequeue()
            sender.join()
        finally:
            send.release(WARM_UP + 1)
            await asyncio.to_thread(thread.join)
    assert not failed.is_set(), "the writer's thread failed"
    return walk


def _release_once_parked(reader: MessageQueue, parks: int, send: threading.Semaphore) -> None:
    while reader.stats().parks == parks:
        pass
    send.release()


async def local_attach() -> Walk:
    """Make both ends of a queue on one host and let them meet."""
    with Walk() as walk:
        writer = MessageQueue(1, 1)
        reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
        await asyncio.gather(writer.wait_until_ready(TIMEOUT_S), reader.wait_until_ready(TIMEOUT_S))
    await writer.aclose()
    await reader.aclose()
    return walk


async def remote_enqueue() -> Walk:
    """Send over TCP."""
    async with _queue(0) as (writer, reader):
        await _acknowledged(writer)
        with Walk() as walk:
            await writer.enqueue(MESSAGE)
        await reader.dequeue(TIMEOUT_S)
    return walk


async def remote_dequeue() -> Walk:
    """Receive over TCP, from the moment at which the message is sent (with what the writer's end does meanwhile)."""
    async with _queue(0) as (writer, reader):
        await _acknowledged(writer)
        await writer.enqueue(MESSAGE)
        with Walk() as walk:
            await reader.dequeue()
    return walk


async def remote_ack() -> Walk:
    """Acknowledge a message that was received, until the writer has forgotten it."""
    async with _queue(0) as (writer, reader):
        await _acknowledged(writer)
        await writer.enqueue(MESSAGE)
        await reader.dequeue(TIMEOUT_S)
        walk = Walk()
        while writer.stats().kept:
            with walk:
                await asyncio.sleep(0.001)
    return walk


async def _acknowledged(writer: MessageQueue) -> None:
    while writer.stats().kept:  # noqa: ASYNC110 - nothing tells when it changes
        await asyncio.sleep(0.001)


async def hello_to_ready() -> Walk:
    """Start one engine up: HELLO, INIT, READY, between a coordinator and an engine on one loop."""
    address = get_engine_client_zmq_addr(True, "")

    def initialize(_metadata: EngineHandshakeMetadata) -> dict[str, Any]:
        return {"num_gpu_blocks": 100}

    with Walk() as walk:
        addresses = EngineZmqAddresses(["ipc:///in"], ["ipc:///out"])
        async with EngineStartupCoordinator(address, [CoreEngine(0)], addresses) as startup:
            engine: Awaitable[Any] = shake_hands(startup.handshake_address, 0, initialize=initialize)
            await asyncio.gather(startup.wait(TIMEOUT_S), engine)
            sys.setprofile(None)
    return walk


WALKS: dict[str, Callable[[], Awaitable[Walk]]] = {
    "hot enqueue": hot_enqueue,
    "hot dequeue": hot_dequeue,
    "dequeue that parks": parking_dequeue,
    "local attach, both ends": local_attach,
    "remote enqueue": remote_enqueue,
    "remote dequeue": remote_dequeue,
    "remote acknowledgement": remote_ack,
    "HELLO to READY, both ends": hello_to_ready,
}


def shortest(walk: Callable[[], Awaitable[Walk]]) -> Walk:
    """Walk several times and return the shortest: what a timer or a slow machine adds is no part of it."""

    async def all_of_them() -> list[Walk]:
        return [await walk() for _ in range(REPEATS)]

    return min(asyncio.run(all_of_them()), key=lambda each: len(each.steps))


def main() -> None:
    """Print the figures of every walk, or the steps of one."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    parser.add_argument("--steps", choices=WALKS, metavar="NAME", help=f"print the calls of one of: {', '.join(WALKS)}")
    arguments = parser.parse_args()
    if arguments.steps:
        print("\n".join(shortest(WALKS[arguments.steps]).steps))
        return
    figures = {name: shortest(walk).figures() for name, walk in WALKS.items()}
    if arguments.json:
        print(json.dumps(figures))
        return
    for name, row in figures.items():
        print(f"{name:28}", ", ".join(f"{count} {what}" for what, count in row.items()))


if __name__ == "__main__":
    main()
