"""Cores over one ring, ready to pass messages: what the tests of the cores work with."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from rings import Cores
from support import raising as raising  # for tests of cores, too

from aioshm.ring import ShmRingBuffer
from aioshm.ring.slot import Slots

PLAIN = 7  # the first word of an ordinary message's header, here
FAR_NS = 1 << 62


class Pair(NamedTuple):
    """A ring, its slots, its writer's core and its readers' cores; gates are open."""

    ring: ShmRingBuffer
    slots: Slots
    writer: Any
    reader: Any
    readers: list[Any]
    cores: Cores


NewPair = Callable[..., Pair]


class Notes(list[str]):
    """Notes what it is called as."""

    def noting(self, what: str) -> Callable[[], None]:
        return lambda: self.append(what)


def open_gate(core: Any, turn: int = 1 << 30) -> None:
    core.belong(None)
    core.open = True
    core.budget = turn
    core.budget_ends_ns = FAR_NS


def make_pair(ring: ShmRingBuffer, cores: Cores, raw: bool = True) -> Pair:
    writer = cores.writer(ring.layout, ring.view)
    readers = [cores.reader(ring.layout, ring.view, index) for index in range(ring.layout.n_reader)]
    for core in (writer, *readers):
        core.bind(encode if core is writer else decode, PLAIN, raw, None)
        open_gate(core)
    return Pair(ring, writer.slots, writer, readers[0], readers, cores)


def close_pair(pair: Pair) -> None:
    for core in (pair.writer, *pair.readers):
        core.close()


def encode(obj: object) -> Any:
    """Encode text; give anything else back as it is."""
    return obj.encode() if isinstance(obj, str) else obj


def decode(message: bytes) -> object:
    return message.decode()


def flags(pair: Pair) -> list[bytes]:
    return [bytes(pair.slots[index].flags) for index in pair.slots]


def in_a_thread(call: Callable[[], object]) -> object:
    """Return what a call returns in another thread."""
    answers: list[object] = []
    thread = threading.Thread(target=lambda: answers.append(call()))
    thread.start()
    thread.join(60)
    return answers[0]
