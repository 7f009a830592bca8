"""What the processes of these tests run. Imports nothing but the standard library, so that they start quickly."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

LONG_S = 100


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def stay(**_: Any) -> None:
    """Run until told to end."""
    time.sleep(LONG_S)


def say_and_stay(*_: Any, **kwargs: Any) -> None:
    say(f"up {kwargs.get('dp_rank', '')}")
    time.sleep(LONG_S)


def tell_arguments(directory: str, *args: Any, **kwargs: Any) -> None:
    Path(directory, f"{kwargs['dp_rank']}.json").write_text(json.dumps({"args": args, "kwargs": kwargs}))


def leave(dp_rank: int, local_dp_rank: int, codes: list[int | None], text: str = "") -> None:
    """Exit with the code of this rank; None stays."""
    say(text)
    code = codes[local_dp_rank]
    if code is None:
        time.sleep(LONG_S)
    sys.exit(code)


def refuse_to_end(*_: Any, **__: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    say("up")
    while True:
        time.sleep(LONG_S)


def end_politely(seconds: float = 0.2, **_: Any) -> None:
    """Take some time to end when told to."""

    def end(*_: Any) -> None:
        time.sleep(seconds)
        os._exit(7)

    signal.signal(signal.SIGTERM, end)
    say("up")
    time.sleep(LONG_S)


def start_another(stubborn: bool = False, own_group: bool = False, **_: Any) -> None:
    """Start a process that knows nothing of dying with its parent; say its id."""
    if stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    other = subprocess.Popen(["sleep", str(LONG_S)], start_new_session=own_group)
    say(f"started {other.pid}")
    time.sleep(LONG_S)


def start_another_and_leave(code: int, **_: Any) -> None:
    other = subprocess.Popen(["sleep", str(LONG_S)], stderr=subprocess.DEVNULL)
    say(f"started {other.pid}")
    os._exit(code)


def interrupt_another(**_: Any) -> None:
    """Exit with the signal that a program of this one has died of."""
    other = subprocess.Popen(["sleep", str(LONG_S)])
    other.send_signal(signal.SIGINT)
    os._exit(-other.wait())


def chatter(size: int, **_: Any) -> None:
    line = "x" * 99 + "\n"
    for _number in range(size // 100):
        sys.stderr.write(line)
    say("done")


def serve(listen_address: str, sock: socket.socket, args: Any, client_config: dict[str, Any]) -> None:
    """Answer one connection with what it was given, then end as told."""
    connection, _ = sock.accept()
    with connection:
        connection.sendall(json.dumps([listen_address, args, client_config]).encode())


def tell_pid(listen_address: str, sock: socket.socket, args: Any, client_config: dict[str, Any]) -> None:
    """Send the process id to each connection, and keep the connection."""
    kept = []
    while True:
        kept.append(sock.accept()[0])
        kept[-1].sendall(b"%d\n" % os.getpid())


def serve_badly(listen_address: str, sock: Any, args: list[int | None], client_config: dict[str, Any]) -> None:
    """Exit with the code of this server; None stays."""
    code = args[client_config["client_index"]]
    if code is None:
        time.sleep(LONG_S)
    sys.exit(code)


def tell_modules(**_: Any) -> None:
    say(f"modules {[name for name in sys.modules if name.startswith('aioshm') and name != 'aioshm_parent']}")
    stay()
