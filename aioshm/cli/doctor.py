"""``aioshm doctor``: checks this machine, advises, and lists leftover shared memory."""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
import typer
import zmq
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import aioshm
from aioshm.cli.app import CommandFailed, print_json
from aioshm.cli.tables import duration
from aioshm.config import Options, native_wanted
from aioshm.events.protocol.encoding import NativeEncoder
from aioshm.process.placement import allowed_cpus, numa_nodes, show_ranges, sockets, usable_cpus
from aioshm.process.proc import handles_child_exits, zombies_of
from aioshm.queue.base import MAX_CHUNK_BYTES, MAX_CHUNKS
from aioshm.ring.cores import FULL_FENCE, RECHECK_S, STRONG_ORDER, native_core
from aioshm.ring.layout import Layout
from aioshm.ring.segment import orphans, remove_orphan
from aioshm.wait.policy import WakeUpCost, bounded
from aioshm.wait.timer import measure_wake_up

Verdict: TypeAlias = Literal["good", "note", "bad"]

_SHM_DIR = Path("/dev/shm")
_MIB = 1 << 20
_GIB = 1 << 30
_STYLES: dict[Verdict, str] = {"good": "green", "note": "yellow", "bad": "bold red"}


class Finding(msgspec.Struct, frozen=True):
    """The result of one check."""

    name: str
    # "note": aioshm works, but could work better; "bad": a part will not work.
    verdict: Verdict
    found: str
    # The consequence, and the remedy; may be empty.
    advice: str = ""


def doctor(
    clean: Annotated[bool, typer.Option("--clean", help="Remove the segments that no process holds.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Check this machine for aioshm, and list leftover shared memory."""
    wake_up_ns = measure_wake_up(timers=20)
    findings = [*examine(), _waiting(wake_up_ns, os.getloadavg()[0])]
    left = [_orphan(name, remove=clean) for name in orphans()]
    if as_json:
        report = {"aioshm": aioshm.__version__, "findings": findings, "topology": _topology()}
        print_json(report | {"costs": {"wake_up_ns": bounded(wake_up_ns)}, "orphans": left})
    else:
        console = Console(highlight=False)
        _show(console, findings)
        _show_topology(console)
        _show_orphans(console, left)
    bad = [finding.name for finding in findings if finding.verdict == "bad"]
    if bad:
        raise CommandFailed(f"not in order: {', '.join(bad)}")


def examine() -> Iterator[Finding]:
    """Run all checks; they change nothing."""
    yield Finding("python", "good", f"{platform.python_implementation()} {platform.python_version()}")
    system = f"{platform.system()} {platform.release()} on {platform.machine()}"
    if sys.platform in ("linux", "darwin"):
        yield Finding("platform", "good", system)
    else:
        yield Finding("platform", "bad", system, "aioshm runs on Linux and macOS")
    yield _settings()
    if (cpus := usable_cpus()) == 1:
        yield Finding("usable CPUs", "note", "1", "nothing spins, every wait sleeps: allow two or more CPUs")
    else:
        yield Finding("usable CPUs", "good", str(cpus))
    if sys.platform == "linux":
        yield _process_one()
    yield _native("native core", native_core, "every message costs some microseconds more")
    yield _native("native encoder", NativeEncoder is not None, "batches of KV-cache events take twice as long")
    yield _memory_order()
    yield _tried("eventfd", "eventfd", lambda: os.eventfd(0), "a byte on a socket wakes the other end; that is slower")
    yield _tried(
        "memfd",
        "memfd_create",
        lambda: os.memfd_create("aioshm-doctor"),
        "rings are named segments, which a crash at the wrong moment leaves behind: aioshm doctor --clean",
        refused="set AIOSHM_BACKING=named, or let the container's seccomp profile allow it",
    )
    yield _named_memory()
    libraries = f"pyzmq {zmq.__version__}, libzmq {zmq.zmq_version()}"
    if zmq.has("ipc"):
        yield Finding("zeromq", "good", libraries)
    else:
        advice = "events over ipc:// need it: install another pyzmq"
        yield Finding("zeromq", "bad", f"{libraries} without ipc", advice)
    yield _package("uvloop", "a faster event loop: pip install 'aioshm[uvloop]'")
    yield _package("numpy", "needed for arrays and tensors only: pip install numpy")
    yield _package("torch", "needed for tensors only: pip install 'aioshm[torch]'")


def _settings() -> Finding:
    names = sorted(name for name in os.environ if name.startswith("AIOSHM_"))
    try:
        Options.from_env()
    except ValueError as error:
        return Finding("settings", "bad", str(error), "correct or unset the variable")
    return Finding("settings", "good", ", ".join(f"{name}={os.environ[name]}" for name in names) or "the defaults")


def _process_one() -> Finding:
    """Check whether process 1 of this pid namespace reaps orphans."""
    name = "process 1"
    handles = handles_child_exits(1)
    if handles is None:
        return Finding(name, "good", "not visible from here")
    zombies = len(zombies_of(1))
    if handles and not zombies:
        return Finding(name, "good", "reaps orphans")
    found = f"has {zombies} zombies"
    if not zombies:
        found = "does not handle SIGCHLD"
    advice = (
        "orphans stay zombies: start the container with --init; a supervisor that is process 1, or calls "
        "adopt_orphans(), reaps what its engines and workers leave"
    )
    return Finding(name, "note", found, advice)


def _native(name: str, runs: bool, price: str) -> Finding:
    if runs:
        return Finding(name, "good", "runs")
    if not native_wanted():
        return Finding(name, "note", "switched off", f"AIOSHM_NATIVE=0: {price}")
    # pip reuses its wheel without the native core until its cache entry is removed.
    again = "pip cache remove aioshm; AIOSHM_NATIVE=1 pip install --force-reinstall --no-deps aioshm"
    return Finding(name, "note", "not built", f"{price}: install a C compiler, then: {again}")


def _memory_order() -> Finding:
    if STRONG_ORDER:
        return Finding("memory order", "good", "strong")
    if FULL_FENCE:
        return Finding("memory order", "good", "weak, and the native core has the fences for it")
    return Finding(
        "memory order",
        "note",
        "weak",
        f"without the native core, a {RECHECK_S * 1000:.0f} ms recheck timer bounds every parked wait; nothing to do",
    )


def _waiting(wake_up_ns: int, load: float) -> Finding:
    used = WakeUpCost(lambda: wake_up_ns)
    hot_gap = duration(used.hot_gap_ns / 1e9)
    found = f"wake-up {duration(wake_up_ns / 1e9)}; busy-waits while messages are less than {hot_gap} apart"
    cpus = usable_cpus()
    if load < cpus and used.ns == wake_up_ns:
        return Finding("waiting", "good", found)
    advice = f"measured under load (load average {load:.1f}, usable CPUs {cpus}): repeat it on a quiet machine"
    if used.ns != wake_up_ns:
        advice += f"; a wake-up counts as {duration(used.ns / 1e9)} until waiting ends have measured it again"
    return Finding("waiting", "note", found, advice)


def _tried(
    name: str,
    function: str,
    make: Callable[[], int],
    without: str,
    refused: str = "let the container's seccomp profile allow it",
) -> Finding:
    if not hasattr(os, function):
        return Finding(name, "note", f"not on {platform.system()}", without)
    try:
        os.close(make())
    except OSError as error:  # a seccomp filter may forbid the call
        return Finding(name, "bad", f"{function}: {error.strerror}", refused)
    return Finding(name, "good", "works")


def _named_memory() -> Finding:
    name = str(_SHM_DIR)
    try:
        fs = os.statvfs(_SHM_DIR)
    except OSError as error:
        return Finding(name, "note", error.strerror or "missing", "backing='named' works only where there is one")
    free = fs.f_bavail * fs.f_frsize
    found = f"{free / _MIB:,.0f} MiB free"
    needed = Layout.of(1, MAX_CHUNK_BYTES, MAX_CHUNKS).total_bytes
    if free < needed:
        return Finding(
            name,
            "note",
            found,
            f"a ring of the default size with backing='named' needs {needed / _MIB:,.0f} MiB: "
            "enlarge it (docker: --shm-size) or use smaller chunks; backing='memfd' does not need it",
        )
    # Truncating a segment ends all processes of its queue with SIGBUS.
    return Finding(name, "good", f"{found}, for backing='named': not sealed against being truncated, as a memfd is")


def _package(name: str, without: str) -> Finding:
    if importlib.util.find_spec(name) is None:
        return Finding(name, "note", "not installed", without)
    try:
        return Finding(name, "good", metadata.version(name))
    except metadata.PackageNotFoundError:
        return Finding(name, "good", "installed, of unknown version")


def _orphan(name: str, *, remove: bool) -> dict[str, Any]:
    """Describe a named segment that no process has open; ``remove`` removes it."""
    try:
        size = (_SHM_DIR / name).stat().st_size
    except FileNotFoundError:
        size = 0
    return {"name": name, "bytes": size, "removed": remove and remove_orphan(name)}


def _show(console: Console, findings: list[Finding]) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    for finding in findings:
        verdict = f"[{_STYLES[finding.verdict]}]{finding.verdict}[/]"
        # Escaped: the extra of a `pip install 'aioshm[torch]'` is no markup.
        table.add_row(verdict, finding.name, escape(" - ".join(filter(None, (finding.found, finding.advice)))))
    console.print(table)


def _topology() -> dict[str, Any]:
    nodes = {}
    for number, node in numa_nodes().items():
        nodes[number] = {
            "cpus": sorted(node.cpus),
            "memory_bytes": node.memory_bytes,
            "free_bytes": node.free_bytes,
        }
    return {
        "allowed_cpus": sorted(allowed_cpus()),
        "sockets": {number: sorted(cpus) for number, cpus in sockets().items()},
        "numa_nodes": nodes,
    }


def _show_topology(console: Console) -> None:
    found = _topology()
    if found["allowed_cpus"]:
        console.print()
        console.print(f"CPUs allowed to this process: {show_ranges(found['allowed_cpus'])}")
    for number, cpus in found["sockets"].items():
        console.print(f"socket {number}: CPUs {show_ranges(cpus)}")
    for number, node in found["numa_nodes"].items():
        line = f"NUMA node {number}: CPUs {show_ranges(node['cpus'])}"
        if node["memory_bytes"] is not None:
            line += f", {node['memory_bytes'] / _GIB:.1f} GiB of memory"
        if node["free_bytes"] is not None:
            line += f", {node['free_bytes'] / _GIB:.1f} GiB free"
        console.print(line)


def _show_orphans(console: Console, left: list[dict[str, Any]]) -> None:
    console.print()
    if not left:
        console.print("no shared memory was left behind")
    for orphan in left:
        state = "left behind"
        if orphan["removed"]:
            state = "removed"
        size = f"{orphan['bytes'] / _MIB:,.1f} MiB"
        console.print(f"{state}: {_SHM_DIR / orphan['name']} ({size}), which no process has open")
    if not all(orphan["removed"] for orphan in left):
        console.print("remove with: aioshm doctor --clean")
