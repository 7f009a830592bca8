"""What is measured, and who takes part in what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from benchmarks.framework.workload import KIB, MIB, Workload, marked, plain_bytes, small_dict, tensor

Kind = Literal["stream", "round trips", "cadence"]

CADENCES_MS = [1, 2, 5, 10, 20, 50]
QUICK_CADENCES_MS = [5, 20]
CPU_BOUNDS = {1: 15, 5: 8, 20: 4}
"""Of a core, in per cent, that a reader at a cadence of so many milliseconds takes at most."""

AIOSHM = ["aioshm", "aioshm blocking"]
SIZED = ["aioshm, sized", "aioshm, 256 slots", "aioshm, 1024 slots", "aioshm, 16384 slots"]
ICEORYX = ["iceoryx2 polling", "iceoryx2 event"]
ZMQ = ["zmq.asyncio", "pyzmq"]
STDLIB = ["mp.Queue", "mp.Pipe"]
RIVAL_PACKAGES = ["vllm", "iceoryx2", "faster-fifo", "pynng", "torch"]
EVERYONE = [*AIOSHM, *SIZED, "vLLM", *ICEORYX, *ZMQ, *STDLIB, "faster-fifo", "pynng"]
FOR_TENSORS = ["aioshm", "aioshm blocking", "aioshm leased", *SIZED, "vLLM", "vLLM arena", *ZMQ, *STDLIB]


@dataclass(frozen=True)
class Case:
    """One thing to measure.

    Attributes:
        name: For ``--only``.
        title: As reports call it.
        kind: How it is measured.
        workload: What is sent.
        contestants: Who takes part, if installed.
        n_reader: Readers.
        quick: Whether ``--quick`` includes it.
    """

    name: str
    title: str
    kind: Kind
    workload: Workload
    contestants: Sequence[str]
    n_reader: int = 1
    quick: bool = False

    @property
    def by_bytes(self) -> bool:
        """Whether bytes/s say more than messages/s."""
        return self.workload.codec == "tensor"


def _stream(name: str, workload: Workload, contestants: Sequence[str], n_reader: int = 1, quick: bool = False) -> Case:
    return Case(name, workload.name, "stream", workload, contestants, n_reader, quick)


_SMALL = small_dict("pickle")
_SHORT = plain_bytes(64)

SMALL, MSGPACK, RAW = _SMALL.name, small_dict("msgpack").name, _SHORT.name
PING_PONG, CADENCE = "64 B ping-pong", "cadence"
LOANED = marked(16 * MIB).name
T_4K, T_64K, T_1M, T_16M, T_64M = (tensor(n).name for n in (4 * KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB))

CASES = [
    _stream("dict", _SMALL, EVERYONE, quick=True),
    _stream("msgpack", small_dict("msgpack"), [*AIOSHM, "vLLM", *ZMQ, "mp.Pipe"]),
    _stream("raw", _SHORT, EVERYONE, quick=True),
    _stream("fanout-2", _SMALL, EVERYONE, 2, quick=True),
    _stream("fanout-4", _SMALL, EVERYONE, 4),
    Case("pingpong", PING_PONG, "round trips", _SHORT, EVERYONE, quick=True),
    Case(
        "cadence",
        CADENCE,
        "cadence",
        _SMALL,
        [*AIOSHM, "vLLM", "zmq.asyncio", "iceoryx2 event", "mp.Pipe"],
        quick=True,
    ),
    _stream("4k", tensor(4 * KIB, slots=64, chunk_bytes=64 * KIB), FOR_TENSORS),
    _stream("64k", tensor(64 * KIB, slots=64, chunk_bytes=128 * KIB), FOR_TENSORS),
    _stream("1m", tensor(MIB), FOR_TENSORS, quick=True),
    _stream("16m", tensor(16 * MIB), FOR_TENSORS),
    _stream("loaned", marked(16 * MIB), ["aioshm loaned", "vLLM", "vLLM arena", "iceoryx2 loaned"]),
    _stream("64m", tensor(64 * MIB), [name for name in FOR_TENSORS if name != "aioshm leased"]),
]
