"""An engine in a process of its own that does one thing wrong: ``python fake_engine.py ADDRESS INDEX PHASE FAULT``.

Needs little, so that it starts quickly. PHASE is where it goes wrong: before HELLO, connected, or ready. On standard
output it says when it did.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import msgspec
import zmq


def main(address: str, index: int, phase: str, fault: str) -> None:
    context: Any = zmq.Context()
    socket = context.socket(zmq.DEALER)
    rank = index + 7 if fault == "wrong rank" else index
    socket.setsockopt(zmq.ROUTING_ID, rank.to_bytes(2, "little"))
    socket.setsockopt(zmq.RECONNECT_IVL, 10)
    socket.connect(address)

    def go_wrong() -> None:
        print("the last words of engine", index, file=sys.stderr, flush=True)
        print(time.monotonic(), flush=True)
        if fault.startswith("exit"):
            # What was sent leaves first, as it does when Python ends.
            socket.close(linger=5000)
            context.term()
            os._exit(int(fault.split()[1]))
        elif fault.startswith("SIG"):
            os.kill(os.getpid(), signal.Signals[fault])
        else:
            assert fault in ("wrong rank", "nothing")

    def send(status: str, **fields: object) -> None:
        socket.send(msgspec.msgpack.encode({"status": status, "local": True, "headless": False, **fields}))

    if phase == "before HELLO":
        go_wrong()
    send("HELLO")
    if phase == "connected":
        socket.recv()
        go_wrong()
    if fault != "nothing" or phase == "ready":
        if phase != "connected":
            socket.recv()
        send("READY", num_gpu_blocks=100)
    if phase == "ready":
        go_wrong()
    time.sleep(1000)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4])
