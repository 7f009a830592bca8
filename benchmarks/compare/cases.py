"""The cases that are measured, and the contestants that take part in each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from benchmarks.framework.workload import KIB, MIB, Workload, loaned, plain_bytes, small_dict, tensor

Kind = Literal["stream", "round trips", "cadence", "waiting", "memory"]

AIOSHM = ["aioshm", "aioshm blocking"]
RIVAL_PACKAGES = ["vllm", "iceoryx2", "torch"]
EVERYONE = [*AIOSHM, "vLLM", "iceoryx2 polling", "zmq.asyncio", "pyzmq", "mp.Queue", "mp.Pipe"]
FOR_TENSORS = [*AIOSHM, "aioshm leased", "vLLM", "vLLM arena", "zmq.asyncio", "pyzmq", "mp.Queue", "mp.Pipe"]
AT_A_CADENCE = [*AIOSHM, "vLLM", "zmq.asyncio", "mp.Pipe"]


@dataclass(frozen=True)
class Case:
    """One thing to measure.

    Attributes:
        name: For ``--only``.
        title: As reports call it.
        kind: How it is measured: a key of `measure.KINDS`.
        workload: The kind of messages.
        contestants: Who takes part, if installed.
        n_reader: Readers.
        quick: Whether ``--quick`` includes it.
        period_ms: Between two messages of a cadence.
    """

    name: str
    title: str
    kind: Kind
    workload: Workload
    contestants: Sequence[str]
    n_reader: int = 1
    quick: bool = False
    period_ms: int = 0


def _stream(name: str, workload: Workload, contestants: Sequence[str], n_reader: int = 1, quick: bool = False) -> Case:
    return Case(name, workload.name, "stream", workload, contestants, n_reader, quick)


def _waiting(name: str, nbytes: int, quick: bool = False) -> Case:
    work = tensor(nbytes)
    return Case(name, f"{work.name} that waits", "waiting", work, ["aioshm"], quick=quick)


def _cadence(period_ms: int, quick: bool = False) -> Case:
    title = f"every {period_ms} ms"
    return Case(f"{period_ms}ms", title, "cadence", _SMALL, AT_A_CADENCE, quick=quick, period_ms=period_ms)


_SMALL = small_dict()
_MSGPACK = small_dict("msgpack")
_SHORT = plain_bytes(64)

CASES = [
    _stream("dict", _SMALL, EVERYONE, quick=True),
    _stream("fanout-2", _SMALL, EVERYONE, 2, quick=True),
    _stream("fanout-4", _SMALL, EVERYONE, 4),
    _stream("msgpack", _MSGPACK, [*AIOSHM, "vLLM", "zmq.asyncio", "pyzmq", "mp.Pipe"]),
    _stream("raw", _SHORT, EVERYONE, quick=True),
    Case("pingpong", "64 B ping-pong", "round trips", _SHORT, EVERYONE, quick=True),
    _stream("4k", tensor(4 * KIB, slots=64, chunk_bytes=64 * KIB), FOR_TENSORS),
    _stream("64k", tensor(64 * KIB, slots=64, chunk_bytes=128 * KIB), FOR_TENSORS),
    _stream("1m", tensor(MIB), FOR_TENSORS, quick=True),
    _stream("16m", tensor(16 * MIB), FOR_TENSORS),
    _stream("64m", tensor(64 * MIB), [name for name in FOR_TENSORS if name != "aioshm leased"]),
    _stream("loaned", loaned(16 * MIB), ["aioshm loaned", "vLLM", "vLLM arena"], quick=True),
    _waiting("lease-1m", MIB, quick=True),
    _waiting("lease-16m", 16 * MIB),
    _cadence(1),
    _cadence(5, quick=True),
    _cadence(20, quick=True),
    Case("memory", "memory of the ring after small dicts", "memory", _SMALL, ["aioshm"], quick=True),
]
