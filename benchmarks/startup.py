"""How long engines take from their spawning to the last READY, against the same processes without a handshake.

Engine processes of ``CoreEngineProcManager`` shake hands with an ``EngineStartupCoordinator``; the rival's are started
by ``multiprocessing``, import the same, and say one byte down a pipe. What the former take longer, for each engine, is
the price of the handshake, of watching, and of keeping what each writes to its standard error. The front end's own
share, as CPU time, is a figure of both. Each repetition starts and stops everything anew; what is left afterwards, a
process, a descriptor or a file, ends the benchmark. How long it takes does not depend on ``--seconds``.
"""

from __future__ import annotations

import asyncio
import functools
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from statistics import median

import psutil

from aioshm.engine import (
    CoreEngine,
    CoreEngineProcManager,
    EngineHandshakeMetadata,
    EngineStartupCoordinator,
    EngineZmqAddresses,
    shake_hands,
)
from benchmarks.framework.crew import BenchmarkError, readable
from benchmarks.framework.harness import Settings, main, progress
from benchmarks.framework.report import Report

ENGINES = 16
QUICK_ENGINES = 2
COORDINATED, BARE = "aioshm", "multiprocessing"
OVERHEAD_MS = 5.0
TIMEOUT_S = 60.0


async def run(settings: Settings, report: Report) -> None:
    """Start both in turns, and hold one against the other."""
    n_engines = QUICK_ENGINES if settings.quick else ENGINES
    case = f"{n_engines} engines"
    await start_bare(1)  # what multiprocessing keeps: its resource tracker
    before = _what_is_there()
    for number in range(settings.repeat):
        progress(f"{number + 1} of {settings.repeat}")
        contestants: list[tuple[str, Callable[[], Awaitable[tuple[float, float]]]]] = [
            (COORDINATED, functools.partial(start_coordinated, n_engines, settings.loop_factory)),
            (BARE, functools.partial(start_bare, n_engines)),
        ]
        for name, start in contestants if number % 2 else contestants[::-1]:
            startup_s, cpu_s = await start()
            report.result(case, name).add(startup_ms=startup_s * 1e3, front_end_cpu_ms=cpu_s * 1e3)
            left = _what_is_there() - before
            if left:
                raise BenchmarkError(f"{name} has left behind: {', '.join(sorted(left))}")
    coordinated, bare = (report.result(case, name).figures["startup_ms"] for name in (COORDINATED, BARE))
    more = median(ours - theirs for ours, theirs in zip(coordinated, bare, strict=True)) / n_engines
    report.hold(f"more than {BARE} for each of {case}, from spawn to READY", more, "ms", OVERHEAD_MS)


async def start_coordinated(
    n_engines: int, loop_factory: Callable[[], asyncio.AbstractEventLoop]
) -> tuple[float, float]:
    """Start and stop engines; return how long the start took, and the CPU time that it took of this process."""
    engines = [CoreEngine(index, local=True) for index in range(n_engines)]
    with tempfile.TemporaryDirectory(prefix="aioshm-") as directory:
        address = f"ipc://{directory}/handshake"
        addresses = EngineZmqAddresses([f"ipc://{directory}/in"], [f"ipc://{directory}/out"])
        began, cpu = time.perf_counter(), time.process_time()
        async with CoreEngineProcManager(engine, n_engines, args=(address, loop_factory)) as manager:
            async with EngineStartupCoordinator(address, engines, addresses, proc_manager=manager) as startup:
                await startup.wait(TIMEOUT_S)
            took = time.perf_counter() - began, time.process_time() - cpu
        if os.listdir(directory):
            raise BenchmarkError("a socket file was left behind")
    return took


def engine(
    address: str, loop_factory: Callable[[], asyncio.AbstractEventLoop], *, dp_rank: int, local_dp_rank: int
) -> None:
    """Be an engine that has nothing to load, until it is terminated."""

    async def live() -> None:
        await shake_hands(address, dp_rank, initialize=_initialize)
        await asyncio.Event().wait()

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(live())


def _initialize(_metadata: EngineHandshakeMetadata) -> dict[str, int]:
    return {"num_gpu_blocks": 1}


async def start_bare(n_engines: int) -> tuple[float, float]:
    """Do the same without an engine."""
    context = multiprocessing.get_context("spawn")
    processes, pipes = [], []
    began, cpu = time.perf_counter(), time.process_time()
    try:
        for index in range(n_engines):
            ours, theirs = context.Pipe()
            process = context.Process(target=bare_engine, args=(theirs,), name=f"bare {index}", daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        for pipe in pipes:
            async with asyncio.timeout(TIMEOUT_S):
                await readable(pipe.fileno())
            pipe.recv_bytes()
        return time.perf_counter() - began, time.process_time() - cpu
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()
            process.close()
        for pipe in pipes:
            pipe.close()


def bare_engine(pipe: Connection) -> None:
    """Say that this process is there, and stay until it is killed."""
    pipe.send_bytes(b"x")
    time.sleep(1000)


def _what_is_there() -> set[str]:
    """Name the processes and descriptors of this process."""
    found = {f"process {child.pid}" for child in psutil.Process().children(recursive=True)}
    for fd in os.listdir("/proc/self/fd") if sys.platform == "linux" else []:
        try:
            found.add(f"descriptor {fd}: {os.readlink(f'/proc/self/fd/{fd}')}")
        except FileNotFoundError:  # the one that lists the directory
            continue
    return found


if __name__ == "__main__":
    sys.exit(main("startup", __doc__, run, repeat=20, seconds=1.0))
