"""What signal handlers raise is kept from where it would do harm."""

from __future__ import annotations

import ast
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import aioshm
from aioshm.process.guard import Guard, built

PACKAGE = Path(aioshm.__file__).parent

BUILD = """
import os, random, signal, sys, threading, time
import msgspec
from aioshm.process.guard import built

class Late(Exception):
    pass

armed = False

def handle(*_):
    if armed:
        raise Late

signal.signal(signal.SIGUSR1, handle)
stop = False

def storm():
    while not stop:
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(random.choice((0.00002, 0.0001, 0.0003)))

late = made = 0
thread = None
while late < int(sys.argv[1]):
    if thread is None:
        thread = threading.Thread(target=storm, daemon=True)
        thread.start()
    inner = msgspec.defstruct("Inner", [("a", int), ("b", "list[dict[str, int]]")], tag=True)
    outer = msgspec.defstruct("Outer", [(f"f{number}", inner) for number in range(9)], tag=True)
    try:
        armed = True
        built(lambda: msgspec.msgpack.Decoder(outer | inner))
        armed = False
        made += 1
    except Late:
        armed = False
        late += 1
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
print(made, late)
os._exit(0)
"""

IMPORT = """
import os, signal, sys, threading, time
import numpy, zmq, asyncio, msgspec
started = threading.Event()
done = False

def storm():
    started.wait()
    time.sleep(float(sys.argv[1]))
    while not done:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.0003)

threading.Thread(target=storm, daemon=True).start()
try:
    started.set()
    import aioshm.engine, aioshm.events
except BaseException as error:  # an import that was interrupted may fail in any way, but not crash
    pass
finally:
    try:
        os._exit(0)
    except BaseException:
        os._exit(0)
"""


@pytest.fixture
def handled() -> Iterator[list[int]]:
    calls: list[int] = []

    def handle(number: int, _frame: Any) -> None:
        calls.append(number)
        raise TimeoutError(f"call {len(calls)}")

    before = signal.signal(signal.SIGUSR1, handle)
    yield calls
    signal.signal(signal.SIGUSR1, before)


def test_what_a_handler_raises_comes_afterwards(handled: list[int]) -> None:
    reached = []

    def make() -> int:
        signal.raise_signal(signal.SIGUSR1)
        reached.append("after the first")
        signal.raise_signal(signal.SIGUSR1)
        reached.append("after the second")
        return 5

    with pytest.raises(TimeoutError, match="call 1"):
        built(make)
    assert reached == ["after the first", "after the second"]
    assert handled == [signal.SIGUSR1] * 2
    with pytest.raises(TimeoutError, match="call 3"):
        signal.raise_signal(signal.SIGUSR1)  # at once again


def test_the_handlers_are_given_back(handled: list[int]) -> None:
    before = [signal.getsignal(number) for number in signal.valid_signals()]
    assert built(lambda: signal.getsignal(signal.SIGUSR1)) not in before
    assert [signal.getsignal(number) for number in signal.valid_signals()] == before


def test_a_handler_that_was_set_meanwhile_stays(handled: list[int]) -> None:
    def other(*_: object) -> None: ...

    built(lambda: signal.signal(signal.SIGUSR1, other))
    assert signal.getsignal(signal.SIGUSR1) is other


def test_elsewhere_it_does_nothing(handled: list[int]) -> None:
    found = []
    thread = threading.Thread(target=lambda: found.append(built(lambda: signal.getsignal(signal.SIGUSR1))))
    before = signal.getsignal(signal.SIGUSR1)
    thread.start()
    thread.join(20)
    assert found == [before]


def test_guards_may_be_nested(handled: list[int]) -> None:
    outer = Guard()
    outer.begin()
    built(lambda: signal.raise_signal(signal.SIGUSR1))  # which raises nothing: the outer one keeps it
    outer.end()
    assert isinstance(outer.error, TimeoutError)


def test_decoders_are_built_here_only() -> None:
    """A new one elsewhere has to go through `built`, or a signal's handler can crash the process."""
    bare = []
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        inside = {
            id(node)
            for call in ast.walk(tree)
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "built"
            for node in ast.walk(call)
        }
        bare += [
            f"{path.relative_to(PACKAGE)}:{node.lineno}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
            and ast.unparse(node.func).endswith(("msgpack.Decoder", "json.Decoder", "yaml.Decoder"))
            and id(node) not in inside
        ]
    assert bare == []


@pytest.mark.slow
def test_decoders_built_in_a_storm() -> None:
    done = subprocess.run([sys.executable, "-c", BUILD, "1500"], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    _, late = map(int, done.stdout.split())
    assert late >= 1500


@pytest.mark.slow
def test_interrupts_while_importing() -> None:
    for number in range(60):
        done = subprocess.run(
            [sys.executable, "-c", IMPORT, str(number * 0.002)], capture_output=True, text=True, timeout=60
        )
        assert done.returncode in (0, 1, -2), done.stderr[-2000:]
