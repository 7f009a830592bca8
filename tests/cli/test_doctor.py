from __future__ import annotations

import errno
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from support import private_segments

from aioshm import ShmRingBuffer
from aioshm.cli import doctor, tables
from aioshm.cli.app import run
from aioshm.process.placement import NumaNode

SHM = Path("/dev/shm")

needs_named_segments = pytest.mark.skipif(not SHM.is_dir(), reason="named segments cannot be listed here")

ORPHAN = """
import os, sys
from aioshm import ShmRingBuffer
from aioshm.ring import segment
segment.NAME_PREFIX = sys.argv[1]
ring = ShmRingBuffer(1, 4096, 2, backing="named")
print(ring.name, flush=True)
os._exit(0)
"""


@pytest.fixture
def orphan():
    with private_segments() as prefix:
        done = subprocess.run([sys.executable, "-c", ORPHAN, prefix], capture_output=True, text=True, check=True)
        path = SHM / done.stdout.strip()
        assert path.exists()
        yield path
        path.unlink(missing_ok=True)


@pytest.fixture
def held():
    ring = ShmRingBuffer(1, 4096, 2, backing="named")
    yield SHM / ring.name
    ring.close()


def examined(capsys, *args):
    run(["doctor", "--json", *args])
    return json.loads(capsys.readouterr().out)


def test_text_has_verdicts_and_names_the_extra_to_install(capsys, monkeypatch):
    there = doctor.importlib.util.find_spec
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None if name == "torch" else there(name))
    monkeypatch.setenv("COLUMNS", "1000")  # longer lines are folded
    run(["doctor"])
    out = capsys.readouterr().out
    assert "pip install 'aioshm[torch]'" in out
    for line in out.partition("\n\n")[0].splitlines():
        assert line.split()[0] in ("good", "note", "bad")


def test_json_has_a_finding_for_each_check(capsys):
    assert run(["doctor", "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    findings = {finding["name"]: finding for finding in json.loads(out)["findings"]}
    for name in ("python", "platform", "usable CPUs", "memory order", "eventfd", "memfd", "/dev/shm", "zeromq"):
        assert findings[name]["found"]
        assert findings[name]["verdict"] in ("good", "note")
    for name in ("uvloop", "torch"):
        installed = importlib.util.find_spec(name) is not None
        assert findings[name]["verdict"] == ("good" if installed else "note")


@needs_named_segments
def test_orphan_is_listed_and_removed(capsys, monkeypatch, held, orphan):
    names = [entry["name"] for entry in examined(capsys)["orphans"] if not entry["removed"]]
    assert orphan.name in names
    assert held.name not in names
    monkeypatch.setenv("COLUMNS", "200")
    assert run(["doctor"]) == 0
    out = capsys.readouterr().out
    assert f"left behind: {orphan}" in out
    assert "aioshm doctor --clean" in out
    assert orphan.exists()

    removed = {entry["name"]: entry for entry in examined(capsys, "--clean")["orphans"]}
    assert removed[orphan.name]["removed"]
    assert removed[orphan.name]["bytes"] > 8192
    assert held.name not in removed
    assert not orphan.exists()
    assert held.exists()


def test_bad_settings_are_bad(capsys, monkeypatch):
    monkeypatch.setenv("AIOSHM_STALL_WARNING_S", "soon")
    assert run(["doctor", "--json"]) == 1
    out, err = capsys.readouterr()
    finding = next(finding for finding in json.loads(out)["findings"] if finding["name"] == "settings")
    assert finding["verdict"] == "bad"
    assert "AIOSHM_STALL_WARNING_S" in finding["found"]
    assert err == "aioshm: not in order: settings\n"


def verdict_of(name):
    return next(finding for finding in doctor.examine() if finding.name == name)


def forbidden(*_):
    raise PermissionError(errno.EPERM, "Operation not permitted")


def process_one(handles, zombies):
    """Return the patches for a process 1."""
    return [
        ("sys.platform", "linux"),
        ("aioshm.cli.doctor.handles_child_exits", lambda _: handles),
        ("aioshm.cli.doctor.zombies_of", lambda _: zombies),
    ]


def native(wanted):
    """Return the patches for native parts that do not run."""
    return [
        ("aioshm.cli.doctor.native_core", False),
        ("aioshm.cli.doctor.NativeEncoder", None),
        ("aioshm.cli.doctor.native_wanted", lambda: wanted),
    ]


MISSING = [("importlib.util.find_spec", lambda _: None)]
ORDER = ("aioshm.cli.doctor.STRONG_ORDER", False)


@pytest.mark.parametrize(
    ("name", "patches", "verdict", "found", "advice"),
    [
        ("memory order", [ORDER, ("aioshm.cli.doctor.FULL_FENCE", True)], "good", "weak, and", ""),
        ("memory order", [ORDER, ("aioshm.cli.doctor.FULL_FENCE", False)], "note", "weak",
         "without the native core, a 5 ms recheck timer bounds every parked wait"),
        ("usable CPUs", [("aioshm.cli.doctor.usable_cpus", lambda: 1)], "note", "1", "allow two or more CPUs"),
        ("process 1", process_one(True, []), "good", "reaps orphans", ""),
        ("process 1", process_one(None, []), "good", "not visible", ""),
        ("process 1", process_one(False, []), "note", "does not handle SIGCHLD", "start the container with --init"),
        ("process 1", process_one(True, [7, 8]), "note", "has 2 zombies", "start the container with --init"),
        ("memfd", [("os.memfd_create", forbidden)], "bad", "memfd_create: Operation not permitted",
         "AIOSHM_BACKING=named"),
        ("/dev/shm", [("os.statvfs", lambda _: SimpleNamespace(f_bavail=16, f_frsize=4096))], "note", "0 MiB free",
         "--shm-size"),
        ("uvloop", MISSING, "note", "not installed", ": pip install 'aioshm[uvloop]'"),
        ("torch", MISSING, "note", "not installed", ": pip install 'aioshm[torch]'"),
        ("native core", [("aioshm.cli.doctor.native_core", True)], "good", "runs", ""),
        ("native core", native(wanted=True), "note", "not built", "install a C compiler"),
        ("native core", native(wanted=False), "note", "switched off", "AIOSHM_NATIVE=0"),
        ("native encoder", native(wanted=True), "note", "not built", "install a C compiler"),
    ],
)  # fmt: skip
def test_finding_has_its_verdict_and_advice(monkeypatch, name, patches, verdict, found, advice):
    for target, value in patches:
        monkeypatch.setattr(target, value, raising=False)
    finding = verdict_of(name)
    assert finding.verdict == verdict
    assert found in finding.found
    assert advice in finding.advice


@pytest.mark.parametrize(
    ("wake_up_us", "load", "verdict", "advice"),
    [
        (60, 0.5, "good", ""),
        (4000, 0.5, "note", "measured under load (load average 0.5, usable CPUs 2): repeat it on a quiet machine; "
         "a wake-up counts as 200 us until waiting ends have measured it again"),
    ],
)  # fmt: skip
def test_wake_up_that_was_measured_under_load_is_called_so(capsys, monkeypatch, wake_up_us, load, verdict, advice):
    monkeypatch.setattr(doctor, "measure_wake_up", lambda **_: wake_up_us * 1000)
    monkeypatch.setattr(doctor, "usable_cpus", lambda: 2)
    monkeypatch.setattr("os.getloadavg", lambda: (load, 9.0, 9.0))
    report = examined(capsys)
    assert report["costs"] == {"wake_up_ns": min(wake_up_us, 200) * 1000}
    (finding,) = [finding for finding in report["findings"] if finding["name"] == "waiting"]
    assert f"wake-up {tables.duration(wake_up_us / 1e6)};" in finding["found"]
    assert (finding["verdict"], finding["advice"]) == (verdict, advice)


def test_topology_is_shown_in_80_columns_and_in_json(capsys, monkeypatch):
    gib = 1 << 30
    nodes = {0: NumaNode(frozenset(range(4)), 16 * gib, 3 * gib // 2), 1: NumaNode(frozenset(range(4, 8)))}
    monkeypatch.setattr(doctor, "allowed_cpus", lambda: frozenset({0, 1, 2, 6}))
    monkeypatch.setattr(doctor, "sockets", lambda: {0: frozenset(range(8))})
    monkeypatch.setattr(doctor, "numa_nodes", lambda: nodes)
    monkeypatch.setenv("COLUMNS", "80")
    run(["doctor"])
    lines = capsys.readouterr().out.splitlines()
    first = lines.index("CPUs allowed to this process: 0-2,6")
    assert lines[first + 1 : first + 5] == [
        "socket 0: CPUs 0-7",
        "NUMA node 0: CPUs 0-3, 16.0 GiB of memory, 1.5 GiB free",
        "NUMA node 1: CPUs 4-7",
        "",
    ]
    assert max(map(len, lines)) <= 80
    assert examined(capsys)["topology"] == {
        "allowed_cpus": [0, 1, 2, 6],
        "sockets": {"0": [0, 1, 2, 3, 4, 5, 6, 7]},
        "numa_nodes": {
            "0": {"cpus": [0, 1, 2, 3], "memory_bytes": 16 << 30, "free_bytes": 3 << 29},
            "1": {"cpus": [4, 5, 6, 7], "memory_bytes": None, "free_bytes": None},
        },
    }
