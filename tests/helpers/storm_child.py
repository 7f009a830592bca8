"""One end in a storm of signals whose handlers raise: ``storm_child.py END CODEC WHERE SIGNALS``.

The main thread uses it, another thread the other end; numbered messages tell what was lost, doubled or swapped.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
import threading
import time
from typing import Any

import numpy as np

from aioshm import Options, QueueClosed, QueueEmpty, QueueFull
from aioshm.blocking import MessageQueue, merge
from aioshm.codec import get_codec


class Alarm(Exception):
    pass


wide = False
"""Whether messages have 64 KiB, and chunks twice that."""


def message(number: int, codec: str) -> Any:
    head = b"%08d" % number
    size = 9000 if number % 29 == 7 else number % 40
    if wide:
        size = 200_000 if number % 29 == 7 else 65_536
    if codec == "raw":
        return head + bytes(size)
    return {"n": number, "body": bytes(size), **({"a": np.full(300, number % 100)} if number % 5 == 0 else {})}


def number_of(obj: Any, codec: str) -> int:
    if codec == "raw":
        return int(bytes(obj[:8]))
    assert obj["body"] == bytes(len(obj["body"]))
    if "a" in obj:
        assert (obj["a"] == obj["n"] % 100).all()
    return int(obj["n"])


def storm(signals: int, over: threading.Event, busy: MessageQueue) -> int:
    """Send signals: so many, and more as long as few messages have passed, or few signals have interrupted anything."""
    rng, sent = random.Random(signals), 0

    def is_calm() -> bool:
        return (busy.messages <= 60 or interrupts <= signals // 3) and sent < 20 * signals

    while not over.is_set() and (sent < signals or is_calm()):
        os.kill(os.getpid(), rng.choice((signal.SIGINT, signal.SIGUSR1, signal.SIGALRM)))
        sent += 1
        time.sleep(rng.choice((0.0001, 0.0004, 0.001)))
    return sent


armed = False
"""Whether handlers raise. Switching it takes no call, so nothing is raised between that and the call under test."""

interrupts = 0
"""How many calls have been interrupted: fewer than handlers have raised, for a call may be interrupted by several."""


def handle(number: int, _frame: object) -> None:
    if armed:
        raise KeyboardInterrupt if number == signal.SIGINT else Alarm


def main(end: str, codec: str, where: str, signals: str) -> None:
    over, ready = threading.Event(), threading.Event()
    global wide
    wide = where == "wide"
    options = Options(remote_window=8) if where == "remote" else Options()
    n_local = 0 if where == "remote" else 1
    writer = MessageQueue(
        1,
        n_local,
        connect_ip="127.0.0.1",
        max_chunk_bytes=131_072 if wide else 4096,
        max_chunks=8,
        slots=8,
        codec=codec,
        options=options,
    )
    reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
    result: list[Any] = []
    body = reading if end == "reader" else writing

    def other() -> None:
        try:
            if end == "reader":
                writer.wait_until_ready(20)
                ready.set()
                for number in itertools.count():
                    if over.is_set():
                        break
                    writer.enqueue(message(number, codec), 20)
                    result[:] = [number + 1]
                    if number % 50 == 0:
                        time.sleep(0.002)
                writer.close()
            else:
                reader.wait_until_ready(20)
                ready.set()
                for number, obj in enumerate(reader):
                    assert number_of(obj, codec) == number, f"{number_of(obj, codec)} came instead of {number}"
                    result[:] = [number + 1]
                    if number % 50 == 0:
                        time.sleep(0.002)
                reader.close()
        except BaseException as error:
            result[:] = [repr(error)]
            over.set()

    thread = threading.Thread(target=other, daemon=True)
    thread.start()
    (reader if end == "reader" else writer).wait_until_ready(20)
    ready.wait(20)

    warm = get_codec(codec)
    encoded = warm.encode(message(35, codec))  # imports what it needs: an import that is interrupted is Python's affair
    warm.decode(encoded, []) if isinstance(encoded, bytes) else warm.decode(b"".join(encoded[0]), list(encoded[1]))
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGALRM):
        signal.signal(number, handle)
    storming = threading.Thread(
        target=lambda: (storm(int(signals), over, reader if end == "reader" else writer), over.set())
    )
    storming.start()
    done = body(reader if end == "reader" else writer, codec, over)
    storming.join()
    (reader if end == "reader" else writer).close()
    thread.join(20)
    assert result == [done], f"{done} here, {result} there"
    print(done, interrupts, flush=True)


def reading(reader: MessageQueue, codec: str, over: threading.Event) -> int:
    global armed, interrupts
    expected = 0
    choose = random.Random(5)
    kinds = ("dequeue", "many", "nowait", "lease", "read", "broadcast", "next", "merge")
    merged = merge({0: reader})
    while True:
        kind = choose.choice(kinds)
        obj = batch = None
        try:
            armed = True
            if kind == "dequeue":
                obj = reader.dequeue(20)
            elif kind == "broadcast":
                obj = reader.broadcast_object()
            elif kind == "nowait":
                obj = reader.dequeue_nowait()
            elif kind == "many":
                batch = reader.dequeue_many(5, 20)
            elif kind == "merge":
                _, obj = next(merged)
            elif kind == "next":
                for obj in reader:  # noqa: B007
                    break
            elif kind == "lease":
                with reader.lease() if choose.random() < 0.7 else reader.lease(20) as obj:
                    pass
            else:
                with reader.acquire_read(20) as view:
                    obj = b"%b" % view[:8]  # takes no call: nothing is raised between the way in and this
            armed = False
        except QueueEmpty:
            armed = False
            continue
        except (KeyboardInterrupt, Alarm):
            armed = False
            interrupts += 1
        except (QueueClosed, StopIteration):
            armed = False
            break
        else:
            if kind == "next" and obj is None:
                break
        if batch is None and obj is not None:
            batch = [obj]
        for each in batch or ():
            if kind != "read" or codec == "raw":
                number = number_of(each, codec)
                assert number == expected, f"{number} came instead of {expected} ({kind})"
            expected += 1
    assert reader.messages == expected, f"{reader.messages} were received, {expected} noted"
    return expected


def writing(writer: MessageQueue, codec: str, over: threading.Event) -> int:
    global armed, interrupts
    choose = random.Random(5)
    kinds = ("enqueue", "many", "nowait", "broadcast", *(("block",) if codec == "raw" else ()))
    while not over.is_set():
        number = writer.messages
        kind = choose.choice(kinds)
        messages = [message(number + ahead, codec) for ahead in range(3)]
        try:
            armed = True
            if kind == "enqueue":
                writer.enqueue(messages[0], 20)
            elif kind == "broadcast":
                writer.broadcast_object(messages[0])
            elif kind == "many":
                writer.enqueue_many(messages, 20)
            elif kind == "nowait":
                writer.enqueue_nowait(messages[0])
            else:
                with writer.acquire_write(20) as chunk:
                    chunk[:8] = messages[0][:8]
            armed = False
        except QueueFull:
            armed = False
        except (KeyboardInterrupt, Alarm):
            armed = False
            interrupts += 1
    return writer.messages


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    finally:  # what went wrong is reported in full, though the storm goes on
        armed = False
